"""Pretrained weights from the command line: made from runs, scored, listed."""
