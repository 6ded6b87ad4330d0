"""Softmax attention over all tokens."""
