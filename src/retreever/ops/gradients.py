"""Whether a call has to be differentiable; kernels without gradients run only where it need not."""

from __future__ import annotations

import torch
from torch import Tensor


def needs_gradient(*tensors: Tensor) -> bool:
    """Whether a gradient of any of the tensors is wanted."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
