"""The inner nodes of a tree, bottom-up."""
