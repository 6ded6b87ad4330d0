"""Operators with kernels of their own: one folder each, chosen in one place (`backend`)."""
