"""Recipes: for every task of the paper its models and settings, as they are trained from the command line."""
