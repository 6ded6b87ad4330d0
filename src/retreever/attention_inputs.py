"""Checks of the arguments of the attention modules: context, queries and decisions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from retreever.arguments import check_int, reject
from retreever.checks import (
    check_any_real,
    check_finite,
    check_float,
    check_like_weights,
    check_mask,
    check_same,
    check_tensor,
    values_readable,
)
from retreever.errors import InputError
from retreever.nn.blocks import AttentionBlock
from retreever.sharded.tree import ShardedTree
from retreever.tree.value import Tree


def check_context(module: nn.Module, block: AttentionBlock, context: Tensor, mask: Tensor | None) -> None:
    """Check the width, dtype, device and mask of `context`; real tokens must be finite, at least one per row."""
    _check_tokens(module, block, context, mask)
    if context.shape[1] == 0:
        reject("context", "at least one token", tuple(context.shape))
    if mask is not None:
        check_any_real("mask", mask)
    check_finite("context", context, mask)


def shard_error(module: nn.Module, block: AttentionBlock, context: Tensor, mask: Tensor | None) -> InputError | None:
    """What is wrong with the tokens of one process of several, which may have none; None where nothing is."""
    try:
        _check_tokens(module, block, context, mask)
        check_finite("context", context, mask)
    except InputError as error:
        return error
    return None


def _check_tokens(module: nn.Module, block: AttentionBlock, context: Tensor, mask: Tensor | None) -> None:
    check_tensor("context", context, "b n c", c=block.kdim)
    check_float("context", context)
    check_like_weights("context", context, module)
    if mask is not None:
        check_mask("mask", mask, "b n", b=context.shape[0], n=context.shape[1])
        check_same("mask", mask, "context", context, dtype=False)


def check_query(module: nn.Module, block: AttentionBlock, query: Tensor, keys: Tensor) -> None:
    """Check the width, dtype and device of `query` against `block`, the weights of `module` and `keys`."""
    if not _fits(block, query, keys):
        _explain(module, block, query, keys)
    if not query.is_cuda:  # reading values on CUDA would make every call wait for the device
        check_finite("query", query)


def _fits(block: AttentionBlock, query: Tensor, keys: Tensor) -> bool:
    """Whether everything fits together, checked quickly; what does not, or cannot be told, is left to `_explain`."""
    weight = block.to_out._parameters.get("weight")
    if weight is None or not isinstance(query, Tensor) or query.dim() != 3:
        return False
    b, _, dim = query.shape
    return (
        dim == block.dim
        and keys.shape[0] == b
        and keys.shape[2:] == (block.heads, block.width)
        and query.dtype == keys.dtype == weight.dtype
        and weight.dtype.is_floating_point
        and query.layout == torch.strided
        and ((query.is_cpu and keys.is_cpu and weight.is_cpu) or query.device == keys.device == weight.device)
    )


def _explain(module: nn.Module, block: AttentionBlock, query: Tensor, keys: Tensor) -> None:
    """Raise the `InputError` that names what does not fit, if anything does not."""
    check_tensor("query", query, "b m d", b=keys.shape[0], d=block.dim)
    check_float("query", query)
    check_like_weights("query", query, module)
    check_same("query", query, "the context", keys, dtype=False)
    if query.dtype != keys.dtype and not torch.is_autocast_enabled(query.device.type):
        check_same("query", query, "the context", keys)
    check_tensor("keys", keys, "b n h e", h=block.heads, e=block.width)


def check_budget(budget: int | None) -> None:
    """Check a number of tokens to read; None is one path."""
    if budget is not None:
        check_int("budget", budget, 1)


def check_search(
    module: nn.Module,
    block: AttentionBlock,
    query: Tensor,
    tree: Tree | ShardedTree,
    noise: Tensor | None,
    choices: Tensor | None,
) -> None:
    """Check that `query`, `noise` and `choices` fit the tree."""
    if not isinstance(tree, Tree | ShardedTree):
        reject("tree", "a Tree made by build()", type(tree).__name__)
    check_query(module, block, query, tree.keys)
    if noise is None and choices is None:
        return
    shape = {"b": query.shape[0], "m": query.shape[1], "depth": tree.plan.depth}
    for name, decisions in (("noise", noise), ("choices", choices)):
        if decisions is not None:
            check_tensor(name, decisions, "b m depth", **shape)
            check_same(name, decisions, "query", query, dtype=False)
    if noise is not None:
        check_float("noise", noise)
        _check_range("noise", "uniforms in [0, 1)", noise, 0, 1)
    if choices is not None:
        if choices.dtype != torch.int64:
            reject("choices", "dtype torch.int64", choices.dtype)
        branch = tree.plan.branch
        _check_range("choices", f"children from 0 to {branch - 1}, or -1", choices, -1, branch)


def _check_range(argument: str, expected: str, value: Tensor, low: int, stop: int) -> None:
    if value.is_cuda or not values_readable(value) or not value.numel():
        return
    if not bool(((value >= low) & (value < stop)).all()):
        reject(argument, expected, f"numbers from {float(value.min()):g} to {float(value.max()):g}")
