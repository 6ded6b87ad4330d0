"""Missing values, several outputs and padding, for every model: what is not known or not there has no influence."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributions import Independent, Normal

from retreever import Batch, InputError, PerceiverIO, ReTreever, TransformerCA, collate
from retreever.nn.heads import log_likelihood, squared_error

KINDS: tuple[type[nn.Module], ...] = (ReTreever, TransformerCA, PerceiverIO)
VALUES = ("gaussian", "bounded", "point")
TINY: dict[str, Any] = {"dim_x": 2, "dim_y": 4, "dim": 8, "heads": 2, "layers": 1, "hidden": 8}
models = pytest.mark.parametrize("kind", KINDS)
shapes = {
    "b": st.integers(1, 3),
    "n": st.integers(1, 9),
    "m": st.integers(1, 5),
    "outputs": st.integers(1, 4),
    "seed": st.integers(0, 999),
}


def model(kind: type[nn.Module], outputs: int, head: str = "gaussian", **fields: Any) -> nn.Module:
    """A tiny model on plain torch, the same every time."""
    torch.manual_seed(0)
    plain = {"impl": "reference"} if kind is ReTreever else {}
    return kind(**TINY, **plain, outputs=outputs, head=head, **fields)


def batch(b: int, n: int, m: int, outputs: int, seed: int) -> Batch:
    """Random points and masks; every row has a real context point and target, every real target a known output."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (b, n, 2), (b, n, 4), (b, m, 2), (b, m, outputs)
    points = [torch.randn(*size, generator=generator) for size in sizes]
    context, target, output = (torch.rand(*s, generator=generator) < 0.6 for s in ((b, n), (b, m), (b, m, outputs)))
    context[:, seed % n], target[:, seed % m], output[..., seed % outputs] = True, True, True
    return Batch(*points, context_mask=context, target_mask=target, output_mask=output).validate()


def with_rubbish(clean: Batch, value: float) -> Batch:
    """The same, with `value` wherever a mask says that nothing is there."""
    context, target = ~clean.context_mask[..., None], ~clean.target_mask[..., None]
    return dataclasses.replace(
        clean,
        xc=clean.xc.masked_fill(context, value),
        yc=clean.yc.masked_fill(context, value),
        xt=clean.xt.masked_fill(target, value),
        yt=clean.yt.masked_fill(target | ~clean.output_mask, value),
    )


def loss_and_gradients(module: nn.Module, data: Batch) -> list[Tensor]:
    """Every part of the loss and every gradient, with the same sampled paths each time."""
    module.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    loss = module.loss(data)
    loss.total.backward()
    return [*(part.detach() for part in loss), *(p.grad for p in module.parameters() if p.grad is not None)]


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@models
@settings(max_examples=20, deadline=None)
@given(**shapes, head=st.sampled_from(VALUES), value=st.sampled_from([torch.nan, torch.inf, 1e30, -1.0]))
def test_what_is_masked_changes_nothing_at_all(
    kind: type[nn.Module], b: int, n: int, m: int, outputs: int, seed: int, head: str, value: float
) -> None:
    """Loss, gradients and predictions at real targets differ by exactly 0."""
    module, clean = model(kind, outputs, head), batch(b, n, m, outputs, seed)
    dirty = with_rubbish(clean, value)
    results = loss_and_gradients(module, clean)
    assert same(results, loss_and_gradients(module, dirty)) and all(part.isfinite().all() for part in results)
    module.eval()
    one, two = (module.predict(d.xc, d.yc, clean.xt, d.context_mask) for d in (clean, dirty))
    assert torch.equal(one.mean, two.mean) and torch.equal(one.stddev, two.stddev)


@models
@settings(max_examples=20, deadline=None)
@given(**shapes, head=st.sampled_from(VALUES))
@torch.no_grad()
def test_the_loss_is_over_known_outputs_of_real_targets(
    kind: type[nn.Module], b: int, n: int, m: int, outputs: int, seed: int, head: str
) -> None:
    """Added up output by output, in plain Python."""
    module, data = model(kind, outputs, head).eval(), batch(b, n, m, outputs, seed)
    dist = module.predict(data.xc, data.yc, data.xt, data.context_mask)
    total = 0.0
    for i, j, k in (data.output_mask & data.target_mask[..., None]).nonzero().tolist():
        mean, std, truth = dist.mean[i, j, k], dist.stddev[i, j, k], data.yt[i, j, k]
        total += float((mean - truth) ** 2 if head == "point" else -Normal(mean, std).log_prob(truth))
    assert float(module.loss(data).task) == pytest.approx(total / int(data.target_mask.sum()), rel=1e-4, abs=1e-5)


@models
@settings(max_examples=10, deadline=None)
@given(**shapes)
def test_a_mask_that_hides_nothing_is_no_mask(
    kind: type[nn.Module], b: int, n: int, m: int, outputs: int, seed: int
) -> None:
    module, data = model(kind, outputs), batch(b, n, m, outputs, seed)
    all_known = dataclasses.replace(data, output_mask=torch.ones_like(data.output_mask))
    none = dataclasses.replace(data, output_mask=None)
    assert same(loss_and_gradients(module, all_known), loss_and_gradients(module, none))


@models
@settings(max_examples=10, deadline=None)
@given(**shapes, extra=st.integers(1, 3))
@torch.no_grad()
def test_more_padding_changes_nothing(
    kind: type[nn.Module], b: int, n: int, m: int, outputs: int, seed: int, extra: int
) -> None:
    """Next to a longer batch, a row keeps its predictions and its share of the loss."""
    module, data = model(kind, outputs).eval(), batch(b, n, m, outputs, seed)
    other = dataclasses.replace(batch(1, n + extra, m + extra, outputs, seed + 1), output_mask=None)
    both = collate([data, other]).validate()
    alone = module.predict(data.xc, data.yc, data.xt, data.context_mask).mean
    together = module.predict(both.xc, both.yc, both.xt, both.context_mask).mean[:b, :m]
    assert torch.allclose(alone, together, atol=1e-5)
    shares = [float(module.loss(part).task) * int(part.target_mask.sum()) for part in (data, other)]
    assert float(module.loss(both).task) == pytest.approx(sum(shares) / int(both.target_mask.sum()), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("head", VALUES)
@models
def test_an_output_never_known_is_not_trained(kind: type[nn.Module], head: str) -> None:
    module, data = model(kind, 2, head), batch(3, 7, 5, 2, seed=0)
    known = torch.tensor([True, False]).expand_as(data.output_mask)
    module.loss(dataclasses.replace(data, output_mask=known)).total.backward()
    last = list(module.head.net.modules())[-1].weight.grad  # rows: means, then deviations
    rows = last.reshape(-1, 2, last.shape[-1])
    assert rows[:, 0].any() and not rows[:, 1].any()


def test_a_reward_of_ones_own_sees_unknown_outputs_as_nan() -> None:
    seen = []

    def reward(dist: Independent, y: Tensor) -> Tensor:
        seen.append(y)
        return -(dist.mean - y).abs().nansum(dim=-1)

    data = batch(2, 6, 4, 3, seed=1)
    model(ReTreever, 3, reward=reward).loss(data).total.backward()
    unknown = data.target_mask[..., None] & ~data.output_mask
    assert unknown.any() and all(torch.equal(y.isnan(), unknown) for y in seen)


@pytest.mark.parametrize("measure", [log_likelihood, squared_error])
def test_measures_pass_over_nan_and_their_gradients_do(measure: Any) -> None:
    mean = torch.zeros(1, 2, 2, requires_grad=True)
    y = torch.tensor([[[1.0, torch.nan], [torch.nan, torch.nan]]])
    value = measure(Independent(Normal(mean, torch.ones(1, 2, 2)), 1), y)
    alone = measure(Independent(Normal(torch.zeros(1, 1, 1), torch.ones(1, 1, 1)), 1), y[:, :1, :1])
    assert value.tolist() == [[alone.item(), 0.0]]
    value.sum().backward()
    assert mean.grad.isfinite().all() and mean.grad.count_nonzero() == 1


def test_truth_marks_what_is_not_known() -> None:
    y = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])
    known = torch.tensor([[[True, False], [True, True], [False, False]]])
    data = Batch(y, y, y, y, target_mask=torch.tensor([[True, True, False]]), output_mask=known)
    assert torch.equal(data.truth.nan_to_num(-1), torch.tensor([[[1.0, -1.0], [3.0, 4.0], [0.0, 0.0]]]))
    assert Batch(y, y, y, y).truth is y


def test_collate_keeps_what_is_known() -> None:
    """Rows without a mask are known throughout; padding is not."""
    parts = [batch(1, 3, 2, 2, seed=3), dataclasses.replace(batch(2, 4, 5, 2, seed=4), output_mask=None)]
    both = collate(parts)
    assert torch.equal(both.output_mask[:1, :2], parts[0].output_mask) and not both.output_mask[:1, 2:].any()
    assert both.output_mask[1:].all() and both.rows(slice(0, 1)).output_mask.shape == (1, 5, 2)
    assert collate(parts[1:]).output_mask is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_mask": torch.ones(2, 4, dtype=torch.bool)}, "output_mask: expected shape"),
        ({"output_mask": torch.ones(2, 4, 3)}, "output_mask: expected dtype torch.bool"),
        ({"output_mask": torch.zeros(2, 4, 3, dtype=torch.bool)}, "output_mask: .* real target, got 8 without"),
        ({"yt": torch.zeros(2, 4, dtype=torch.int64)}, r"yt: expected floats .* got torch.int64 \(2, 4\)"),
        ({"target_mask": torch.ones(2, 3, dtype=torch.bool)}, "target_mask: expected shape"),
        ({"output_mask": None, "yt": torch.full((2, 4, 3), torch.nan)}, "yt: expected finite values"),
    ],
)
def test_masks_that_do_not_fit_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    data = dataclasses.replace(batch(2, 6, 4, 3, seed=0), **change)
    with pytest.raises(InputError, match=f"^{message}"):
        data.validate()
    with pytest.raises(InputError, match=f"^{message}"):
        model(ReTreever, 3).loss(data)


@models
def test_a_nan_no_mask_covers_never_passes_for_unknown(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where values cannot be read (compiling, capturing a graph) the loss is no number, which stops a run."""
    data = batch(1, 5, 3, 2, seed=0)
    data = dataclasses.replace(data, yt=data.yt.index_fill(1, torch.tensor([0]), torch.nan), target_mask=None)
    for name in ("checks", "batch", "models.base"):
        monkeypatch.setattr(f"retreever.{name}.values_readable", lambda tensor: False)
    assert not model(kind, 2).loss(dataclasses.replace(data, output_mask=None)).total.isfinite()
