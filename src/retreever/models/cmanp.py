"""CMANP (Feng et al., 2023): an LBANP whose latents can be updated with more context in constant memory.

Each block has latents of its own that do not depend on the context, so their attention to it is a running softmax: new
points are added without those seen before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributions import Distribution

from retreever.arguments import check_int, reject
from retreever.batch import without_padding
from retreever.models.base import Contexts, Mask, Targets, Values, check_context
from retreever.models.lbanp import LBANP, LBANPConfig
from retreever.ops.frontier.api import Part, attend_part, merge_parts
from retreever.results import KeyValues, LayerMemory


@dataclass(frozen=True)
class CMANPConfig(LBANPConfig):
    """Settings of CMANP.

    Attributes:
        latents: latents that the decoder reads.
        block_latents: latents of each block that read the context.
    """

    latents: int = 128
    block_latents: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("block_latents", self.block_latents, 1)


class CMANP(LBANP):
    """Constant memory attentive neural process.

    Encoder blocks: E = SelfAttention(CrossAttention(block latents, context)), then
    latents <- SelfAttention(CrossAttention(latents, E)).
    """

    config: CMANPConfig
    settings = CMANPConfig

    def __init__(self, config: CMANPConfig | None = None, **fields: Any) -> None:
        super().__init__(config, **fields)
        c = self.config
        own = (nn.Parameter(torch.randn(c.block_latents, c.dim)) for _ in range(c.layers))
        self.block_latents: Any = nn.ParameterList(own)
        self.condense, self.absorb = self._blocks("shared"), self._blocks("own")

    def update(self, memory: LayerMemory, xc: Contexts, yc: Values, mask: Mask = None) -> LayerMemory:
        """The memory of the context so far and these further points, equal to encoding all at once.

        Takes memory and time that depend on the number of new points alone.
        """
        if not isinstance(memory, LayerMemory) or not memory.parts:
            got = "one of another model" if isinstance(memory, LayerMemory) else type(memory).__name__
            reject("memory", "LayerMemory made by encode() or update()", got)
        check_context(self, xc, yc, mask)
        if xc.shape[0] != memory.rows:
            reject("xc", f"a row for each of the {memory.rows} contexts in memory", tuple(xc.shape))
        fresh = self._parts(without_padding(xc, mask), without_padding(yc, mask), mask)
        return self._memory([merge_parts([old, new]) for old, new in zip(memory.parts, fresh, strict=True)])

    def _encode(self, xc: Contexts, yc: Values, mask: Mask) -> LayerMemory:
        return self._memory(self._parts(xc, yc, mask))

    def _predict(self, xc: Contexts, yc: Values, mask: Mask, xt: Targets) -> Distribution:
        """By attention kernels, which do not give what updates need."""
        scored = self._scored(xc, yc)
        attended = [self.distil[layer].attend(*heads, mask) for layer, heads in enumerate(scored)]
        return self._answer(LayerMemory(self._layers(attended)), xt)

    def _parts(self, xc: Contexts, yc: Values, mask: Mask) -> list[Part]:
        """Attention of every block's latents to context points."""
        return [attend_part(*heads, mask) for heads in self._scored(xc, yc)]

    def _scored(self, xc: Contexts, yc: Values) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Queries of every block's latents, and keys and values of the context."""
        tokens = self.embed.context(xc, yc)
        for distil, own in zip(self.distil, self.block_latents, strict=True):
            keys, values = distil.key_values(tokens)
            yield distil.start(own.expand(tokens.shape[0], -1, -1))[1], keys, values

    def _memory(self, parts: Sequence[Part]) -> LayerMemory:
        return LayerMemory(self._layers([part.output for part in parts]), tuple(parts))

    def _layers(self, attended: Sequence[Float[Tensor, "b l h e"]]) -> tuple[KeyValues, ...]:
        """What the decoder reads, from the attention of every block's latents to the context."""
        b = attended[0].shape[0]
        latents = self.latents.expand(b, -1, -1)
        found = []
        for layer, context in enumerate(attended):
            own = self.block_latents[layer].expand(b, -1, -1)
            distil, condense = self.distil[layer], self.condense[layer]
            block = distil.finish(own, distil.start(own)[0], context)
            latents = self.absorb[layer](latents, condense(block, block))
            latents = self.mix[layer](latents, latents)
            found.append(KeyValues(*self.read_out[layer].key_values(latents)))
        return tuple(found)
