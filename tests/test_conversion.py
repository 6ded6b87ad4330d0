"""Trained attention read through a tree of means: `from_multihead` and `from_cross_attention`, nothing trained."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retreever import Batch, CrossAttention, InputError, ReTreever, TransformerCA, TreeCrossAttention
from retreever.models.saved import model_from_json, model_to_json
from retreever.nn.blocks import RESIDUALS, Residual

DIM, HEADS, TOKENS = 16, 4, 11
MASKS = {
    "all-real": None,
    "tail": torch.arange(TOKENS) < torch.tensor([1, 2, 5, 11])[:, None],
    "holes": torch.rand(4, TOKENS, generator=torch.Generator().manual_seed(4)) < 0.5,
}
masks = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)


def rand(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, the same for the same shape and seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gap(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).detach().abs().max())


def trained(module: nn.Module) -> Any:
    """The module with all weights, norms and biases somewhere else than where they start."""
    torch.manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    return module.eval()


def multihead(bias: bool = True, kdim: int | None = None) -> nn.MultiheadAttention:
    return trained(nn.MultiheadAttention(DIM, HEADS, bias=bias, kdim=kdim, vdim=kdim, batch_first=True))


def original(attention: nn.MultiheadAttention, query: Tensor, context: Tensor, mask: Tensor | None) -> Tensor:
    padding = None if mask is None else ~mask
    return attention(query, context, context, key_padding_mask=padding, need_weights=False)[0]


@masks
@pytest.mark.parametrize("branch", [2, 3])
@pytest.mark.parametrize("order", ["keys", "given"])
@pytest.mark.parametrize("kdim", [None, 12])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_budget_of_all_tokens_is_the_original_multihead_attention(
    bias: bool, kdim: int | None, order: Any, branch: int, mask: Tensor | None
) -> None:
    attention, query, context = multihead(bias, kdim), rand(4, 5, DIM), rand(4, TOKENS, kdim or DIM)
    module = TreeCrossAttention.from_multihead(attention, branch, order=order, budget=TOKENS)
    result = module(query, module.build(context, mask))
    assert gap(result.output, original(attention, query, context, mask)) <= 1e-5
    lengths = torch.full((4,), TOKENS) if mask is None else mask.sum(dim=1)
    assert torch.equal(result.tokens_read, lengths[:, None].expand(4, 5))


@masks
@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("settings", [{}, {"hidden": 0, "bias": True}, {"kdim": 12}], ids=["usual", "bare", "kdim"])
@torch.no_grad()
def test_a_budget_of_all_tokens_is_the_original_cross_attention(
    residual: Residual, settings: dict[str, Any], mask: Tensor | None
) -> None:
    attention = trained(CrossAttention(DIM, HEADS, residual=residual, **settings))
    query, context = rand(4, 5, DIM), rand(4, TOKENS, settings.get("kdim", DIM))
    module = TreeCrossAttention.from_cross_attention(attention, budget=TOKENS + 5)
    assert gap(module(query, module.build(context, mask)).output, attention(query, context, mask).output) <= 1e-5


@masks
@torch.no_grad()
def test_a_call_may_have_a_budget_of_its_own(mask: Tensor | None) -> None:
    """And one of every row's length is enough for that row."""
    attention, query, context = multihead(), rand(4, 5, DIM), rand(4, TOKENS, DIM)
    module = TreeCrossAttention.from_multihead(attention)
    tree, want = module.build(context, mask), original(attention, query, context, mask)
    assert module.budget is None and module(query, tree).rows is None
    for row, length in enumerate([TOKENS] * 4 if mask is None else mask.sum(dim=1).tolist()):
        found = module(query, tree, budget=length)
        assert gap(found.output[row], want[row]) <= 1e-5
        assert found.tokens <= max(length, tree.plan.tokens) and int(found.tokens_read.max()) <= found.tokens


@masks
@pytest.mark.parametrize("budget", [1, 6, 8, TOKENS])
@torch.no_grad()
def test_shuffled_tokens_are_read_the_same(budget: int, mask: Tensor | None) -> None:
    """Keys decide where a token lies, not its place in the context."""
    module = TreeCrossAttention.from_multihead(multihead(), budget=budget)
    query, context = rand(4, 5, DIM), rand(4, TOKENS, DIM)
    shuffle = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(2))
    one = module(query, module.build(context, mask))
    two = module(query, module.build(context[:, shuffle], None if mask is None else mask[:, shuffle]))
    assert gap(one.output, two.output) <= 1e-5
    assert torch.equal(one.tokens_read, two.tokens_read)


@torch.no_grad()
def test_the_order_says_where_the_callers_tokens_lie() -> None:
    module, context, mask = TreeCrossAttention.from_multihead(multihead()), rand(4, TOKENS, DIM), MASKS["holes"]
    tree = module.build(context, mask)
    assert mask is not None and tree.order is not None
    keys, offset = module.block.key_values(context)[0], tree.plan.leaf_offset
    for row, length in enumerate(mask.sum(dim=1).tolist()):
        assert sorted(tree.order[row, :length].tolist()) == mask[row].nonzero()[:, 0].tolist()
        leaves = tree.keys[row, offset:][tree.mask[row, offset:]]
        assert gap(leaves, keys[row, tree.order[row, :length]]) <= 1e-6
    assert torch.equal(module(rand(4, 5, DIM), tree).order, tree.order)
    given = TreeCrossAttention.from_multihead(multihead(), order="given")
    assert given.build(context).order is None
    assert all(
        x[: y.sum()].tolist() == y.nonzero()[:, 0].tolist()
        for x, y in zip(given.build(context, mask).order, mask, strict=True)
    )


@pytest.mark.parametrize("order", ["keys", "given"])
@torch.no_grad()
def test_the_error_falls_as_the_budget_grows(order: Any) -> None:
    """A smooth context of 128 tokens: from one path to half of the tokens, and to nothing."""
    attention = multihead()
    place = torch.linspace(0, 6, 128)[:, None]
    context = (place * torch.linspace(0.2, 1.5, DIM) + torch.arange(DIM)).sin()[None]
    query = context[:, ::9]
    want = original(attention, query, context, None)
    module = TreeCrossAttention.from_multihead(attention, order=order)
    tree = module.build(context)
    results = [module(query, tree, budget=budget) for budget in (None, 16, 32, 64, 128)]
    errors = [float((found.output - want).norm() / want.norm()) for found in results]
    assert errors[0] < 0.5 and all(later < 0.8 * earlier for earlier, later in pairwise(errors)) and errors[-1] < 1e-5


@torch.no_grad()
def test_log_counts_let_a_mean_stand_for_all_its_tokens() -> None:
    """Many equal tokens against a single one: without counts, a node of them would weigh as much as that one."""
    attention, query = multihead(), rand(1, 6, DIM)
    context = torch.cat([rand(1, 1, DIM, seed=1).expand(1, 63, DIM), rand(1, 1, DIM, seed=2)], dim=1)
    want = original(attention, query, context, None)
    module = TreeCrossAttention.from_multihead(attention, order="given")
    assert module.log_count and gap(module(query, module.build(context)).output, want) > 0
    tree = module.build(context)
    choices = torch.ones(1, 6, tree.plan.depth, dtype=torch.int64)  # to the single one
    assert gap(module(query, tree, choices=choices).output, want) <= 1e-5
    module.log_count = False
    assert gap(module(query, module.build(context), choices=choices).output, want) > 1e-3


def converted(kind: str) -> tuple[nn.Module, TreeCrossAttention]:
    if kind == "multihead":
        source: Any = multihead()
        return source, TreeCrossAttention.from_multihead(source, budget=8)
    source = trained(CrossAttention(DIM, HEADS))
    return source, TreeCrossAttention.from_cross_attention(source, budget=8)


kinds = pytest.mark.parametrize("kind", ["multihead", "cross"])


@kinds
def test_gradients_reach_the_weights_and_the_context(kind: str) -> None:
    """A converted module can be trained further, search included."""
    module = converted(kind)[1].train()
    context = rand(2, TOKENS, DIM).requires_grad_()
    result = module(rand(2, 5, DIM), module.build(context))
    (result.output.square().sum() + result.log_prob.sum()).backward()
    assert context.grad is not None and (context.grad != 0).any(dim=2).all()
    assert [name for name, p in module.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []


@kinds
def test_weights_are_copies(kind: str) -> None:
    source, module = converted(kind)
    before = [parameter.clone() for parameter in module.parameters()]
    for parameter in source.parameters():
        nn.init.zeros_(parameter)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


@kinds
@torch.no_grad()
def test_a_state_dict_moves_a_converted_module(kind: str) -> None:
    """Into another one that was converted from other weights; no aggregator is in it."""
    module, other = converted(kind)[1], converted(kind)[1]
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    other.load_state_dict(module.state_dict())
    query, context = rand(2, 5, DIM), rand(2, TOKENS, DIM)
    assert torch.equal(*(m(query, m.build(context)).output for m in (module, other)))
    assert all(name.startswith("block.") for name in module.state_dict())


@kinds
@pytest.mark.parametrize("training", [False, True])
def test_the_mode_of_the_original_is_kept(kind: str, training: bool) -> None:
    source = (multihead() if kind == "multihead" else trained(CrossAttention(DIM, HEADS))).train(training)
    make: Any = TreeCrossAttention.from_multihead if kind == "multihead" else TreeCrossAttention.from_cross_attention
    assert {part.training for part in make(source).modules()} == {training}
    assert source.training is training


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@torch.no_grad()
def test_the_dtype_of_the_original_is_kept(dtype: torch.dtype) -> None:
    attention = trained(CrossAttention(DIM, HEADS)).to(dtype)
    module = TreeCrossAttention.from_cross_attention(attention, budget=TOKENS)
    query, context = rand(2, 5, DIM).to(dtype), rand(2, TOKENS, DIM).to(dtype)
    found, want = module(query, module.build(context)).output, attention(query, context).output
    assert found.dtype == dtype and gap(found, want) <= 64 * torch.finfo(dtype).eps
    assert module(query, module.build(context), budget=6).output.isfinite().all()


@pytest.mark.parametrize(
    ("source", "got"),
    [(nn.Linear(2, 2), "Linear"), (None, "NoneType"), (nn.MultiheadAttention(8, 2), "MultiheadAttention")],
)
def test_what_is_no_cross_attention_is_refused(source: Any, got: str) -> None:
    with pytest.raises(InputError, match=rf"^attention: expected a CrossAttention, got {got}$"):
        TreeCrossAttention.from_cross_attention(source)


@pytest.mark.parametrize(
    ("argument", "settings"),
    [("order", {"order": "kd"}), ("order", {"order": None}), ("branch", {"branch": 1}), ("budget", {"budget": 0})],
)
def test_unusable_settings_are_refused_by_name(argument: str, settings: dict[str, Any]) -> None:
    for make in (
        lambda: TreeCrossAttention.from_multihead(multihead(), **settings),
        lambda: TreeCrossAttention.from_cross_attention(CrossAttention(DIM, HEADS), **settings),
    ):
        with pytest.raises(InputError, match=rf"^{argument}: expected [^\n]*$"):
            make()


@pytest.mark.parametrize("mask", [MASKS["tail"], MASKS["holes"]], ids=["tail", "holes"])
@pytest.mark.parametrize("value", [torch.nan, 1e30])
@torch.no_grad()
def test_what_padding_holds_never_matters(mask: Tensor, value: float) -> None:
    """Neither for the order of the keys nor for what is read."""
    module, query, context = TreeCrossAttention.from_multihead(multihead()), rand(4, 5, DIM), rand(4, TOKENS, DIM)
    dirty = context.masked_fill(~mask[..., None], value)
    for budget in (None, 7, TOKENS):
        one, two = (module(query, module.build(x, mask), budget=budget) for x in (context, dirty))
        assert torch.equal(one.output, two.output) and torch.equal(one.path, two.path)


@pytest.mark.parametrize("aggregator", ["mean", "transformer"])
@pytest.mark.parametrize("masked", [False, True])
def test_tokens_sorted_by_their_keys_are_the_tokens_given(aggregator: str, masked: bool) -> None:
    """The tree over sorted tokens is that of the same tokens given in that order; padding may hold NaN."""
    torch.manual_seed(0)
    context = torch.randn(2, 21, 16)
    mask = torch.rand(2, 21) < 0.7 if masked else None
    if mask is not None:
        context[~mask] = torch.nan
    module = TreeCrossAttention(16, 2, order="keys", aggregator=aggregator, log_count=True).eval()
    tree = module.build(context, mask)
    assert tree.order is not None and tree.order.tolist() != [list(range(21))] * 2
    module.order = "given"
    sorted_mask = None if mask is None else mask.gather(1, tree.order)
    again = module.build(context.gather(1, tree.order[..., None].expand_as(context)), sorted_mask)
    real = torch.ones(tree.keys.shape[:2], dtype=torch.bool) if tree.mask is None else tree.mask
    torch.testing.assert_close(tree.keys[real], again.keys[real])
    torch.testing.assert_close(tree.values[real], again.values[real])
    assert torch.equal(tree.log_count, again.log_count)


@masks
@pytest.mark.parametrize("aggregator", ["transformer", nn.Module])
@pytest.mark.parametrize("mean_levels", [0, 1, 9])
@pytest.mark.parametrize("kind", ["multihead", "cross"])
def test_a_learned_aggregator_starts_where_the_means_are(
    kind: str, mean_levels: int, aggregator: Any, mask: Tensor | None
) -> None:
    """To the bit, whatever the aggregator does; training moves it from there."""
    attention: Any = multihead() if kind == "multihead" else trained(CrossAttention(DIM, HEADS))
    convert = TreeCrossAttention.from_multihead if kind == "multihead" else TreeCrossAttention.from_cross_attention
    own = trained(TreeCrossAttention(DIM, HEADS)).aggregator if aggregator is nn.Module else aggregator
    means, learned = convert(attention), convert(attention, aggregator=own, mean_levels=mean_levels)
    query, context = rand(4, 5, DIM), rand(4, TOKENS, DIM)
    for budget in (None, 6, TOKENS):
        plain, same = (m(query, m.build(context, mask), budget=budget) for m in (means, learned))
        assert torch.equal(plain.output, same.output) and torch.equal(plain.path, same.path)
    optimiser = torch.optim.SGD([*learned.correction.parameters(), *learned.aggregator.parameters()], 1e-3)
    for _ in range(2):  # the last layer of the correction is 0 at first, so the aggregator moves in the second step
        optimiser.zero_grad()
        learned(query, learned.build(context, mask)).output.square().sum().backward()
        optimiser.step()
    before, after = (m(query, m.build(context, mask)).output for m in (means, learned))
    assert (gap(before, after) > 1e-6) == (mean_levels < 9)


@pytest.mark.parametrize(
    ("setting", "value"), [("heads", 8), ("head", "bounded"), ("frequency", 20.0), ("dim", 64), ("layers", 2)]
)
def test_settings_that_weights_were_not_trained_with_are_refused(setting: str, value: Any) -> None:
    model = TransformerCA(dim_x=2, dim=16, layers=1, hidden=16)
    with pytest.raises(InputError, match=rf"^{setting}: expected .*, as trained, got {value!r}"):
        ReTreever.from_transformer_ca(model, **{setting: value})
    assert ReTreever.from_transformer_ca(model, layers=1, impl="reference").config.impl == "reference"


def test_attention_decides_its_own_settings() -> None:
    with pytest.raises(InputError, match=r"^heads: expected 2, as the attention has it, or nothing, got 4"):
        TreeCrossAttention.from_multihead(torch.nn.MultiheadAttention(16, 2, batch_first=True), heads=4)


def test_a_whole_model_is_converted_and_trains_on() -> None:
    torch.manual_seed(0)
    model = TransformerCA(dim_x=2, dim=16, layers=1, hidden=16).eval()
    x, y, xt = rand(2, 33, 2), rand(2, 33, 1), rand(2, 5, 2)
    for settings in ({}, {"aggregator": "mean"}, {"mean_levels": 0}, {"branch": 3}):
        tree = ReTreever.from_transformer_ca(model, **settings)
        assert not tree.training and tree.config.dim_x == 2
        assert gap(tree.predict(x, y, xt, budget=33).mean, model.predict(x, y, xt).mean) <= 1e-5
        plain = ReTreever.from_transformer_ca(model, aggregator="mean", correct=False, branch=tree.config.branch)
        assert torch.equal(tree.predict(x, y, xt).mean, plain.predict(x, y, xt).mean)
        tree.train().loss(Batch(x, y, xt, xt[..., :1])).total.backward()
        assert tree.attention.correction.down.weight.grad.any()
        rebuilt = model_from_json(model_to_json(tree))
        rebuilt.load_state_dict(tree.state_dict())
    with pytest.raises(InputError, match=r"^model: expected a TransformerCA"):
        ReTreever.from_transformer_ca(tree)  # type: ignore[arg-type]
