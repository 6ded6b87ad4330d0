"""What is exported: modules that take tensors and return named tensors, for a fixed largest number of points.

`Encode` turns a context into the tensors of its tree, `Query` answers queries from them, `Predict` does both. The
context has n slots and a mask that is True at real points, which may lie anywhere among them.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent

from retreever.models.base import Model
from retreever.models.retreever import ReTreever
from retreever.ops.frontier.api import read_rows
from retreever.ops.frontier.reference import frontier_reference
from retreever.ops.search.api import TreeAttention, search, walk
from retreever.ops.search.inputs import SearchInputs
from retreever.ops.search.reference import score_rows
from retreever.tree.budget import spread_up_to
from retreever.tree.means import log_counts
from retreever.tree.plan import TreePlan
from retreever.tree.selected import selected_nodes

Named = dict[str, Tensor]


class Encode(nn.Module):
    """Context points to the keys, values and mask of all tree nodes, and the point of every token in leaf order."""

    def __init__(self, model: ReTreever) -> None:
        super().__init__()
        self.model = model

    def forward(self, xc: Float[Tensor, "b n dx"], yc: Shaped[Tensor, "b n *dy"], mask: Bool[Tensor, "b n"]) -> Named:
        tree = self.model.encode(xc, yc, mask)
        assert tree.mask is not None and tree.order is not None  # the context has a mask
        # Keys and values are halves of one tensor; compiled code would go on to expect those strides.
        keys, values = tree.keys.contiguous(), tree.values.contiguous()
        return {"keys": keys, "values": values, "node_mask": tree.mask, "order": tree.order}


class Query(nn.Module):
    """Tree tensors and queries to predictions, with the path of every query, its log-probability and the nodes read.

    Args:
        model: the trained model.
        plan: shape of the trees that `Encode` makes.
        budget: tokens a query may read; None reads one path. `forward` takes a smaller one as its last argument.
        explain: also return the attention weight of every node read, and how likely the policy takes every node from
            its parent; both are means over heads.
    """

    def __init__(self, model: ReTreever, plan: TreePlan, budget: int | None, explain: bool) -> None:
        super().__init__()
        self.model, self.plan = model, plan
        self.budget, self.explain = budget, explain

    def forward(
        self,
        keys: Float[Tensor, "b t h e"],
        values: Float[Tensor, "b t h e"],
        node_mask: Bool[Tensor, "b t"],
        xt: Float[Tensor, "b m dx"],
        budget: Int[Tensor, " one"] | None = None,
    ) -> Named:
        query = self.model.embed.query(xt)
        block = self.model.attention.block
        normed, q = block.start(query)
        counts = log_counts(self.plan, node_mask, keys) if self.model.attention.log_count else None
        inputs = SearchInputs(q, keys, values, self.plan, node_mask, log_count=counts)
        found = search(inputs, "reference", self.budget) if budget is None else self._up_to(inputs, budget)
        named = outputs(self.model.head(block.finish(query, normed, found.output)))
        rows = selected_nodes(self.plan, found.path, node_mask) if found.rows is None else found.rows
        named |= {"path": found.path, "log_prob": found.log_prob, "selected": rows}
        return named | (self._explained(inputs, rows) if self.explain else {})

    def _up_to(self, inputs: SearchInputs, budget: Int[Tensor, " one"]) -> TreeAttention:
        """The search under a budget that is known only when the graph runs."""
        assert self.budget is not None and inputs.node_mask is not None
        _, path, log_prob, entropy = walk(inputs, "reference")
        open_ = spread_up_to(self.plan, self.budget, budget, inputs.node_mask)
        rows = frontier_reference(inputs, path, self.budget, open_)
        return TreeAttention(read_rows(inputs, rows).output, path, log_prob, entropy, None, rows)

    def _explained(self, inputs: SearchInputs, rows: Int[Tensor, "b m s"]) -> Named:
        scores = score_rows(inputs.q, inputs.keys, inputs.node_mask, rows.clamp_min(0), inputs.log_count)
        weights = scores.masked_fill((rows < 0)[..., None], -torch.inf).softmax(dim=2).mean(dim=3)
        return {"weights": weights, "policy": policy(inputs)}


class Predict(nn.Module):
    """Context points and queries to predictions, for any model; `budget` is for models that search a tree."""

    def __init__(self, model: Model, budget: int | None = None) -> None:
        super().__init__()
        self.model, self.budget = model, budget

    def forward(
        self,
        xc: Float[Tensor, "b n dx"],
        yc: Shaped[Tensor, "b n *dy"],
        mask: Bool[Tensor, "b n"],
        xt: Float[Tensor, "b m dx"],
    ) -> Named:
        if isinstance(self.model, ReTreever):
            return outputs(self.model.predict(xc, yc, xt, mask, self.budget))
        return outputs(self.model.predict(xc, yc, xt, mask))


class Tokens(nn.Module):
    """`Encode` or `Predict` for raw tokens, which have no values."""

    def __init__(self, part: Encode | Predict) -> None:
        super().__init__()
        self.part = part

    def forward(
        self, tokens: Float[Tensor, "b n c"], mask: Bool[Tensor, "b n"], xt: Float[Tensor, "b m q"] | None = None
    ) -> Named:
        asked = () if xt is None else (xt,)
        return self.part(tokens, tokens[..., :0], mask, *asked)


def outputs(dist: Distribution) -> Named:
    """The numbers of a distribution: log-probabilities of classes, or mean and standard deviation."""
    if isinstance(dist, Categorical):
        return {"logits": dist.logits}
    base = dist.base_dist if isinstance(dist, Independent) else dist
    return {"mean": base.mean, "std": base.stddev}


def policy(inputs: SearchInputs) -> Float[Tensor, "b m inner"]:
    """How likely a search takes each node above the leaves from its parent; 0 at padding."""
    plan, mask = inputs.plan, inputs.node_mask
    inner = slice(0, plan.leaf_offset)
    scores = torch.einsum("bmhe,bthe->bmth", inputs.q, inputs.keys[:, inner]) * inputs.q.shape[-1] ** -0.5
    if inputs.log_count is not None:
        scores = scores + inputs.log_count[:, None, inner, None]
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, inner, None], -torch.inf)
    siblings = scores.unflatten(2, (-1, plan.branch))
    return siblings.softmax(dim=3).nan_to_num().mean(dim=4).flatten(2)
