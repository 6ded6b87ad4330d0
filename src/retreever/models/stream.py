"""Memories of ReTreever that take further points: encoded once, then appended to, equal to encoding all at once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from jaxtyping import Float, Int
from torch import Tensor

from retreever.arguments import check_int, reject
from retreever.batch import without_padding
from retreever.models.base import Contexts, Mask, Values, check_context
from retreever.nn.encoders import IdentityEncoder, encode_tokens
from retreever.nn.local import LocalEncoder, LocalState
from retreever.tree.order import in_order, permutation_of
from retreever.tree.value import Tree

if TYPE_CHECKING:
    from retreever.models.retreever import ReTreever


@dataclass(frozen=True, eq=False)
class EncodedTree(Tree):
    """A tree of tokens from a `LocalEncoder`, and what that needs to go on: see `LocalState`. Files do not keep it."""

    inputs: Float[Tensor, "b layers w d"] | None = None
    seen: Int[Tensor, " b"] | None = None


def encode_points(model: ReTreever, xc: Contexts, yc: Values, mask: Mask, capacity: int | None) -> Tree:
    """`ReTreever.encode`."""
    check_context(model, xc, yc, mask)
    order, encoder = model.config.order, model.encoder
    if capacity is not None:
        check_int("capacity", capacity, 1)
        if order != "given":
            reject("capacity", f"None with order={order!r}, since new points are put beside such a tree", capacity)
    xc, yc = without_padding(xc, mask), without_padding(yc, mask)
    if capacity is None and not (isinstance(encoder, LocalEncoder) and order == "given"):
        return model._encode(xc, yc, mask)
    tokens, mask = _real_first(model.embed.context(xc, yc), mask)
    if not isinstance(encoder, LocalEncoder):
        return model.attention.build(encode_tokens(encoder, tokens, mask), mask, capacity=capacity, check=False)
    tokens, state = encoder.extend(tokens, encoder.start(tokens), _lengths(mask))
    return _with_state(model.attention.build(tokens, mask, capacity=capacity, check=False), state)


def update_memory(
    model: ReTreever, memory: Tree, xc: Contexts, yc: Values, mask: Mask, window: int | None, in_place: bool
) -> Tree:
    """`ReTreever.update`."""
    encoder = model.encoder
    if not isinstance(encoder, IdentityEncoder | LocalEncoder):
        expected = "'identity' or 'local' for update, since others mix all tokens"
        reject("encoder", expected, f"{type(encoder).__name__}: encode all points again")
    if not isinstance(memory, Tree):
        reject("memory", "Tree made by encode()", type(memory).__name__)
    check_context(model, xc, yc, mask)
    if xc.shape[0] != memory.rows:
        reject("xc", f"{memory.rows} rows, as many as the memory has", xc.shape[0])
    points = without_padding(xc, mask), without_padding(yc, mask)
    tokens, mask = _real_first(model.embed.context(*points), mask)
    if isinstance(encoder, IdentityEncoder):
        return model.attention.append(memory, tokens, mask, window=window, in_place=in_place)
    if not isinstance(memory, EncodedTree) or memory.inputs is None or memory.seen is None:
        reject("memory", "one made by encode() with order='given', whose last tokens are known", "another")
    tokens, state = encoder.extend(tokens, LocalState(memory.inputs, memory.seen), _lengths(mask))
    tree = Tree(**_parts(memory))
    return _with_state(model.attention.append(tree, tokens, mask, window=window, in_place=in_place), state)


def _real_first(tokens: Tensor, mask: Mask) -> tuple[Tensor, Mask]:
    if mask is None:
        return tokens, None
    order = permutation_of("given", tokens, mask, 2, 0, 0)
    return in_order(tokens, order), in_order(mask, order)


def _lengths(mask: Mask) -> Int[Tensor, " b"] | None:
    return None if mask is None else mask.sum(dim=1)


def _with_state(tree: Tree, state: LocalState) -> EncodedTree:
    return EncodedTree(**_parts(tree), inputs=state.inputs, seen=state.seen)


def _parts(tree: Tree) -> dict[str, Any]:
    return {part.name: getattr(tree, part.name) for part in fields(Tree)}
