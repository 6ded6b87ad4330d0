"""The tree attention operator: one interface, several backends."""
