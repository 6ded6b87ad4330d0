"""The gate of GEGLU with a backward pass of its own: no copies of halves, and nothing is put together again."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from retreever.cpu.numba_here import plain_floats


def gate(up: Float[Tensor, "*b two_h"], opened: Float[Tensor, "*b h"] | None, gated: Float[Tensor, "*b h"]) -> None:
    """Write value * gelu(gate) into `gated`, and gelu(gate), which the gradient needs, into `opened`.

    Kernels that make it again (`gates_again`) have none.
    """
    if opened is None:
        from retreever.cpu.geglu_kernel import gate_rows

        gate_rows(up, None, gated)
        return
    value, gates = up.chunk(2, dim=-1)
    torch.ops.aten.gelu.out(gates, out=opened)
    torch.mul(value, opened, out=gated)


def gate_backward(
    grad: Float[Tensor, "*b h"], up: Float[Tensor, "*b two_h"], opened: Float[Tensor, "*b h"] | None, out: Tensor
) -> None:
    """Write the gradient of `up` into `out`."""
    if opened is None:
        from retreever.cpu.geglu_kernel import gate_gradient_rows

        gate_gradient_rows(grad, up, None, out)
        return
    value, gates = up.chunk(2, dim=-1)
    d_value, d_gates = out.chunk(2, dim=-1)
    torch.mul(grad, opened, out=d_value)
    torch.ops.aten.gelu_backward.grad_input(grad * value, gates, grad_input=d_gates)


def gates_again(up: Float[Tensor, "*b two_h"]) -> bool:
    """Whether kernels take `up`: on a CPU making gelu(gate) again takes less time than keeping it."""
    return plain_floats(up)


def geglu(up: Float[Tensor, "*b two_h"]) -> Float[Tensor, "*b h"]:
    """value * gelu(gate) of the two halves of `up`, for autograd."""
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        value, gates = up.chunk(2, dim=-1)  # torch.func takes plain operations alone
        return value * F.gelu(gates)
    function: Any = _Geglu
    gated: Tensor = function.apply(up)
    return gated


class _Geglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, up: Tensor) -> Tensor:
        half = (*up.shape[:-1], up.shape[-1] // 2)
        opened, gated = None if gates_again(up) else up.new_empty(half), up.new_empty(half)
        gate(up, opened, gated)
        ctx.save_for_backward(up, opened)
        return gated

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        up, opened = ctx.saved_tensors
        if not torch.is_grad_enabled():
            gate_backward(grad, up, opened, slope := torch.empty_like(up))
            return slope
        value, gates = up.chunk(2, dim=-1)  # create_graph: by operations that have derivatives themselves
        return torch.cat([grad * F.gelu(gates), torch.ops.aten.gelu_backward(grad * value, gates)], dim=-1)
