"""Whether a call has to be differentiable, and the error where a kernel cannot be differentiated twice."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from retreever.errors import BackendError


def needs_gradient(*tensors: Tensor) -> bool:
    """Whether a gradient of any of the tensors is wanted."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def refuse_second_derivatives(backward: Any, impl: str) -> None:
    """Give the custom op that computes gradients by kernels of `impl` a derivative that raises `BackendError`."""

    def refuse(*_: object) -> NoReturn:
        raise BackendError(f"impl='{impl}' has no second derivatives; impl='reference' has them")

    backward.register_autograd(refuse)
