"""The inputs of a search, which every backend takes."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor

from retreever.tree.plan import TreePlan


class SearchInputs(NamedTuple):
    """Arguments of `tree_attention`, already checked."""

    q: Float[Tensor, "b m h e"]
    keys: Float[Tensor, "b t h e"]
    values: Float[Tensor, "b t h e"]
    plan: TreePlan
    node_mask: Bool[Tensor, "b t"] | None = None
    noise: Float[Tensor, "b m depth"] | None = None
    choices: Int[Tensor, "b m depth"] | None = None
    log_count: Float[Tensor, "b t"] | None = None
    counted: Float[Tensor, "b t h e1"] | None = None  # made of keys and log counts by `counted_keys`
