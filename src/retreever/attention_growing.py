"""`GrowingAttention`: the methods of `TreeCrossAttention` that change the tokens of a tree."""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor

from retreever.attention_build import TreeModule
from retreever.cross_attention import Context, Mask
from retreever.growing import append_tokens, change_tokens, fold_tree
from retreever.tree.value import Tree

Index = int | Int[Tensor, " m"] | Int[Tensor, "b m"]


class GrowingAttention(TreeModule):
    """Appends, replaces and evicts tokens of trees."""

    def append(
        self, tree: Tree, tokens: Context, mask: Mask = None, *, window: int | None = None, in_place: bool = False
    ) -> Tree:
        """The tree with `tokens` appended to every row, in O(log n) aggregations per token.

        A tree that grows (see `capacity` of `build`) takes them in its next slots, and gets room for `branch` times as
        many when it is full. Any other tree keeps new tokens in a growing tree beside it, which searches read too: see
        `fold`. Gradients reach the tokens.

        Args:
            tree: it stays as it is, unless `in_place`.
            tokens: the same number for every row.
            mask: True where a token is real; the others are left out.
            window: a sliding window: token number t of a row takes slot t % window, and replaces what was there.
            in_place: write into the memory of `tree`, which must not be used afterwards. Without it all of the tree is
                copied first. Not for trees with gradients.
        """
        return append_tokens(self, tree, tokens, mask, window, in_place)

    def replace(self, tree: Tree, index: Index, tokens: Context, *, in_place: bool = False) -> Tree:
        """The tree with other tokens on the slots `index` (one, or as many as tokens; for all rows, or (b, m))."""
        return change_tokens(self, tree, index, tokens, in_place)

    def evict(self, tree: Tree, index: Index, *, in_place: bool = False) -> Tree:
        """The tree without the tokens on the slots `index`, which are left empty. Every row must keep a token."""
        return change_tokens(self, tree, index, None, in_place)

    def fold(self, tree: Tree, order: Int[Tensor, "b n"] | None = None) -> Tree:
        """One tree over the tokens of `tree` and of the one beside it, built anew.

        `order` is the leaf order of all tokens, numbered as they were given to `build` and then to `append`; see
        `leaf_order`. None sorts them as the module does.
        """
        return fold_tree(self, tree, order)
