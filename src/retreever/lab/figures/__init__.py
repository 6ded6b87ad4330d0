"""Figures: predictions, searches of single queries, learning curves, scores against tokens."""
