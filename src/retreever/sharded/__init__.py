"""A tree over several processes: every one holds subtrees, all hold the levels above, queries travel."""
