"""`Scaler`: brings data to about one and back, leaves unknown values alone, is saved with the weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Independent, Normal

from retreever import ANP, Batch, InputError, ReTreever, Scaled, Scaler, TransformerCA
from retreever.train import TrainConfig, evaluate, fit, fit_staged
from retreever.train.protocols import Searches

SIZES: dict[str, Any] = {"dim": 16, "heads": 2, "layers": 1, "hidden": 16}


def data(seed: int = 0, shift: float = 300.0, spread: float = 7.0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = 1990 + 10 * torch.rand(4, 12, 2, generator=generator)
    y = shift + spread * torch.randn(4, 12, 1, generator=generator)
    return Batch(x[:, :7], y[:, :7], x[:, 7:], y[:, 7:])


@settings(max_examples=20, deadline=None)
@given(st.floats(-1e3, 1e3), st.floats(0.1, 1e3), st.integers(0, 99))
def test_targets_become_standard_and_come_back(shift: float, spread: float, seed: int) -> None:
    batch = data(seed, shift, spread)
    scaler = Scaler.of(batch)
    scaled = scaler.batch(batch)
    assert abs(float(scaled.yt.mean())) < 1e-3 and abs(float(scaled.yt.std(correction=0)) - 1) < 1e-3
    assert float(scaled.xc.abs().max()) < 4
    back = scaler.invert(Independent(Normal(scaled.yt, torch.ones_like(scaled.yt)), 1))
    torch.testing.assert_close(back.mean, batch.yt, rtol=1e-4, atol=1e-3 * spread)


def test_densities_change_by_the_spread() -> None:
    """log p(y) = log p(scaled y) - log spread."""
    batch = data()
    scaler = Scaler.of([batch])
    inner = Independent(Normal(torch.zeros(4, 5, 1), torch.ones(4, 5, 1)), 1)
    outer = scaler.invert(inner)
    expected = inner.log_prob(scaler.batch(batch).yt) - scaler.y_spread.log()
    torch.testing.assert_close(outer.log_prob(batch.yt), expected)


def test_unknown_values_stay_zero_and_do_not_count() -> None:
    batch = data()
    flags = (torch.arange(7) % 2).float().expand(4, 7)[..., None]
    known = torch.ones(4, 5, 1, dtype=torch.bool)
    known[0, 0] = False
    yc = torch.cat([batch.yc * flags, flags], -1)
    gaps = replace(batch, yc=yc, target_mask=known[..., 0], output_mask=known)
    spoilt = replace(gaps, yt=gaps.yt.masked_fill(~known, 1e6))
    one, other = Scaler.of(gaps), Scaler.of(spoilt)
    assert torch.equal(one.y_mean, other.y_mean)
    scaled = one.batch(gaps)
    assert not scaled.yc[..., 0][flags[..., 0] == 0].any() and torch.equal(scaled.yc[..., 1:], flags)


def test_a_scaled_model_trains_saves_and_predicts_in_the_units_of_the_data() -> None:
    torch.manual_seed(0)
    batch = data()
    model = Scaled(ReTreever(dim_x=2, **SIZES), Scaler.of(batch))
    fit(model, [batch], TrainConfig(steps=3, batch=4, warmup=0), validation=[batch])
    twin = Scaled(ReTreever(dim_x=2, **SIZES), Scaler(2, 1))
    twin.load_state_dict(model.state_dict())
    model.eval(), twin.eval()
    one, other = (m.predict(batch.xc, batch.yc, batch.xt, budget=5) for m in (model, twin))
    assert torch.equal(one.mean, other.mean) and abs(float(one.mean.detach().mean()) - 300) < 15
    assert float(model(batch).total.detach()) < 10


def test_mixtures_of_functions_are_scaled_back() -> None:
    """Each of their components is; batches may be tuples."""
    torch.manual_seed(0)
    batch = data()
    model = Scaled(ANP(dim_x=2, dim=16, heads=2), Scaler.of([(batch.xc, batch.yc, batch.xt, batch.yt)])).eval()
    dist = model.predict(batch.xc, batch.yc, batch.xt, samples=3)
    inner = model.model.answer(model.encode(batch.xc, batch.yc, samples=3), model.scaler.x(batch.xt))
    assert dist.components.batch_shape == inner.components.batch_shape == (3, 4, 5)
    assert abs(float(dist.mean.detach().mean()) - 300) < 15 and bool(dist.sample().isfinite().all())
    assert evaluate(model, None, [batch]) == evaluate(model, None, [(batch.xc, batch.yc, batch.xt, batch.yt)])
    with pytest.raises(InputError, match=r"^yt: expected shape \(b, m, dy=1\), got \(4, 5, 3\)"):
        evaluate(model, None, [replace(batch, yt=batch.yt.expand(-1, -1, 3))])


def test_what_cannot_be_scaled_is_refused_by_name() -> None:
    classes = Batch(torch.rand(1, 3, 1), torch.rand(1, 3, 1), torch.rand(1, 2, 1), torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(InputError, match=r"^yt: expected floats .b, m, dy., since classes have no scale"):
        Scaler.of(classes)
    with pytest.raises(InputError, match=r"^yt: expected finite values"):
        Scaler.of(replace(data(), yt=data().yt * torch.nan))
    with pytest.raises(InputError, match=r"^model: expected one that predicts numbers"):
        Scaled(ReTreever(dim_x=2, head="categorical", outputs=3, **SIZES), Scaler.of(data()))
    with pytest.raises(InputError, match=r"^dist: expected normal predictions"):
        Scaler(1, 1).invert(torch.distributions.Categorical(logits=torch.zeros(2, 3)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"xc": (4, 7, 1)}, r"xc: expected shape \(b, n, dx=2\), got \(4, 7, 1\)"),
        ({"yc": (4, 7, 1)}, r"yc: expected shape \(b, n, dy=2\), got \(4, 7, 1\)"),
        ({"xt": (4, 5, 3)}, r"xt: expected shape \(b, n, dx=2\), got \(4, 5, 3\)"),
        ({"yt": (4, 5, 1)}, r"yt: expected shape \(b, m, dy=2\), got \(4, 5, 1\)"),
    ],
)
def test_other_widths_are_refused_and_never_broadcast(wrong: dict[str, tuple[int, ...]], message: str) -> None:
    batch = data()
    batch = Batch(batch.xc, batch.yc.repeat(1, 1, 2), batch.xt, batch.yt.repeat(1, 1, 2))
    model = Scaled(ReTreever(dim_x=2, dim_y=2, **SIZES), Scaler.of(batch)).eval()
    bad = replace(batch, **{name: torch.rand(shape) for name, shape in wrong.items()})
    with pytest.raises(InputError, match=f"^{message}"):
        model.loss(bad)
    if "yt" not in wrong:
        with pytest.raises(InputError, match=f"^{message}"):
            model.predict(bad.xc, bad.yc, bad.xt)


def test_a_scaler_of_other_data_than_the_model_s_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"^scaler: expected as many coordinates and outputs as the model has, 3 and 1"
    ):
        Scaled(ReTreever(dim_x=3, **SIZES), Scaler.of(data()))
    with pytest.raises(InputError, match=r"^batches: expected items that are a Batch .* got tuple"):
        Scaler.of([(data().xc,)])  # type: ignore[list-item]
    with pytest.raises(InputError, match=r"^xc: expected finite values"):
        Scaler.of(replace(data(), xc=data().xc / 0))


def test_a_scaled_model_encodes_once_reads_budgets_and_trains_with_detours() -> None:
    """What it draws for a step is what its model draws: without draws there are no detours."""
    torch.manual_seed(0)
    batch = data()
    plain = ReTreever(dim_x=2, **SIZES)
    model = Scaled(plain, Scaler.of(batch)).eval()
    memory = model.encode(batch.xc, batch.yc)
    whole = model.predict(batch.xc, batch.yc, batch.xt, budget=7).mean
    assert torch.equal(model.answer(memory, batch.xt, budget=7).mean, whole)
    assert torch.equal(model.set_reading("full").predict(batch.xc, batch.yc, batch.xt).mean, whole)
    assert model.tokens(7) == 7 and isinstance(model, Searches)
    draws = model.draws_for(batch, torch.Generator().manual_seed(1))
    assert torch.equal(draws.noise, plain.draws_for(batch, torch.Generator().manual_seed(1)).noise)
    with pytest.raises(AttributeError, match="search"):  # it would take scaled units
        model.search(memory, batch.xt)


def test_a_scaled_attention_is_trained_first_and_converted() -> None:
    torch.manual_seed(0)
    batch = data()
    attention = Scaled(TransformerCA(dim_x=2, encoder="identity", waves=4, **SIZES), Scaler.of(batch))
    model, _ = fit_staged(attention, [batch], TrainConfig(steps=4, warmup=0), first=0.5)
    one = attention.eval().predict(batch.xc, batch.yc, batch.xt)
    other = model.eval().predict(batch.xc, batch.yc, batch.xt, budget=7)
    assert isinstance(model, Scaled) and isinstance(model.model, ReTreever)
    torch.testing.assert_close(one.mean, other.mean)
