"""Checks of the arguments that change a tree."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from retreever.arguments import check_bool, reject
from retreever.attention_build import TreeModule, makers, stamped
from retreever.checks import (
    check_finite,
    check_float,
    check_like_weights,
    check_mask,
    check_same,
    check_tensor,
)
from retreever.ops.gradients import needs_gradient
from retreever.tree.value import Tree

Tokens = Float[Tensor, "b m c"]
Slots = Int[Tensor, "b m"]


def check_change(
    module: TreeModule, tree: Tree, tokens: Tokens | None, in_place: bool, mask: Bool[Tensor, "b m"] | None = None
) -> None:
    """`tree` must be one of `module`, `tokens` must fit it, and `in_place` must be possible if asked for."""
    if not isinstance(tree, Tree):
        reject("tree", "a Tree made by build()", type(tree).__name__)
    if tokens is not None:
        check_tensor("tokens", tokens, "b m c", b=len(tree), c=module.block.kdim)
        check_float("tokens", tokens)
        check_like_weights("tokens", tokens, module)
        check_same("tokens", tokens, "the tree", tree.keys, dtype=False)
        if mask is not None:
            check_mask("mask", mask, "b m", b=tokens.shape[0], m=tokens.shape[1])
            check_same("mask", mask, "tokens", tokens, dtype=False)
        if tokens.is_cpu:  # reading values on CUDA would make every call wait for the device
            check_finite("tokens", tokens, mask)
    if tree.stamp is not None and stamped():
        tree.stamp.check(module, lambda: makers(module))
    check_plain(module, "tree")
    check_bool("in_place", in_place)
    written = tree if tree.grows else tree.beside
    if in_place and written is not None:
        _check_writable(module, written, tokens)


def _check_writable(module: TreeModule, tree: Tree, tokens: Tokens | None) -> None:
    """`tree` must lie in memory, without gradients."""
    if tree.mapped:
        reject("in_place", "False, since the tree is mapped from a file", True)
    parts = [part for part in (tree.nodes, tree.keys, tree.values, tokens) if part is not None]
    if any(part.requires_grad for part in parts) or (torch.is_grad_enabled() and needs_gradient(*module.parameters())):
        reject("in_place", "False where gradients are recorded (see torch.no_grad)", True)
    if tree.keys.is_inference() and not torch.is_inference_mode_enabled():
        reject("in_place", "False for a tree built in inference mode, outside of it", True)


def check_plain(module: TreeModule, argument: str) -> None:
    """Nodes of a tree that grows, or lies on several processes, are all made in one way."""
    if module.correction is not None or module.mean_levels:
        reject(argument, "a module without correct and mean_levels, for trees that grow or are spread", "one with them")


def find_slots(tree: Tree, index: int | Tensor, count: int | None) -> Slots:
    """Leaf slots (b, m) of an index, which must be those of tokens; on CUDA their values are not checked."""
    device, b = tree.keys.device, len(tree)
    if isinstance(index, int):
        index = torch.full((1,), index, device=device)  # filled there: a copy would wait for the device
    if not isinstance(index, Tensor) or index.dtype != torch.int64 or index.dim() not in (1, 2):
        reject("index", "an int, or int64 numbers (m) or (b, m)", index if isinstance(index, int) else type(index))
    slots = index.expand(b, -1) if index.dim() == 1 else index
    m = slots.shape[1] if count is None else count
    check_tensor("index", slots, "b m", b=b, m=m)
    check_same("index", slots, "the tree", tree.keys, dtype=False)
    if slots.is_cpu and slots.numel():
        last = min(tree.longest, tree.plan.n) - 1
        if not 0 <= int(slots.min()) <= int(slots.max()) <= last:
            reject("index", f"slots from 0 to {last}", f"{int(slots.min())} to {int(slots.max())}")
        ordered = slots.sort(dim=1).values
        if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
            reject("index", "every slot once", "one that repeats")
    return slots


def check_some_left(tree: Tree, slots: Slots) -> None:
    """Every row must keep a token: a search of nothing has no answer. Not checked on CUDA."""
    if not slots.is_cpu:
        return
    assert tree.count is not None
    gone = tree.count.gather(1, slots + tree.plan.leaf_offset).sum(dim=1)
    if bool((tree.count[:, : tree.plan.branch].sum(dim=1) <= gone).any()):
        reject("index", "slots that leave a token in every row", "all tokens of a row")
