"""Kernels and threads for training and searching on a CPU."""
