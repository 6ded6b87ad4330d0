"""Reading budgets: the nodes of a tree that a query reads when it may read more than one path leaves."""
