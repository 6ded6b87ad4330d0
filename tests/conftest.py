"""Shared by all tests: without a GPU, Triton kernels run in its interpreter (decided before they are imported)."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
