"""Tree attention: one pass down the tree that searches and attends."""
