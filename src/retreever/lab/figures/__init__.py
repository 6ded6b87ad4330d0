"""Figures: predictions, searches of single queries, learning curves, scores against tokens.

They need matplotlib (the extra `plot`), imported on first use.
"""
