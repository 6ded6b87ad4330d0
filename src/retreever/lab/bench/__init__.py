"""Benchmarks, each one command: latency, tree building, memory of inference, training speed."""
