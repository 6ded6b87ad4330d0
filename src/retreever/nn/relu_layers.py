"""Linear layers with ReLU between them as one differentiable step, for training on a CPU.

Torch would go over every hidden layer three times forward (bias, product, ReLU) and three times backward (ReLU, bias,
product); here bias and ReLU go together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from retreever.cpu.numba_here import plain_floats
from retreever.cpu.team import row_parts, share_out


def layers_fit(x: Float[Tensor, "*b i"], layers: Sequence[nn.Module]) -> bool:
    """Whether training goes this way: a gradient is wanted, on a CPU, and the layers are of this kind."""
    wanted = x.is_cpu and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if not wanted or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    linears, between = layers[::2], layers[1::2]
    kinds = all(type(layer) is nn.Linear and layer.bias is not None for layer in linears)
    kinds = kinds and all(type(layer) is nn.ReLU for layer in between) and len(between) > 0
    return kinds and plain_floats(x, *(weight.data for layer in linears for weight in layer.parameters()))


def relu_layers(x: Float[Tensor, "*b i"], layers: Sequence[nn.Module]) -> Float[Tensor, "*b o"]:
    """The output of `layers`, linear ones and ReLU in turn."""
    function: Any = _Layers
    out: Tensor = function.apply(x, *(weight for layer in layers[::2] for weight in (layer.weight, layer.bias)))
    return out


class _Layers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        made = [rows.new_empty(len(rows), len(weight)) for weight in weights[::2]]
        ctx.parts = row_parts(len(rows), x)
        share_out(lambda part: _up([rows[part], *(each[part] for each in made)], weights), ctx.parts)
        ctx.save_for_backward(x, *weights, *made[:-1])
        return made[-1].view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *rest = ctx.saved_tensors
        layers = (len(rest) + 1) // 3  # two weights of each, and what lies between them
        weights, hidden = rest[: 2 * layers], [x.reshape(-1, x.shape[-1]), *rest[2 * layers :]]
        if torch.is_grad_enabled():  # create_graph: by operations that have derivatives themselves
            return _again(x, weights, grad)
        slope = grad.reshape(-1, grad.shape[-1])
        below = torch.empty_like(hidden[0]) if ctx.needs_input_grad[0] else None

        def down(part: slice) -> list[Tensor]:
            out = None if below is None else below[part]
            return _down(slope[part], [each[part] for each in hidden], weights, out)

        slopes = share_out(down, ctx.parts)
        total = slopes[0] if len(slopes) == 1 else [torch.stack(each).sum(0) for each in zip(*slopes, strict=True)]
        return None if below is None else below.view(x.shape), *total


def _up(made: list[Tensor], weights: Sequence[Tensor]) -> None:
    """Fill in `made`, what lies between the layers and behind the last one, from its first."""
    from retreever.cpu.relu_kernel import bias_relu_rows

    for i in range(0, len(weights) - 2, 2):
        bias_relu_rows(torch.mm(made[i // 2], weights[i].t(), out=made[i // 2 + 1]), weights[i + 1])
    torch.addmm(weights[-1], made[-2], weights[-2].t(), out=made[-1])


def _down(slope: Tensor, hidden: list[Tensor], weights: list[Tensor], below: Tensor | None) -> list[Tensor]:
    """Gradients of the weights; that of the input goes into `below`."""
    from retreever.cpu.relu_kernel import relu_gradient_rows

    slopes = [slope.sum(dim=0)]
    for i in range(len(hidden) - 1, 0, -1):
        slopes.append(slope.t() @ hidden[i])
        slope = slope @ weights[2 * i]
        slopes.append(relu_gradient_rows(slope, hidden[i]))
    slopes.append(slope.t() @ hidden[0])
    if below is not None:
        torch.mm(slope, weights[0], out=below)
    return slopes[::-1]


def _again(x: Tensor, weights: list[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
    # Views, for one of them may depend on another in ways that are not this function's.
    x, *weights = (tensor.view_as(tensor) for tensor in (x, *weights))
    inputs = [tensor for tensor in (x, *weights) if tensor.requires_grad]
    out = x
    for i in range(0, len(weights), 2):
        out = F.linear(F.relu(out) if i else out, weights[i], weights[i + 1])
    slopes = iter(torch.autograd.grad(out, inputs, grad, create_graph=True))
    return tuple(next(slopes) if tensor.requires_grad else None for tensor in (x, *weights))
