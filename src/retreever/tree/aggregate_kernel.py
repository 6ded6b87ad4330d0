"""The paper's aggregator as one Triton kernel: a transformer layer among children, then their mean, level by level.

Inference only. In plain torch a level costs some twenty launches, and a tree of 256 tokens has seven levels that must
wait for one another; here a level is at most one launch, and only children, weights and parents touch memory.
A program holds some whole families of children as rows of one tile. Attention is done for all rows at once and masked
so that a row sees its own family only: tile and families are small, and the tensor cores make the waste free.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from retreever.nn.blocks import AttentionBlock
from retreever.nn.norm_linear_kernel import normalise, project
from retreever.nn.product_kernel import precision
from retreever.tree.plan import TreePlan, tree_depth

# Rows of a tile on long levels and on short ones, and the number of families up to which a level is short: there the
# time is that of one program, not of the GPU.
ROWS, SHORT_ROWS, SHORT = 64, 32, 4096


@triton.jit
def families_up(
    nodes, mask, batch_stride, mask_stride, first_child, first_parent, parents, first, count, families,
    norm_w, norm_b, q_w, kv_w, out_w, out_b, feed_w, feed_b, up_w, up_b, down_w, down_b,
    CHILDREN: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, HIDDEN: tl.constexpr,
    PRE: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Parents first..first+count of all `families`: rows first_parent.. of `nodes` from rows first_child.. ."""
    E: tl.constexpr = D // HEADS
    row = tl.arange(0, ROWS)
    family = first + row // CHILDREN
    inside = (row < count * CHILDREN) & (family < families)
    batch, parent = family // parents, family % parents
    child = first_child + parent * CHILDREN + row % CHILDREN
    real = inside
    if mask is not None:
        real = inside & (tl.load(mask + batch * mask_stride + child, mask=inside, other=0) != 0)
    column = tl.arange(0, D)
    where = nodes + (batch * batch_stride + child * D)[:, None] + column[None, :]
    x = tl.load(where, mask=inside[:, None], other=0.0).to(tl.float32)
    normed = normalise(x, tl.load(norm_w + column), tl.load(norm_b + column), D)
    context = normed if PRE else x
    # A row sees the real children of its family; a family of padding alone sees itself, and is dropped in the end.
    sees = (row[:, None] // CHILDREN == row[None, :] // CHILDREN) & real[None, :]
    sees = sees | (row[:, None] == row[None, :])
    head = tl.arange(0, E)
    attended = tl.zeros([ROWS, D], tl.float32)
    for h in tl.static_range(HEADS):
        q = project(normed, q_w, column, h * E + head, D, PRECISION) * SCALE
        k = project(context, kv_w, column, h * E + head, D, PRECISION)
        v = project(context, kv_w, column, D + h * E + head, D, PRECISION)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = tl.where(sees, scores, float("-inf"))
        weights = tl.exp(scores - tl.max(scores, axis=1)[:, None])
        weights = weights / tl.sum(weights, axis=1)[:, None]
        mixed = tl.dot(weights, v, input_precision=PRECISION)
        attended += project(mixed, out_w + h * E, head, column, D, PRECISION)
    out = (x if PRE else normed) + attended + tl.load(out_b + column)[None, :]
    fed = normalise(out, tl.load(feed_w + column), tl.load(feed_b + column), D)
    total = (out if PRE else fed) + tl.load(down_b + column)[None, :]
    for start in tl.static_range(0, HIDDEN, D):
        unit = start + column
        value = project(fed, up_w, column, unit, D, PRECISION) + tl.load(up_b + unit)[None, :]
        gate = project(fed, up_w, column, HIDDEN + unit, D, PRECISION) + tl.load(up_b + HIDDEN + unit)[None, :]
        gated = value * 0.5 * gate * (1.0 + tl.math.erf(gate * 0.7071067811865476))
        total += project(gated, down_w + start, column, column, HIDDEN, PRECISION)
    # The mean over each family's real children, as a product with a matrix of ones and zeros.
    member = ((row[:, None] == row[None, :] // CHILDREN) & real[None, :]).to(tl.float32)
    mean = tl.dot(member, total, input_precision=PRECISION) / tl.maximum(tl.sum(member, axis=1), 1.0)[:, None]
    target = first + row
    write = (row < count) & (target < families)
    address = (target // parents) * batch_stride + (first_parent + target % parents) * D
    tl.store(nodes + address[:, None] + column[None, :], mean.to(nodes.dtype.element_ty), mask=write[:, None])


@triton.jit(do_not_specialize=["first_child", "first_parent", "parents", "families", "count", "steps"])
def aggregate_up(
    nodes, mask, batch_stride, mask_stride, first_child, first_parent, parents, families, count, steps,
    norm_w, norm_b, q_w, kv_w, out_w, out_b, feed_w, feed_b, up_w, up_b, down_w, down_b,
    CHILDREN: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, HIDDEN: tl.constexpr,
    PRE: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`count` families per program, and `steps` levels up: what a program makes, it needs alone for the next level."""
    first = tl.program_id(0).to(tl.int64) * count
    for _ in range(steps):
        families_up(
            nodes, mask, batch_stride, mask_stride, first_child, first_parent, parents, first, count, families,
            norm_w, norm_b, q_w, kv_w, out_w, out_b, feed_w, feed_b, up_w, up_b, down_w, down_b,
            CHILDREN, HEADS, D, HIDDEN, PRE, SCALE, PRECISION, ROWS,
        )  # fmt: skip
        tl.debug_barrier()  # the next level reads what other threads of this program have just written
        first, count, families, parents = (
            first // CHILDREN,
            count // CHILDREN,
            families // CHILDREN,
            parents // CHILDREN,
        )
        first_child, first_parent = first_parent, first_parent - parents


def fits(layer: AttentionBlock, branch: int, tokens: Tensor) -> bool:
    """Whether the kernel can do this layer on these tokens: sizes that fill tensor-core tiles, small families."""
    feed = layer.feed_forward
    if feed is None or tokens.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    dim, hidden = layer.to_q.in_features, feed.down.in_features
    power_of_two = dim & (dim - 1) == 0
    wide = power_of_two and dim // layer.heads >= 16 and dim <= 128 and hidden % dim == 0
    plain = layer.residual in ("pre", "normalised") and layer.to_q.bias is None and layer.context_norm is None
    return wide and plain and branch <= 16 and tokens.dtype == layer.to_q.weight.dtype


def aggregate_levels(layer: AttentionBlock, plan: TreePlan, nodes: Tensor, mask: Tensor | None) -> None:
    """Fill all inner levels of `nodes` (b, t, d), whose leaves are already in place, in place.

    Long levels are a launch each. Once a level is too short to keep a GPU busy, a launch climbs as many levels as its
    programs can without waiting for one another.
    """
    level, children, first_child = plan.depth, plan.block, plan.leaf_offset
    while level:
        parents = plan.branch**level
        short = nodes.shape[0] * parents <= SHORT
        rows = SHORT_ROWS if short else ROWS
        steps = min(level, climb(rows, children)) if short and children == plan.branch else 1
        _launch(layer, nodes, mask, first_child, plan.offset(level), parents, children, rows, steps)
        level, children = level - steps, plan.branch
        first_child = plan.offset(level + 1)


def climb(rows: int, children: int) -> int:
    """How many levels a tile of `rows` rows can climb: rows hold children^climb nodes of one subtree."""
    return tree_depth(rows + 1, children)


def _launch(
    layer: AttentionBlock,
    nodes: Tensor,
    mask: Tensor | None,
    child: int,
    parent: int,
    parents: int,
    children: int,
    rows: int,
    steps: int,
) -> None:
    feed = layer.feed_forward
    assert feed is not None
    families = nodes.shape[0] * parents
    count = rows // children if steps == 1 else children ** (climb(rows, children) - 1)
    dim, heads = nodes.shape[2], layer.heads
    aggregate_up[(-(-families // count),)](
        nodes, mask, nodes.stride(0), 0 if mask is None else mask.stride(0),
        child, parent, parents, families, count, steps,
        layer.norm.weight, layer.norm.bias, layer.to_q.weight, layer.to_kv.weight,
        layer.to_out.weight, layer.to_out.bias, layer.feed_norm.weight, layer.feed_norm.bias,
        feed.up.weight, feed.up.bias, feed.down.weight, feed.down.bias,
        children, heads, dim, feed.down.in_features, layer.residual == "pre", (dim // heads) ** -0.5,
        precision(nodes.dtype), rows, num_warps=4, num_stages=1,
    )  # fmt: skip
