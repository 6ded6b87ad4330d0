"""What follows attention in a transformer layer as one differentiable step, for training on a CPU.

`finish_rows` stands for `AttentionBlock.finish`. Between the products everything is one pass over the rows: bias,
dropout, residual and norm; bias and gate; and their gradients with the sums that biases need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from retreever.cpu.numba_here import plain_floats
from retreever.cpu.team import row_parts, share_out
from retreever.nn.dropout import keep
from retreever.nn.geglu import geglu

if TYPE_CHECKING:
    from retreever.nn.blocks import AttentionBlock

Rows = Float[Tensor, "b m d"]
EPSILON = 1e-5  # of the norm


def block_fits(block: AttentionBlock, residual: Rows) -> bool:
    """Whether the block's end can be trained this way on a CPU."""
    feed = block.feed_forward
    wanted = residual.is_cpu and block.training and torch.is_grad_enabled()
    if not wanted or feed is None or not feed.fused or block.residual == "none":
        return False
    watched = torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None
    if watched or torch.is_autocast_enabled("cpu") or getattr(block.feed_norm, "eps", 0.0) != EPSILON:
        return False
    return plain_floats(residual, *(weight.data for weight in _weights(block)))


def finish_rows(block: AttentionBlock, residual: Rows, attended: Float[Tensor, "b m h e"]) -> Rows:
    """The block's output from what was attended to."""
    feed: Any = block.feed_forward
    p = feed.dropout.p if block.training else 0.0
    factor = keep(tuple(residual.shape), p, residual) if p else None
    function: Any = _Finish
    out: Tensor = function.apply(residual, attended.flatten(-2), factor, block.residual == "pre", *_weights(block))
    return out


def _weights(block: AttentionBlock) -> list[Tensor]:
    feed: Any = block.feed_forward
    parts: tuple[Any, ...] = (block.to_out, block.feed_norm, feed.up, feed.down)
    return [weight for part in parts for weight in (part.weight, part.bias)]


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, residual: Rows, attended: Rows, factor: Tensor | None, pre: bool, *weights: Tensor) -> Rows:
        d, hidden = residual.shape[-1], weights[-2].shape[1]
        given = [None if x is None else x.reshape(-1, d) for x in (residual, attended, factor)]
        count = residual.numel() // d
        made = [residual.new_empty(count, width) for width in (d, d, 2 * hidden, hidden, d)]
        parts = row_parts(count, residual)
        share_out(lambda rows: _up(_cut(given, rows), _cut(made, rows), pre, weights), parts)
        ctx.pre, ctx.parts = pre, parts
        ctx.save_for_backward(residual, attended, factor, *made[:-1], *weights)
        return made[-1].view(residual.shape)

    @staticmethod
    def backward(ctx: Any, grad: Rows) -> tuple[Tensor | None, ...]:
        residual, attended, factor, added, normed, up, gated, *weights = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: by operations that have derivatives themselves
            return _again(ctx, residual, attended, factor, weights, grad)
        flat = [None if x is None else x.reshape(added.shape) for x in (grad.contiguous(), attended, factor)]
        given = [*flat, added, normed, up, gated]
        made = [torch.empty_like(added), torch.empty_like(added)]
        slopes = share_out(lambda rows: _down(_cut(given, rows), _cut(made, rows), ctx.pre, weights), ctx.parts)
        of_weights = slopes[0] if len(slopes) == 1 else (torch.stack(each).sum(0) for each in zip(*slopes, strict=True))
        return made[0].view(residual.shape), made[1].view(attended.shape), None, None, *of_weights


def _cut(tensors: Sequence[Tensor | None], rows: slice) -> list[Any]:
    return [None if tensor is None else tensor[rows] for tensor in tensors]


def _up(given: list[Any], made: list[Tensor], pre: bool, weights: Sequence[Tensor]) -> None:
    """Some rows forward: `given` are residual, attended and the factor of dropout."""
    from retreever.cpu.geglu_kernel import gate_rows
    from retreever.cpu.rows_kernel import sum_norm_rows, sum_rows

    residual, attended, factor = given
    added, normed, up, gated, result = made
    out, out_bias, norm, norm_bias, w_up, up_bias, down, down_bias = weights
    torch.mm(attended, out.t(), out=added)
    sum_norm_rows(added, out_bias, residual, norm, norm_bias, normed)
    torch.mm(normed, w_up.t(), out=up)
    gate_rows(up, up_bias, gated)
    torch.mm(gated, down.t(), out=result)
    sum_rows(result, down_bias, factor, added if pre else normed)


def _down(given: list[Any], made: list[Tensor], pre: bool, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Some rows backward: writes the gradients of residual and attended and returns those of the weights."""
    from retreever.cpu.geglu_kernel import gate_gradient_rows
    from retreever.cpu.rows_kernel import norm_gradient_rows

    grad, attended, factor, added, normed, up, gated = given
    of_added, of_attended = made
    out, _, norm, _, w_up, up_bias, down, _ = weights
    fed = grad if factor is None else grad * factor
    of_up = torch.empty_like(up)
    of_up_bias = gate_gradient_rows(fed @ down, up, up_bias, of_up)
    slope = of_up @ w_up
    if not pre:
        slope.add_(grad)
    sums = norm_gradient_rows(slope, added, norm, grad if pre else None, of_added)
    torch.mm(of_added, out, out=of_attended)
    of_out = of_added.t() @ attended
    return of_out, sums[2], sums[0], sums[1], of_up.t() @ normed, of_up_bias, fed.t() @ gated, fed.sum(dim=0)


def _again(
    ctx: Any, residual: Tensor, attended: Tensor, factor: Tensor | None, weights: list[Tensor], grad: Tensor
) -> tuple[Tensor | None, ...]:
    # Views, for one of them may depend on another in ways that are not this function's.
    residual, attended, *weights = (tensor.view_as(tensor) for tensor in (residual, attended, *weights))
    out, out_bias, norm, norm_bias, up, up_bias, down, down_bias = weights
    added = residual + F.linear(attended, out, out_bias)
    normed = F.layer_norm(added, norm.shape, norm, norm_bias, EPSILON)
    delta = F.linear(geglu(F.linear(normed, up, up_bias)), down, down_bias)
    result = (added if ctx.pre else normed) + (delta if factor is None else delta * factor)
    places = (residual, attended, None, None, *weights)
    inputs = [tensor for tensor in places if tensor is not None and tensor.requires_grad]
    slopes = iter(torch.autograd.grad(result, inputs, grad, create_graph=True))
    return tuple(next(slopes) if tensor is not None and tensor.requires_grad else None for tensor in places)
