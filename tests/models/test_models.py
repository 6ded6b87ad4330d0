"""All models: the same calls, the same promises."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from retreever import (
    Batch,
    InputError,
    ObjectiveConfig,
    PerceiverIO,
    ReTreever,
    TransformerCA,
    collate,
    load_pretrained,
)
from retreever.models.retreever import Draws
from retreever.models.saved import model_from_json, model_to_json
from retreever.nn.encoders import ENCODERS
from retreever.nn.heads import HEADS
from retreever.objective import Gate
from retreever.tree.order import ORDERS

KINDS: tuple[type[nn.Module], ...] = (ReTreever, TransformerCA, PerceiverIO)
# What reads its encoder, and Perceiver IO, which has none.
WITH_ENCODERS = [*product((ReTreever, TransformerCA), ENCODERS), (PerceiverIO, "transformer")]
models = pytest.mark.parametrize("kind", KINDS)
models_with_encoders = pytest.mark.parametrize(("kind", "encoder"), WITH_ENCODERS)
TINY = {"dim_x": 2, "dim_y": 3, "dim": 16, "heads": 2, "layers": 2, "hidden": 16, "max_tokens": 16}
PLAIN = {ReTreever: {"impl": "reference"}}
SYMBOLS = {"inputs": "sequence", "head": "categorical"}


def model(kind: type[nn.Module], **settings: object) -> nn.Module:
    """A tiny model on plain torch, the same every time."""
    torch.manual_seed(0)
    return kind(**(TINY | PLAIN.get(kind, {}) | settings))


def rand(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, the same for the same shape and seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch(n: int = 11, m: int = 5, b: int = 3, head: str = "gaussian", inputs: str = "points", seed: int = 0) -> Batch:
    """A batch that fits `model` with that head and inputs."""
    classes = torch.Generator().manual_seed(seed + 4)
    dim_x = 1 if inputs == "sequence" else 2
    yc = torch.randint(3, (b, n), generator=classes) if inputs == "sequence" else rand(b, n, 3, seed=seed + 1)
    yt = torch.randint(3, (b, m), generator=classes) if head == "categorical" else rand(b, m, 3, seed=seed + 2)
    return Batch(rand(b, n, dim_x, seed=seed), yc, rand(b, m, dim_x, seed=seed + 3), yt)


def ragged(where: str = "tail") -> Batch:
    """Contexts of 1, 5 and 11 points, with 4, 6 and 3 targets; "holes" scatters the padding."""
    made = collate([batch(n, m, b=1, seed=10 * n) for n, m in ((1, 4), (5, 6), (11, 3))])
    if where == "tail":
        return made
    order = torch.argsort(torch.rand(3, 11, generator=torch.Generator().manual_seed(5)), dim=1)
    xc, yc = (part.gather(1, order[..., None].expand_as(part)) for part in (made.xc, made.yc))
    return dataclasses.replace(made, xc=xc, yc=yc, context_mask=made.context_mask.gather(1, order))


def rows_of(whole: Batch) -> list[Batch]:
    """Every row of a ragged batch alone, without its padding."""
    rows = []
    for i, (given, wanted) in enumerate(zip(whole.context_mask, whole.target_mask, strict=True)):
        parts = (whole.xc[i, given], whole.yc[i, given], whole.xt[i, wanted], whole.yt[i, wanted])
        rows.append(Batch(*(part[None] for part in parts)))
    return rows


def loss_and_gradients(module: nn.Module, data: Batch) -> list[Tensor]:
    """Every part of the loss and every gradient, with the same sampled paths each time."""
    module.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    loss = module.loss(data)
    loss.total.backward()
    return [*(part.detach() for part in loss), *(p.grad for p in module.parameters() if p.grad is not None)]


def gap(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return number((a - b).abs().max())


def number(scalar: Tensor) -> float:
    return float(scalar.detach())


@pytest.mark.parametrize("inputs", ["points", "sequence"])
@pytest.mark.parametrize("head", HEADS)
@models_with_encoders
def test_every_combination_predicts_and_trains(kind: type[nn.Module], encoder: str, head: str, inputs: str) -> None:
    """A distribution per query, a finite loss, and a gradient for every parameter."""
    open_gate = {"objective": ObjectiveConfig(gate="open")} if kind is ReTreever else {}
    dim_x = 1 if inputs == "sequence" else 2
    module = model(kind, encoder=encoder, head=head, inputs=inputs, dim_x=dim_x, **open_gate)
    data = batch(head=head, inputs=inputs)
    dist = module.predict(data.xc, data.yc, data.xt)
    assert isinstance(dist, Distribution) and dist.batch_shape == (3, 5)
    assert dist.event_shape == (() if head == "categorical" else (3,))
    assert dist.log_prob(data.yt).shape == (3, 5)
    loss = module.loss(data)
    loss.total.backward()
    assert all(part.shape == () and part.isfinite() for part in loss)
    assert [name for name, p in module.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []
    # A query of a sequence is the embedding of the zero vector, which no first weight can change.
    silent = [name for name, p in module.named_parameters() if not p.grad.any()]
    assert silent == (["embed.of_nothing.0.weight"] if inputs == "sequence" else [])


@models
def test_the_default_model_trains_every_parameter(kind: type[nn.Module]) -> None:
    module, data = kind(**PLAIN.get(kind, {})), batch(n=30)
    data = Batch(data.xc[..., :1], data.yc[..., :1], data.xt[..., :1], data.yt[..., :1])
    module.loss(data).total.backward()
    assert [name for name, p in module.named_parameters() if p.grad is None or not p.grad.any()] == []


@models
def test_outputs_may_differ_from_context_values(kind: type[nn.Module]) -> None:
    module, data = model(kind, outputs=7, head="categorical"), batch()
    assert module.predict(data.xc, data.yc, data.xt).logits.shape == (3, 5, 7)


@pytest.mark.parametrize("n", [1, 2, 3])
@models_with_encoders
def test_the_smallest_contexts_work(kind: type[nn.Module], encoder: str, n: int) -> None:
    assert all(part.isfinite().all() for part in loss_and_gradients(model(kind, encoder=encoder), batch(n=n, m=1)))


@models_with_encoders
def test_encoding_once_and_answering_often_equals_predict(kind: type[nn.Module], encoder: str) -> None:
    module, data = model(kind, encoder=encoder).eval(), ragged()
    memory = module.encode(data.xc, data.yc, data.context_mask)
    for xt in (data.xt, data.xt[:, :1], data.xt):
        expected = module.predict(data.xc, data.yc, xt, data.context_mask)
        assert torch.equal(module.answer(memory, xt).mean, expected.mean)


@pytest.mark.parametrize("where", ["tail", "holes"])
@models_with_encoders
@torch.no_grad()
def test_a_ragged_batch_equals_its_rows_one_by_one(kind: type[nn.Module], encoder: str, where: str) -> None:
    """Predictions to 1e-5, and the loss is the mean over all real targets."""
    module, whole = model(kind, encoder=encoder).eval(), ragged(where)
    together = module.predict(whole.xc, whole.yc, whole.xt, whole.context_mask)
    total, count = 0.0, 0
    for i, row in enumerate(rows_of(whole)):
        alone = module.predict(row.xc, row.yc, row.xt)
        assert gap(together.mean[i, whole.target_mask[i]], alone.mean[0]) <= 1e-5
        assert gap(together.stddev[i, whole.target_mask[i]], alone.stddev[0]) <= 1e-5
        total, count = total + number(module.loss(row).task) * row.xt.shape[1], count + row.xt.shape[1]
    assert number(module.loss(whole).task) == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("value", [torch.nan, 1e30])
@pytest.mark.parametrize("where", ["tail", "holes"])
@models_with_encoders
def test_masked_context_and_targets_change_nothing_at_all(
    kind: type[nn.Module], encoder: str, where: str, value: float
) -> None:
    """Loss and gradients differ by exactly 0.0."""
    module, clean = model(kind, encoder=encoder), ragged(where)
    context, target = ~clean.context_mask[..., None], ~clean.target_mask[..., None]
    dirty = dataclasses.replace(
        clean,
        **{name: getattr(clean, name).masked_fill(context, value) for name in ("xc", "yc")},
        **{name: getattr(clean, name).masked_fill(target, value) for name in ("xt", "yt")},
    )
    pairs = zip(loss_and_gradients(module, clean), loss_and_gradients(module, dirty), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


@models
def test_masked_targets_do_not_count(kind: type[nn.Module]) -> None:
    """Three targets more per row, all masked: every part of the loss is that of the others."""
    module, data, noise = model(kind), batch(), torch.rand(3, 8, 3)
    xt, yt = (nn.functional.pad(part, (0, 0, 0, 3)) for part in (data.xt, data.yt))
    wider = dataclasses.replace(data, xt=xt, yt=yt, target_mask=(torch.arange(8) < 5).expand(3, 8))
    few, many = ((Draws(noise[:, :5]),), (Draws(noise),)) if kind is ReTreever else ((), ())
    pairs = zip(module.loss(data, *few), module.loss(wider, *many), strict=True)
    assert all(gap(one, two) <= 1e-6 for one, two in pairs)


@models
def test_masked_symbols_may_be_anything(kind: type[nn.Module]) -> None:
    module, data = model(kind, **SYMBOLS, dim_x=1), batch(**SYMBOLS)
    context, target = torch.arange(11) < torch.tensor([[11], [4], [1]]), torch.arange(5) < torch.tensor([[5], [2], [1]])
    clean = dataclasses.replace(data, context_mask=context, target_mask=target)
    dirty = dataclasses.replace(clean, yc=data.yc.masked_fill(~context, -9), yt=data.yt.masked_fill(~target, 99))
    pairs = zip(loss_and_gradients(module, clean), loss_and_gradients(module, dirty), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


@pytest.mark.parametrize("order", ["axis", "kd", "kd-widest", "ball"])
@torch.no_grad()
def test_the_order_of_a_set_does_not_matter(order: str) -> None:
    data, shuffle = batch(), torch.randperm(11, generator=torch.Generator().manual_seed(1))
    for module in (model(ReTreever, order=order), model(TransformerCA), model(PerceiverIO)):
        module.eval()
        one, two = (module.predict(data.xc[:, i], data.yc[:, i], data.xt).mean for i in (slice(None), shuffle))
        assert gap(one, two) <= 1e-5


@pytest.mark.parametrize("order", ORDERS)
def test_retreever_trains_on_every_leaf_order(order: str) -> None:
    assert all(part.isfinite().all() for part in loss_and_gradients(model(ReTreever, order=order), ragged()))


@pytest.mark.parametrize("data", [batch(), ragged()], ids=["equal", "ragged"])
@torch.no_grad()
def test_a_flat_tree_reads_what_full_retrieval_reads(data: Batch) -> None:
    """branch >= n leaves nothing to decide: searching equals reading all leaves."""
    search, full = (model(ReTreever, branch=11, retrieval=how).eval() for how in ("policy", "full"))
    one, two = (m.predict(data.xc, data.yc, data.xt, data.context_mask) for m in (search, full))
    assert gap(one.mean, two.mean) <= 1e-6 and gap(one.stddev, two.stddev) <= 1e-6
    loss = search.train().loss(data)
    assert float(loss.task) == pytest.approx(float(loss.leaves), rel=1e-6) and float(loss.entropy) == 0


def test_the_loss_has_three_terms_in_training_and_one_in_evaluation() -> None:
    objective = ObjectiveConfig(lambda_rl=0.5, lambda_ca=2.0)
    module, data = model(ReTreever, objective=objective), batch()
    loss = module.loss(data)
    expected = loss.task + 0.5 * loss.policy + 2.0 * loss.leaves
    assert gap(loss.total, expected) <= 1e-5 and min(abs(float(loss.policy)), float(loss.leaves)) > 0
    loss = module.eval().loss(data)
    assert torch.equal(loss.total, loss.task) and float(loss.policy) == float(loss.leaves) == 0


def test_the_reward_may_be_any_function() -> None:
    seen: list[tuple[Distribution, Tensor]] = []

    def constant(dist: Distribution, y: Tensor) -> Tensor:
        seen.append((dist, y))
        return torch.full(y.shape[:2], 3.0)

    data = batch()
    module = model(ReTreever, reward=constant)
    assert float(module.loss(data).reward) == 3.0 and len(seen) == 2 and torch.equal(seen[0][1], data.yt)


def test_search_tells_how_predictions_came_about() -> None:
    module, data = model(ReTreever).eval(), batch()
    memory = module.encode(data.xc, data.yc)
    found = module.search(memory, data.xt)
    assert torch.equal(module.head(found.output).mean, module.answer(memory, data.xt).mean)
    assert found.tokens == module.tokens(11) and (module.search(memory, data.xt, torch.zeros(3, 5, 3)).path == 0).all()


@models
def test_every_model_learns_one_batch_by_heart(kind: type[nn.Module]) -> None:
    """Squared error falls below 2 % of where it started."""
    module = model(kind, dim=32, hidden=32, layers=1, residual="pre", head="point", dim_y=1)
    x = torch.linspace(-2, 2, 8).expand(2, 8)[..., None].expand(2, 8, 2)
    data = Batch(x, torch.sin(2 * x[..., :1]), rand(2, 5, 2), rand(2, 5, 1, seed=1))
    optimizer = torch.optim.Adam(module.parameters(), lr=5e-3)
    start = number(module.eval().loss(data).task)
    module.train()
    for _ in range(200):
        optimizer.zero_grad()
        module.loss(data).total.backward()
        optimizer.step()
    assert number(module.eval().loss(data).task) < 0.02 * start


def test_tokens_are_counted_as_in_the_paper() -> None:
    """All n for plain attention, L latents for Perceiver IO, 7 to 10 of 64 to 512 for binary trees."""
    assert [model(ReTreever).tokens(n) for n in (1, 2, 64, 128, 256, 512)] == [1, 2, 7, 8, 9, 10]
    assert [model(ReTreever, branch=k).tokens(256) for k in (256, 32, 16, 8)] == [256, 39, 31, 18]
    assert model(ReTreever, retrieval="full").tokens(100) == model(TransformerCA).tokens(100) == 100
    assert model(PerceiverIO, latents=7).tokens(1000) == 7


@pytest.mark.parametrize("data", [batch(), ragged()], ids=["equal", "ragged"])
@torch.no_grad()
def test_a_budget_reads_from_one_path_to_all_tokens(data: Batch) -> None:
    """Given to the model, to a call or later: the same. None is the search as it was, all tokens full retrieval."""
    plain, full = model(ReTreever).eval(), model(ReTreever, retrieval="full").eval()
    inputs = (data.xc, data.yc, data.xt, data.context_mask)
    means = {budget: plain.predict(*inputs, budget=budget).mean for budget in (None, 1, 7, 11, 50)}
    assert torch.equal(means[None], plain.predict(*inputs).mean)
    assert gap(means[11], full.predict(*inputs).mean) <= 1e-6 and torch.equal(means[11], means[50])
    assert gap(means[7], means[11]) > 1e-6 and gap(means[7], means[None]) > 1e-6
    for budget, mean in means.items():
        assert torch.equal(model(ReTreever, budget=budget).eval().predict(*inputs).mean, mean)
        assert torch.equal(model(ReTreever).eval().set_reading(budget=budget).predict(*inputs).mean, mean)
    assert gap(plain.set_reading("full").predict(*inputs).mean, full.predict(*inputs).mean) == 0
    assert torch.equal(plain.set_reading().predict(*inputs).mean, means[None])


@torch.no_grad()
def test_a_search_tells_what_a_budget_read() -> None:
    """No more tokens than the model promises, all of a shorter context, and no more nodes scored than there are."""
    module, data = model(ReTreever, budget=7).eval(), ragged()
    memory = module.encode(data.xc, data.yc, data.context_mask)
    lengths = data.context_mask.sum(dim=1)[:, None]
    for budget in (7, 9, 11):
        found = module.search(memory, data.xt, budget=None if budget == 7 else budget)
        limit = model(ReTreever, budget=budget).tokens(11)
        assert found.tokens == limit == budget
        assert (found.tokens_read <= lengths.clamp_max(limit)).all() and (found.tokens_read[:2] == lengths[:2]).all()
        assert torch.equal(found.tokens_read, (found.selected >= 0).sum(dim=2))
        assert (found.nodes_scored <= memory.mask.sum(dim=1, keepdim=True)).all()
    path = module.set_reading().search(memory, data.xt)
    assert path.rows is None and (path.tokens_read <= path.tokens).all() and module.tokens(11) == 5


def test_tokens_of_a_budget_are_never_more_than_there_are() -> None:
    assert [model(ReTreever, budget=budget).tokens(256) for budget in (1, 9, 40, 256, 999)] == [9, 9, 40, 256, 256]
    assert model(ReTreever, budget=40).tokens(8) == 8 and model(ReTreever, budget=4, retrieval="full").tokens(64) == 64


def test_a_budget_trains() -> None:
    """Every parameter gets a gradient, detours and all."""
    module, data = model(ReTreever, budget=7, objective=ObjectiveConfig(detours=0.5)), batch()
    loss = module.loss(data, module.draws_for(data, torch.Generator().manual_seed(0)))
    loss.total.backward()
    assert all(part.isfinite() for part in loss)
    assert [name for name, p in module.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []


@pytest.mark.parametrize("budget", [0, -1, 1.5, True, "8"])
def test_budgets_that_mean_nothing_are_refused(budget: Any) -> None:
    """At every place that takes one, in one line; and a refused one changes nothing."""
    module, data = model(ReTreever, budget=7).eval(), batch()
    memory = module.encode(data.xc, data.yc)
    calls: list[Callable[[], object]] = [
        lambda: model(ReTreever, budget=budget),
        lambda: module.predict(data.xc, data.yc, data.xt, budget=budget),
        lambda: module.answer(memory, data.xt, budget=budget),
        lambda: module.search(memory, data.xt, budget=budget),
        lambda: module.set_reading(budget=budget),
    ]
    for call in calls:
        with pytest.raises(InputError, match=r"^budget: expected an int >= 1, got [^\n]*$"):
            call()
    with pytest.raises(InputError, match=r"^retrieval: expected one of policy, full, got [^\n]*$"):
        module.set_reading("fulll")
    assert module.config.budget == module.attention.budget == 7 and module.attention.retrieval == "policy"


def test_settings_saved_before_there_were_budgets_still_load() -> None:
    saved = model_to_json(model(ReTreever))
    assert saved["budget"] is None
    old = {name: value for name, value in saved.items() if name != "budget"}
    loaded = model_from_json(json.loads(json.dumps(old)))
    assert loaded.config == model(ReTreever).config and loaded.attention.budget is None
    again = model_from_json(json.loads(json.dumps(model_to_json(model(ReTreever).set_reading("full", 9)))))
    assert (again.attention.retrieval, again.attention.budget) == ("full", 9)


@torch.no_grad()
def test_a_pretrained_model_reads_under_any_budget() -> None:
    """The weights stay as they are, and more tokens bring its predictions nearer to those from all of them."""
    module = load_pretrained("gp")
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    xc = torch.linspace(-2, 2, 40)[None, :, None]
    yc, xt = (2 * xc).sin(), torch.linspace(-2, 2, 31)[None, :, None]
    memory = module.encode(xc, yc)
    full = module.set_reading("full").answer(memory, xt).mean
    means = [module.set_reading(budget=budget).answer(memory, xt).mean for budget in (1, 20, 40)]
    gaps = [float((mean - full).abs().mean()) for mean in means]
    assert gaps[0] > gaps[1] > gaps[2] and gaps[2] <= 1e-5
    assert all(torch.equal(weight, before[name]) for name, weight in module.state_dict().items())


def test_perceiver_reads_the_context_in_every_block_or_once() -> None:
    iterative, once = model(PerceiverIO, layers=3, latents=5), model(PerceiverIO, layers=3, iterative=False)
    assert len(iterative.distil) == len(iterative.mix) == len(once.mix) == 3 and len(once.distil) == 1
    assert iterative.latents.shape == (5, 16)
    assert iterative.encode(batch().xc, batch().yc).keys.shape[1] == 5


@models
def test_a_config_and_keyword_arguments_make_the_same_model(kind: type[nn.Module]) -> None:
    """And a state dict moves one to the other, bit by bit."""
    by_name = model(kind)
    by_config = kind(by_name.config)
    by_config.load_state_dict(by_name.state_dict())
    one, two = (m.eval().predict(batch().xc, batch().yc, batch().xt).mean for m in (by_name, by_config))
    assert torch.equal(one, two)


@models
def test_autocast_trains(kind: type[nn.Module]) -> None:
    module, data = model(kind), batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss = module.loss(data).total
    loss.backward()
    assert loss.isfinite() and all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@models
def test_double_precision_agrees(kind: type[nn.Module]) -> None:
    module, data = model(kind), batch()
    single = module.eval().predict(data.xc, data.yc, data.xt).mean
    double = module.double().predict(data.xc.double(), data.yc.double(), data.xt.double()).mean
    assert double.dtype == torch.float64 and gap(single.double(), double) <= 1e-4


@pytest.mark.parametrize(
    ("head", "gate", "silent"),
    [("categorical", "leaves", True), ("categorical", "open", False), ("gaussian", "leaves", False)],
)
def test_the_search_waits_for_the_leaves_where_predictions_are_classes(head: str, gate: Gate, silent: bool) -> None:
    """At chance only the leaves are trained: the aggregator, which nothing but the search uses, gets no gradient."""
    module = model(ReTreever, head=head, objective=ObjectiveConfig(gate=gate))
    # As if other processes were worse than chance.
    module.loss(batch(head=head), mean=lambda mean: mean + 10).total.backward()
    assert all(not p.grad.any() for p in module.attention.aggregator.parameters()) is silent


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64])
def test_a_reward_may_be_of_any_type(dtype: torch.dtype) -> None:
    module = ReTreever(model(ReTreever).config, reward=lambda dist, y: (y[..., 0] > 0).to(dtype))
    loss = module.loss(batch())
    assert loss.total.dtype == loss.reward.dtype == torch.float32 and loss.total.isfinite()


def test_the_terms_make_up_the_loss() -> None:
    module, data = model(ReTreever, objective=ObjectiveConfig(detours=0.5)), batch()
    loss = module.loss(data, module.draws_for(data, torch.Generator().manual_seed(0)))
    assert loss.detours.item() != 0
    assert loss.total.item() == pytest.approx(float(loss.task + loss.policy + loss.leaves + loss.detours), rel=1e-5)


class Largest(nn.Module):
    def forward(self, children: Tensor, mask: Tensor | None) -> Tensor:
        return children.amax(dim=1)


def test_an_aggregator_of_ones_own_goes_into_the_model() -> None:
    own = Largest()
    module = model(ReTreever, aggregator=own)
    assert module.attention.aggregator is own and module.config.aggregator == "transformer"
    assert ReTreever(module.config, aggregator=own).attention.aggregator is own
    named = model(ReTreever, aggregator="mean")
    assert named.config.aggregator == "mean" and named.attention.aggregator is None
    named.loss(batch()).total.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in named.parameters())
    module.loss(batch()).total.backward()


@models
def test_one_impl_holds_for_the_whole_model(kind: type[nn.Module]) -> None:
    module = model(kind, impl="reference")
    assert {part.impl for part in module.modules() if hasattr(part, "impl")} == {"reference"}


@models
def test_the_reference_has_second_derivatives_and_takes_transforms(kind: type[nn.Module]) -> None:
    module, data = model(kind, impl="reference").double().eval(), batch()
    xc, yc, xt = (part.double() for part in (data.xc, data.yc, data.xt))

    def total(places: Tensor) -> Tensor:
        return module.predict(xc, yc, places).mean.square().sum()

    start = xt.clone().requires_grad_()
    (first,) = torch.autograd.grad(total(start), start, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), start)
    assert second.isfinite().all() and second.any()
    assert torch.allclose(torch.func.grad(total)(xt), first.detach())


@models
def test_an_encoder_of_one_s_own_returns_as_many_tokens_as_it_gets(kind: type[nn.Module]) -> None:
    class Cut(nn.Module):
        def __init__(self, cut: Callable[[Tensor], object]) -> None:
            super().__init__()
            self.cut = cut

        def forward(self, tokens: Tensor, mask: Tensor | None) -> object:
            return self.cut(tokens)

    own = model(kind).eval()
    if not hasattr(own, "encoder"):
        pytest.skip("has none")
    one = batch()
    for cut, got in (
        (lambda t: t[:, :1], r"\(3, 1, 16\)"),
        (lambda t: t[..., :8], r"\(3, 11, 8\)"),
        (lambda t: (t,), "tuple"),
    ):
        own.encoder = Cut(cut)
        with pytest.raises(InputError, match=rf"^encoder: expected one that returns .* \(3, 11, 16\), got {got}"):
            own.predict(one.xc, one.yc, one.xt)


def test_a_number_of_tokens_is_refused_where_budget_takes_it() -> None:
    with pytest.raises(InputError, match=r"^retrieval: .* a number of tokens is budget=, got 14$"):
        ReTreever(dim=16, layers=1).set_reading(14)  # type: ignore[arg-type]


def test_waves_without_frequency_are_refused() -> None:
    with pytest.raises(InputError, match=r"^frequency: expected a number > 0, got 0"):
        ReTreever(dim=16, layers=1, waves=4, frequency=0.0)
