"""`TreeMultihead`: takes the place of an `nn.MultiheadAttention` in a model and reads its context through a tree."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from retreever.arguments import reject
from retreever.attention import TreeCrossAttention
from retreever.checks import check_any_real, check_tensor
from retreever.tree.build import Tree
from retreever.tree_builder import TokenOrder

Padding = Bool[Tensor, "b n"] | None


class TreeMultihead(nn.Module):
    """Answers the calls of a trained `nn.MultiheadAttention(batch_first=True)` by a search through a tree of means.

        layer.multihead_attn = TreeMultihead(layer.multihead_attn, budget=128)  # of an nn.TransformerDecoderLayer

    A call builds the tree of its context. To query a context often, `build` its tree once and pass that in its place,
    as `key` and as `value`.

    Args:
        attention: its weights are copied.
        branch: children per node.
        order: "keys" puts tokens with similar keys side by side; "given" takes them as they come, which is faster.
        budget: how many tokens a query may read; None reads one path.
    """

    batch_first = True

    def __init__(
        self,
        attention: nn.MultiheadAttention,
        branch: int = 2,
        *,
        order: TokenOrder = "keys",
        budget: int | None = None,
    ) -> None:
        super().__init__()
        self.tca = TreeCrossAttention.from_multihead(attention, branch, order=order, budget=budget)
        self.train(attention.training)

    def build(self, context: Float[Tensor, "b n c"], key_padding_mask: Padding = None) -> Tree:
        """The tree over `context`. `key_padding_mask` is True where a token is padding, as torch has it."""
        if key_padding_mask is None:
            return self.tca.build(context)
        check_tensor("key_padding_mask", key_padding_mask, "b n", b=context.shape[0], n=context.shape[1])
        if key_padding_mask.dtype != torch.bool:
            reject("key_padding_mask", "dtype torch.bool (True = padding)", key_padding_mask.dtype)
        mask = ~key_padding_mask
        check_any_real("key_padding_mask", mask)
        return self.tca.build(context, mask)

    def forward(
        self,
        query: Float[Tensor, "b m d"],
        key: Float[Tensor, "b n c"] | Tree,
        value: Float[Tensor, "b n c"] | Tree,
        key_padding_mask: Padding = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Float[Tensor, "b m d"], None]:
        """The output, and None in place of attention weights.

        Args:
            query: the queries.
            key: the context, or its tree.
            value: the same as `key`.
            key_padding_mask: True where a token is padding; None with a tree, which has its own.
            need_weights: must be False: a query has weights for the nodes it read, not for all tokens.
            attn_mask: must be None: all queries see the same tokens.
            average_attn_weights: not used.
            is_causal: must be False.
        """
        if value is not key:
            reject("value", "the same tensor as key, since a tree is built of one", "another")
        for name, given in (("need_weights", need_weights), ("is_causal", is_causal)):
            if given:
                reject(name, "False, since queries search a tree", given)
        if attn_mask is not None:
            reject("attn_mask", "None, since all queries search one tree; mask tokens by key_padding_mask", "a mask")
        if isinstance(key, Tree) and key_padding_mask is not None:
            reject("key_padding_mask", "None with a tree, which was built with it", "a mask")
        tree = key if isinstance(key, Tree) else self.build(key, key_padding_mask)
        return self.tca(query, tree).output, None
