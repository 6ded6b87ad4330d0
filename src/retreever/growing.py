"""Change the tokens of a tree: append, replace and evict them, and fold a tree and the one beside it into one.

`TreeCrossAttention` has these as methods. A change computes the nodes above the changed leaves again: O(log n)
aggregations per token, and as many keys and values.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from retreever.arguments import check_int, reject
from retreever.attention_build import TreeModule, build_means, build_tree, key_values
from retreever.checks import check_tensor
from retreever.growing_inputs import check_change, check_some_left, find_slots
from retreever.nn.plain import plain_projection
from retreever.ops.aggregate.api import climb_means as climb_means_by_kernel
from retreever.ops.aggregate.api import climbs_means, renew, renews
from retreever.ops.backend import choose
from retreever.ops.search.api import counted_keys
from retreever.tree.aggregate import plain_weights
from retreever.tree.grow import batch_of, climb, enlarged, levels_above, recount, write
from retreever.tree.grow_means import climb_means
from retreever.tree.order import in_order
from retreever.tree.value import Tree

FOLD = 1 / 8  # trees sorted by keys are built anew when this share of their tokens lies beside
Tokens = Float[Tensor, "b m c"]
Real = Bool[Tensor, "b m"] | None
Slots = Int[Tensor, "b m"]


def build_growing(module: TreeModule, context: Tokens, mask: Real, capacity: int) -> Tree:
    """A tree that grows, with room for `capacity` tokens: nothing is computed for those that are not there yet."""
    return _with_room(module, build_tree(module, context, mask, context.shape[1]), capacity, in_place=True)


def append_tokens(
    module: TreeModule, tree: Tree, tokens: Tokens, mask: Real, window: int | None, in_place: bool
) -> Tree:
    """`TreeCrossAttention.append`."""
    check_change(module, tree, tokens, in_place, mask)
    if window is not None:
        check_int("window", window, 1)
        if mask is not None or not tree.grows:
            reject("window", "None with a mask, and for trees that do not grow", window)
    n = tokens.shape[1]
    if n == 0:
        return tree
    if not tree.grows:
        return _append_beside(module, tree, tokens, mask, in_place)
    tree = _with_room(module, tree, tree.longest + n if window is None else window, in_place)
    assert tree.length is not None
    added: int | Tensor = n
    real = None
    if mask is not None:  # real tokens first: the slots behind them stay empty
        added = mask.sum(dim=1)
        real = torch.arange(n, device=mask.device) < added[:, None]
        tokens = in_order(tokens, (~mask).to(torch.int8).argsort(dim=1, stable=True))
        tokens = tokens.masked_fill(~real[..., None], 0)  # padding may hold NaN
    slots = tree.length[:, None]
    if n > 1:
        slots = slots + torch.arange(n, device=tokens.device)
    if window is not None:  # and no mask
        slots, real, tokens = _ascending(slots[:, -window:] % window, None, tokens[:, -window:])
    if slots.is_cuda:  # a captured append can be replayed more often than there is room
        slots = slots.clamp_max(tree.plan.n - 1)
    refresh(module, tree, slots, real, tokens, run=window is None)
    tree.length.add_(added)
    longest = int(tree.length.max()) if mask is not None and mask.is_cpu else tree.longest + n
    return replace(tree, longest=longest)


def change_tokens(module: TreeModule, tree: Tree, index: int | Tensor, tokens: Tokens | None, in_place: bool) -> Tree:
    """`TreeCrossAttention.replace`, and `evict` without tokens."""
    check_change(module, tree, tokens, in_place)
    if not tree.grows:
        reject("tree", "one that grows (built with capacity=)", "one of fixed tokens")
    slots = find_slots(tree, index, None if tokens is None else tokens.shape[1])
    if slots.shape[1] == 0:
        return tree
    if tokens is None:
        check_some_left(tree, slots)
    tree = tree if in_place else tree.clone()
    real = None
    if tokens is None:
        real = torch.zeros_like(slots, dtype=torch.bool)
        tokens = tree.keys.new_zeros(*slots.shape, module.block.kdim)
    refresh(module, tree, *_ascending(slots, real, tokens), run=False)
    return tree


def refresh(module: TreeModule, tree: Tree, slots: Slots, real: Real, tokens: Tokens | None, run: bool) -> None:
    """Put `tokens` on ascending leaf slots and compute all nodes above them again, in the memory of `tree`.

    Without tokens the leaves stay as they are. Without `real` all are. `run`: the slots follow one another. Padding
    holds zeros.
    """
    if module.aggregator is None:
        _refresh_means(module, tree, slots, real, tokens, run)
        return
    if tokens is not None and slots.shape[1] == 1 and _renewed(module, tree, slots, real, tokens):
        return
    levels, rows = levels_above(tree.plan, slots, run)
    recount(tree, levels, rows, slots.shape[1], real)
    batch = batch_of(rows)
    assert tree.nodes is not None
    if tokens is not None:
        write(tree.nodes, batch, rows[:, : slots.shape[1]], tokens)
    climb(tree, slots, levels, run, module.aggregator, module.detach, module.impl)
    for part, new in zip((tree.keys, tree.values), key_values(module, tree.nodes[batch, rows]), strict=True):
        write(part, batch, rows, new)
    _write_logs(tree, rows)


def _renewed(module: TreeModule, tree: Tree, slots: Slots, real: Real, tokens: Tokens) -> bool:
    """`refresh` of one leaf in every row by two launches, where there are kernels for it; False where there are not."""
    assert tree.nodes is not None and tree.count is not None and tree.mask is not None and module.aggregator is not None
    if any(choose(operator, module.impl, tree.nodes) != "triton" for operator in ("climb", "aggregate")):
        return False
    layer, projection = plain_weights(module.aggregator), plain_projection(module.block)
    if layer is None or projection is None:
        return False
    pair, logs, weights = (tree.keys, tree.values), (tree.log_count, tree.counted), (layer, projection)
    if not renews(tree.plan, tree.nodes, pair, (tree.count, tree.mask, *logs), weights):
        return False
    renew(tree.nodes, pair, tree.count, tree.mask, logs, slots, real, tokens, tree.plan, weights)
    return True


def _refresh_means(module: TreeModule, tree: Tree, slots: Slots, real: Real, tokens: Tokens | None, run: bool) -> None:
    """`refresh` of a tree of means."""
    pair = None if tokens is None else key_values(module, tokens)
    assert tree.count is not None and tree.mask is not None
    nodes, logs = (tree.keys, tree.values), (tree.log_count, tree.counted)
    backend = choose("climb", module.impl, tree.keys)
    if pair is not None and climbs_means(backend, nodes, (tree.count, tree.mask, *logs), slots.shape[1]):
        leaves = (pair[0][:, 0], pair[1][:, 0])
        own = None if real is None else real[:, 0]
        climb_means_by_kernel(backend, nodes, tree.count, tree.mask, logs, slots[:, 0], own, leaves, tree.plan)
        return
    levels, rows = levels_above(tree.plan, slots, run)
    recount(tree, levels, rows, slots.shape[1], real)
    batch, width = batch_of(rows), slots.shape[1]
    for part, new in zip((tree.keys, tree.values), pair or (), strict=False):
        write(part, batch, rows[:, :width], new)
    climb_means(tree, levels, rows, width)
    _write_logs(tree, rows)


def _write_logs(tree: Tree, rows: Int[Tensor, "b r"]) -> None:
    """Write log counts and counted keys of `rows`, in trees that have them."""
    if tree.log_count is None or tree.counted is None or tree.count is None:
        return
    batch = batch_of(rows)
    logs = tree.count[batch, rows].clamp_min(1).log().to(tree.log_count.dtype)
    write(tree.log_count, batch, rows, logs)
    write(tree.counted, batch, rows, counted_keys(tree.keys[batch, rows], logs))


def fold_tree(module: TreeModule, tree: Tree, order: Int[Tensor, "b n"] | None) -> Tree:
    """`TreeCrossAttention.fold`."""
    check_change(module, tree, None, in_place=False)
    if tree.grows or tree.beside is None:
        return tree
    sorts = module.order == "keys"
    (first, real), (beside, beside_real) = (_tokens_of(part) for part in (tree, tree.beside))
    tokens = [torch.cat(pair, dim=1) for pair in zip(first, beside, strict=True)]
    mask: Tensor | None = torch.cat([real, beside_real], dim=1)
    assert mask is not None
    if order is not None:
        if sorts:
            reject("order", "None, since the module sorts tokens by their keys", "an order")
        check_tensor("order", order, "b n", b=mask.shape[0], n=mask.shape[1])
        tokens, mask = [in_order(part, order) for part in tokens], in_order(mask, order)
    mask = None if bool(mask.all()) else mask
    if module.aggregator is None:
        keys, values = tokens
        found = build_means(module, keys, values, mask)
    else:
        found = build_tree(module, tokens[0], mask, None)
    return found if order is None else replace(found, order=order)


def _append_beside(module: TreeModule, tree: Tree, tokens: Tokens, mask: Real, in_place: bool) -> Tree:
    """Append to the growing tree beside a tree of fixed tokens; the first tokens make it."""
    if tree.beside is None:
        if mask is not None and not bool(mask.any(dim=1).all()):
            reject("mask", "a real token in every row, for the first tokens beside a tree", "rows with none")
        beside = build_growing(module, tokens, mask, tokens.shape[1])
    else:
        beside = append_tokens(module, tree.beside, tokens, mask, None, in_place)
    tree = replace(tree, beside=beside)
    return fold_tree(module, tree, None) if module.order == "keys" and tree.beside_share > FOLD else tree


def _with_room(module: TreeModule, tree: Tree, needed: int, in_place: bool) -> Tree:
    """A tree that may be written to, with room for `needed` tokens."""
    if needed <= tree.plan.n:
        return tree if in_place else tree.clone()
    larger = enlarged(tree, needed)
    assert larger.mask is not None
    slot = larger.plan.leaf_offset
    first = torch.zeros(len(tree), 1, dtype=torch.int64, device=tree.keys.device)
    refresh(module, larger, first, larger.mask[:, slot : slot + 1], None, run=False)
    return larger


def _tokens_of(tree: Tree) -> tuple[list[Tensor], Bool[Tensor, "b n"]]:
    """Tokens of a tree (of a tree of means their keys and values) as the caller gave them, and which are real."""
    plan, n = tree.plan, tree.tokens if tree.grows else tree.plan.n
    stored = (tree.keys, tree.values) if tree.nodes is None else (tree.nodes,)
    leaves = [part[:, plan.leaf_offset :] for part in stored]
    mask = tree.keys.new_ones(tree.keys.shape[:2], dtype=torch.bool) if tree.mask is None else tree.mask
    real = mask[:, plan.leaf_offset :]
    if not tree.grows:  # spread over blocks: real ones first, then to the places where the caller had them
        packed = (~real).to(torch.int8).argsort(dim=1, stable=True)[:, :n]
        if tree.order is not None:
            packed = packed.gather(1, tree.order.argsort(dim=1))
        return [in_order(part, packed) for part in leaves], real.gather(1, packed)
    return [part[:, :n] for part in leaves], real[:, :n]


def _ascending(slots: Slots, real: Real, tokens: Tokens) -> tuple[Slots, Real, Tokens]:
    """All three with the slots of every row ascending."""
    if slots.shape[1] == 1:
        return slots, real, tokens
    slots, order = slots.sort(dim=1)
    return slots, None if real is None else real.gather(1, order), in_order(tokens, order)
