"""Recipes: models and settings of every task of the paper, trained from the command line."""
