"""A transformer layer with norms after each part, as torch's own, that attends to keys prepared beforehand."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor, nn

from retreever.nn.blocks import AttentionBlock
from retreever.ops.backend import Impl


class PostNormLayer(nn.Module):
    """x <- LN(x + attention(x)); x <- LN(x + net(x)), with biases everywhere and one hidden layer of ReLUs."""

    def __init__(self, dim: int, heads: int, hidden: int, impl: Impl = "auto") -> None:
        super().__init__()
        self.attention = AttentionBlock(dim, heads, residual="none", bias=True, impl=impl)
        self.feed_forward = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))
        self.norm, self.feed_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def key_values(self, tokens: Float[Tensor, "b n d"]) -> tuple[Float[Tensor, "b n h e"], Float[Tensor, "b n h e"]]:
        """Keys and values of tokens to attend to."""
        return self.attention.key_values(tokens)

    def forward(
        self,
        tokens: Float[Tensor, "b m d"],
        keys: Float[Tensor, "b n h e"],
        values: Float[Tensor, "b n h e"],
        mask: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b m d"]:
        tokens = self.norm(tokens + self.attention.read(tokens, keys, values, mask))
        return self.feed_norm(tokens + self.feed_forward(tokens))
