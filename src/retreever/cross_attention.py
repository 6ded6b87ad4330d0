"""`CrossAttention`: plain cross attention over all tokens, with the two steps of `TreeCrossAttention`."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor, nn

from retreever.arguments import check_bool
from retreever.attention_inputs import check_context, check_query
from retreever.batch import without_padding
from retreever.nn.blocks import AttentionBlock, Residual
from retreever.nn.multihead import copy_multihead, multihead_arguments
from retreever.ops.backend import Impl
from retreever.results import CrossAttentionResult, KeyValues

Query = Float[Tensor, "b m d"]
Context = Float[Tensor, "b n c"]
Mask = Bool[Tensor, "b n"] | None


class CrossAttention(nn.Module):
    """Cross attention over all tokens: norm, attention, residual and feed-forward.

    Args:
        dim: width of queries and output.
        heads: attention heads; divides `dim`.
        kdim: width of the context; None means `dim`.
        hidden: feed-forward width; None means 2 * dim, 0 leaves it out.
        residual: see `AttentionBlock`; "none" with `hidden=0` is bare multi-head attention.
        dropout: on attention weights and feed-forward.
        bias: of the query, key and value projections.
        impl: backend of the attention.
    """

    def __init__(
        self,
        dim: int,
        heads: int = 4,
        *,
        kdim: int | None = None,
        hidden: int | None = None,
        residual: Residual = "pre",
        dropout: float = 0.0,
        bias: bool = False,
        impl: Impl = "auto",
    ) -> None:
        super().__init__()
        self.block = readout(dim, heads, kdim, hidden, residual, dropout, bias, impl)

    @classmethod
    def from_multihead(cls, attention: nn.MultiheadAttention) -> CrossAttention:
        """A module that computes the same as a trained `nn.MultiheadAttention(batch_first=True)`."""
        module = cls(**multihead_arguments(attention)).to(attention.out_proj.weight)
        copy_multihead(attention, module.block)
        return module.train(attention.training)

    def build(self, context: Context, mask: Mask = None, *, check: bool = True) -> KeyValues:
        """Project `context` to keys and values. `mask` is True where a token is real.

        With `check=False` padding must hold finite numbers.
        """
        if check:
            check_context(self, self.block, context, mask)
            context = without_padding(context, mask)  # which may hold NaN, and 0 * NaN is NaN
        return KeyValues(*self.block.key_values(context), mask)

    def forward(
        self, query: Query, context: KeyValues | Context, mask: Mask = None, *, check: bool = True
    ) -> CrossAttentionResult:
        """Attend from `query` to `context`, prepared by `build` or as plain tokens with their mask."""
        memory = context if isinstance(context, KeyValues) else self.build(context, mask, check=check)
        if check:
            check_query(self, self.block, query, memory.keys)
        normed, q = self.block.start(query)
        attended = self.block.attend(q.to(memory.keys.dtype), memory.keys, memory.values, memory.mask)
        return CrossAttentionResult(self.block.finish(query, normed, attended), tokens=memory.keys.shape[1])


def readout(
    dim: int,
    heads: int,
    kdim: int | None,
    hidden: int | None,
    residual: Residual,
    dropout: float,
    bias: bool,
    impl: Impl,
) -> AttentionBlock:
    """The block of both modules. Only with `residual` "pre" the context has a norm; the paper's code has none."""
    check_bool("bias", bias)
    return AttentionBlock(
        dim,
        heads,
        kdim=kdim,
        hidden=2 * dim if hidden is None else hidden,
        residual=residual,
        context_norm="own" if residual == "pre" else "none",
        dropout=dropout,
        bias=bias,
        impl=impl,
    )
