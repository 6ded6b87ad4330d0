"""A transformer layer's steps around attention as two differentiable functions, by fused kernels on CUDA.

`project_fused` stands for `AttentionBlock.start` and `key_values` of self-attention, `finish_fused` for `finish`. Three
launches and a few for the gradients replace some eighty, which is what small models spend their time on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from retreever.nn.dropout import keep
from retreever.nn.triton_here import triton_installed

if TYPE_CHECKING:
    from retreever.nn.blocks import AttentionBlock

WIDTHS = (16, 32, 64, 128)
UNITS = 32  # hidden units a program looks at together
Heads = Float[Tensor, "b n h e"]
Rows = Float[Tensor, "b n d"]


def fits(block: AttentionBlock, x: Rows) -> bool:
    """Whether the kernels can train this block on `x`: CUDA, float32, a narrow layer with norm and feed-forward."""
    if not (block.fused and x.is_cuda and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return False
    feed: Any = block.feed_forward
    if feed is None or block.residual == "none" or x.dtype != torch.float32 or not triton_installed():
        return False
    whole = x.shape[-1] in WIDTHS and feed.down.in_features % UNITS == 0 and x.numel() > 0
    watched = torch._C._functorch.peek_interpreter_stack() is not None
    return whole and not watched and not torch.is_autocast_enabled("cuda")


def project_fused(block: AttentionBlock, x: Rows) -> tuple[Rows, Heads, Heads, Heads]:
    """LN x, and queries, keys and values of a self-attention layer."""
    norm: Any = block.norm
    function: Any = Project
    parts: tuple[Tensor, ...] = function.apply(
        x, norm.weight, norm.bias, block.to_q.weight, block.to_kv.weight, norm.eps, block.shared_norm, block.heads
    )
    normed, q, keys, values = parts
    return normed, q, keys, values


def finish_fused(block: AttentionBlock, residual: Rows, attended: Heads) -> Rows:
    """The block's output from what was attended to."""
    feed, norm, out = (getattr(block, name) for name in ("feed_forward", "feed_norm", "to_out"))
    p = feed.dropout.p if block.training else 0.0
    factor = keep(tuple(residual.shape), p, residual) if p else None
    pairs = ((part.weight, part.bias) for part in (out, norm, feed.up, feed.down))
    weights = [tensor for pair in pairs for tensor in pair]
    function: Any = Finish
    result: Tensor = function.apply(residual, attended, factor, norm.eps, block.residual == "pre", *weights)
    return result


class Project(torch.autograd.Function):
    """x -> LN x, queries, keys, values."""

    @staticmethod
    def forward(
        ctx: Any, x: Rows, norm_w: Tensor, norm_b: Tensor, w_q: Tensor, w_kv: Tensor, eps: float, shared: bool, h: int
    ) -> tuple[Rows, Heads, Heads, Heads]:
        """One launch."""
        from retreever.nn.block_kernel import project_rows

        x = x.contiguous()
        b, n, d = x.shape
        normed, q, kv = torch.empty_like(x), torch.empty_like(x), x.new_empty(b, n, 2 * d)
        grid, shared_by_all = launch(x)
        project_rows[grid](
            x, norm_w, norm_b, w_q, w_kv, normed, q, kv, b * n, eps, SHARED=shared,
            Q_STRIDE=d, KV_STRIDE=2 * d, **shared_by_all,
        )  # fmt: skip
        ctx.save_for_backward(x, normed, norm_w, w_q, w_kv)
        ctx.eps, ctx.shared = eps, shared
        ctx.set_materialize_grads(False)
        keys, values = kv.view(b, n, 2, h, d // h).unbind(dim=2)
        return normed, q.view(b, n, h, d // h), keys, values

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_normed: Tensor | None, d_q: Tensor | None, d_keys: Tensor | None, d_values: Tensor | None
    ) -> tuple[Any, ...]:
        """Two launches, and a sum."""
        from retreever.nn.block_kernel import project_gradients
        from retreever.nn.weight_kernel import weight_gradients

        x, normed, norm_w, w_q, w_kv = ctx.saved_tensors
        d_q, d_keys, d_values = (
            torch.zeros_like(x) if slope is None else slope.contiguous() for slope in (d_q, d_keys, d_values)
        )
        extra = None if d_normed is None else d_normed.contiguous()
        d_x, d_kv = torch.empty_like(x), x.new_empty(*x.shape[:-1], 2 * x.shape[-1])
        grid, shared_by_all = launch(x)
        sums = x.new_empty(*grid, 2, x.shape[-1])
        project_gradients[grid](
            x, norm_w, w_q, w_kv, extra, d_q, d_keys, d_values, d_x, d_kv, sums, x.numel() // x.shape[-1], ctx.eps,
            SHARED=ctx.shared, EXTRA="nothing" if extra is None else "normed", STRIDE=x.shape[-1], KEEP=True,
            **shared_by_all,
        )  # fmt: skip
        source = normed if ctx.shared else x
        pairs = ((d_q.view(x.shape), normed), (d_kv, source))
        layers = [(slope.flatten(0, -2), tokens.flatten(0, -2), False) for slope, tokens in pairs]
        q, kv, norm = weight_gradients(layers, sums)
        return d_x, *norm.unbind(), q, kv, None, None, None


class Finish(torch.autograd.Function):
    """residual, attended -> the block's output."""

    @staticmethod
    def forward(
        ctx: Any, residual: Rows, attended: Heads, factor: Tensor | None, eps: float, pre: bool, *weights: Tensor
    ) -> Rows:
        """One launch."""
        from retreever.nn.block_kernel import finish_rows

        residual, attended = residual.contiguous(), attended.contiguous()
        added, result = torch.empty_like(residual), torch.empty_like(residual)
        grid, shared_by_all = launch(residual)
        count, hidden = residual.numel() // residual.shape[-1], weights[6].shape[1]
        finish_rows[grid](
            attended, residual, factor, None, *weights, added, result, count, eps, H=hidden, PRE=pre,
            DROP=factor is not None, FAMILY=0, COUNTS=False, UNITS=UNITS, **shared_by_all,
        )  # fmt: skip
        ctx.save_for_backward(attended, factor, added, *weights)
        ctx.eps, ctx.pre = eps, pre
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Two launches, and a sum."""
        from retreever.nn.block_kernel import finish_gradients
        from retreever.nn.weight_kernel import weight_gradients

        attended, factor, added, w_out, _, norm_w, norm_b, w_up, b_up, w_down, _ = ctx.saved_tensors
        grad, hidden, rows = grad.contiguous(), w_down.shape[1], added.shape[:-1]
        d_added, d_attended, normed = (torch.empty_like(added) for _ in range(3))
        d_fed = grad if factor is None else torch.empty_like(added)
        d_up, gated = added.new_empty(*rows, 2 * hidden), added.new_empty(*rows, hidden)
        grid, shared_by_all = launch(added)
        sums = added.new_empty(*grid, 2, added.shape[-1])
        finish_gradients[grid](
            grad, added, factor, None, w_out, norm_w, norm_b, w_up, b_up, w_down, d_added, d_attended, d_fed, d_up,
            normed, gated, sums, rows.numel(), ctx.eps, H=hidden, PRE=ctx.pre, DROP=factor is not None, FAMILY=0,
            COUNTS=False, UNITS=UNITS, **shared_by_all,
        )  # fmt: skip
        pairs = ((d_added, attended.view(added.shape)), (d_up, normed), (d_fed, gated))
        layers = [(slope.flatten(0, -2), source.flatten(0, -2), True) for slope, source in pairs]
        *out, up, up_b, down, down_b, norm = weight_gradients(layers, sums)
        of_weights = (*out, *norm.unbind(), up, up_b, down, down_b)
        return d_added, d_attended.view(attended.shape), None, None, None, *of_weights


def launch(x: Float[Tensor, "*b d"]) -> tuple[tuple[int], dict[str, Any]]:
    """The grid over the rows of x, and arguments all kernels take. Few rows are shared out in smaller pieces."""
    from retreever.nn.product_kernel import precision

    d = x.shape[-1]
    count = x.numel() // d
    rows = 64 if count >= 64 * 256 and d <= 64 else 32
    return (-(-count // rows),), {"D": d, "PRECISION": precision(x.dtype), "ROWS": rows, "num_warps": 4}
