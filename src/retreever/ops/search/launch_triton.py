"""Tree attention on CUDA tensors: custom operators that launch the Triton kernels.

Without a gradient the kernel is launched directly; otherwise, and under torch.compile, the call goes through the
custom operators below. Every launch has a fixed grid and no call waits for the device, so all of them can be captured
in a CUDA graph. There are no atomics: results and gradients are the same bits in every run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from retreever.ops.gradients import needs_gradient, refuse_second_derivatives
from retreever.ops.launching_triton import Launcher, on_device_of
from retreever.ops.search import backward_triton as gradients
from retreever.ops.search import forward_triton as kernels
from retreever.ops.search.inputs import SearchInputs
from retreever.ops.search.tiles_triton import Operands, TreeShape, node_tile, query_tile, reads_late

descend = Launcher(kernels.descend)
Forward = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def search_triton(inputs: SearchInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, path, log_prob and entropy of every query."""
    q, keys, values, plan, node_mask, noise, choices = inputs[:7]
    shape = (plan.branch, plan.depth, plan.block)
    if torch.compiler.is_compiling() or type(q) is not Tensor or needs_gradient(q, keys, values):
        return _forward(q, keys, values, node_mask, noise, choices, *shape)[:4]
    # A direct call saves the cost of the custom operator.
    return _descend(q, keys, values, node_mask, noise, choices, *shape, save=False)[:4]


@torch.library.custom_op("retreever::tree_attention_triton", mutates_args=())
def _forward(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    node_mask: Tensor | None,
    noise: Tensor | None,
    choices: Tensor | None,
    branch: int,
    depth: int,
    block: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _descend(q, keys, values, node_mask, noise, choices, branch, depth, block, save=True)


@_forward.register_fake
def _(q: Tensor, *_: object) -> Forward:
    return _new_outputs(q, save=True)


@torch.library.custom_op("retreever::tree_attention_triton_backward", mutates_args=())
def _backward(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    node_mask: Tensor | None,
    path: Tensor,
    output: Tensor,
    lse: Tensor,
    d_output: Tensor,
    d_log_prob: Tensor,
    d_entropy: Tensor,
    branch: int,
    depth: int,
    block: int,
) -> tuple[Tensor, Tensor, Tensor]:
    tree = TreeShape(branch, depth, block)
    d_outputs = (d_output.contiguous(), d_log_prob.contiguous(), d_entropy.contiguous())
    with on_device_of(q):
        return _gradients(Operands(q, keys, values, node_mask), tree, path, output, lse, d_outputs)


@_backward.register_fake
def _(q: Tensor, keys: Tensor, values: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), keys.new_empty(keys.shape), values.new_empty(values.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Forward) -> None:
    q, keys, values, node_mask, _, _, *ctx.shape = inputs
    result, path, _, _, lse = output
    ctx.mark_non_differentiable(path, lse)
    ctx.save_for_backward(q, keys, values, node_mask, path, result, lse)


def _differentiate(
    ctx: Any, d_output: Tensor, d_path: None, d_log_prob: Tensor, d_entropy: Tensor, d_lse: None
) -> tuple[Tensor | None, ...]:
    d_inputs = _backward(*ctx.saved_tensors, d_output, d_log_prob, d_entropy, *ctx.shape)
    return (*d_inputs, None, None, None, None, None, None)


_forward.register_autograd(_differentiate, setup_context=_save)
refuse_second_derivatives(_backward, "triton")


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _new_outputs(q: Tensor, save: bool) -> Forward:
    b, m, h, _ = q.shape
    path = torch.empty((b, m), dtype=torch.int64, device=q.device)
    log_prob = torch.empty((b, m), dtype=torch.float32, device=q.device)
    lse = torch.empty((b, m, h), dtype=torch.float32, device=q.device) if save else log_prob
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), path, log_prob, torch.empty_like(log_prob), lse


def _descend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    node_mask: Tensor | None,
    noise: Tensor | None,
    choices: Tensor | None,
    branch: int,
    depth: int,
    block: int,
    save: bool,
) -> Forward:
    """Launch the search. With `save` the last result is the logsumexp per head, which the gradient needs."""
    tree, operands = TreeShape(branch, depth, block), Operands(q, keys, values, node_mask)
    output, path, log_prob, entropy, lse = results = _new_outputs(q, save)
    b, m, h, e = q.shape
    tile = query_tile((b * m).bit_length(), branch if depth else 1, tree.widest, h, e)
    late = reads_late(q, tree, tile)
    # With 64 registers per thread, 32 warps fit on a multiprocessor, and 4,096 queries run in one wave.
    options = tile.options | {"maxnreg": 64} if late else tile.options
    with on_device_of(q):
        descend(
            -(-b * m // tile.queries),
            (*operands.tensors, _dense(noise), _dense(choices), output, path, log_prob, entropy, lse if save else None),
            (b * m, m, depth, block, tree.leaf_offset, *operands.strides),
            (operands.unit, branch, h, e, *operands.head_strides, *tile.shape, late),
            **options,
        )
    return results


def _gradients(
    operands: Operands,
    tree: TreeShape,
    path: Tensor,
    output: Tensor,
    lse: Tensor,
    d_outputs: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the gradient of the queries, then that of the nodes over the queries sorted by path."""
    q, keys, values, mask = operands.tensors
    b, m, h, e = q.shape
    shape = (tree.depth, tree.block, tree.leaf_offset)
    d_q, d_keys, d_values = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, keys, values))
    delta, stats = lse.new_empty(b, m, h), lse.new_empty(b, m, tree.depth, 2, h)
    tile = query_tile((b * m).bit_length(), tree.branch if tree.depth else 1, tree.widest, h, e)
    gradients.query_gradient[(-(-b * m // tile.queries),)](
        *operands.tensors, path, output, lse, *d_outputs, d_q, delta, stats,
        b * m, m, *shape, *operands.strides,
        operands.unit, tree.branch, h, e, *operands.head_strides, *tile.shape, **tile.options,
    )  # fmt: skip
    paths, order = path.sort(dim=1, stable=True)
    blocks = torch.arange(tree.blocks + 1, device=path.device).expand(b, -1).contiguous()
    starts = torch.searchsorted(paths, blocks, out_int32=True)
    nodes = node_tile(tree.widest, h, e)
    cuts = -(-m // nodes.length) - 1
    partial = lse.new_empty(tree.depth + 1, cuts, b, 2, tree.widest, h, e) if cuts > 0 else delta  # never read then
    pieces = [-(-children // nodes.children) for children in (tree.widest, tree.branch, tree.block)]
    inner = tree.leaf_offset // tree.branch
    programs = ((tree.depth + 1) * cuts * pieces[0], inner * pieces[1] + tree.blocks * pieces[2])
    for parts, count in zip((True, False), programs, strict=True):
        if count > 0:
            gradients.node_gradient[(count * b,)](
                q, keys, values, mask, lse, *d_outputs, delta, stats, paths, order, starts, partial, d_keys, d_values,
                b, m, *shape, tree.widest, cuts, *operands.strides, parts,
                operands.unit, tree.branch, h, e, *operands.head_strides, *nodes.shape, **nodes.options,
            )  # fmt: skip
    return d_q, d_keys, d_values
