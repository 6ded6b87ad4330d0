"""All models of irregular series: the same calls and promises, whatever was observed and whenever it is asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from retreever import Batch, InputError, collate, context_of
from retreever.models.saved import model_from_json, model_to_json
from retreever.models.series.base import SeriesModel
from retreever.models.series.kinds import SERIES
from retreever.models.series.observed import series_of
from retreever.nn.heads import HEADS

CHANNELS = 3
TINY = {"hidden": 12, "dim": 8, "dropout": 0.0}
SMALL = {name: {"units": 10, "gru_units": 6} for name in ("ode-rnn", "latent-ode-rnn", "latent-ode")}
CAUSAL = ("rnn-impute", "rnn-decay", "grud", "seft", "ode-rnn")
each = pytest.mark.parametrize("name", SERIES)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def model(name: str, **settings: object) -> SeriesModel:
    """A tiny model with weights of some size, so that everything it reads shows in its answers."""
    torch.manual_seed(0)
    made = SERIES[name](**{"dim_y": 2 * CHANNELS, **TINY, **SMALL.get(name, {}), **settings})
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return made


def batch(n: int = 9, b: int = 2, m: int = 5, seed: int = 0, head: str = "gaussian") -> Batch:
    """Series with a third of their values observed, and at least one."""
    times = rand(b, n, seed=seed).sort(dim=1).values
    observed = rand(b, n, CHANNELS, seed=seed + 1) < 0.33
    observed[:, 0, 0] = True
    xc, yc = context_of(times, 2 * rand(b, n, CHANNELS, seed=seed + 2) - 1, observed)
    yt = rand(b, m, CHANNELS, seed=seed + 3)
    return Batch(
        xc, yc, 1.2 * rand(b, m, 1, seed=seed + 4) - 0.1, (3 * yt[..., 0]).long() if head == "categorical" else yt
    )


def means(made: SeriesModel, data: Batch) -> Tensor:
    return made.eval().predict(data.xc, data.yc, data.xt, data.context_mask).mean


@each
@pytest.mark.parametrize("head", HEADS)
def test_trains_and_predicts(name: str, head: str) -> None:
    made, data = model(name, head=head), batch(head=head)
    loss = made.loss(data)
    loss.total.backward()
    assert loss.total.isfinite()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in made.parameters())
    dist = made.eval().predict(data.xc, data.yc, data.xt)
    assert made.tokens(9) == 0 and made.loss(data).total == made.loss(data).task
    found = dist.logits if head == "categorical" else dist.mean
    assert found.shape == (2, 5, CHANNELS) and found.isfinite().all()


@each
def test_learns_a_step(name: str) -> None:
    """The class of a time is the sign of the only channel, which changes once."""
    times = torch.linspace(0, 1, 12).expand(32, -1)
    state = (times > rand(32, 1, seed=3)).long()
    xc, yc = context_of(times, 4.0 * state[..., None] - 2)
    data = Batch(xc, yc, xc, state)
    torch.manual_seed(0)
    made = SERIES[name](dim_y=2, outputs=2, head="categorical", **{**TINY, **SMALL.get(name, {}), "hidden": 24})
    optimiser = torch.optim.Adam(made.parameters(), lr=2e-2)
    for _ in range(60):
        optimiser.zero_grad()
        made.loss(data).total.backward()
        optimiser.step()
    right = made.eval().predict(xc, yc, xc).logits.argmax(dim=-1) == state
    assert right.float().mean() > 0.9


@each
def test_padding_changes_nothing(name: str) -> None:
    """Rows of different lengths answer in company as they do alone, wherever the padding lies and whatever it holds."""
    rows = [batch(n, b=1, m=4, seed=10 * n) for n in (1, 4, 9)]
    whole, made = collate(rows), model(name).double()
    to64 = {part: getattr(whole, part).double() for part in ("xc", "yc", "xt", "yt")}
    whole = dataclasses.replace(whole, **to64)
    mask = whole.context_mask
    made.eval()
    expected = torch.cat([made.predict(row.xc.double(), row.yc.double(), row.xt.double()).mean for row in rows])
    assert torch.allclose(means(made, whole), expected, atol=1e-12)
    junk = {part: getattr(whole, part).masked_fill(~mask[..., None], torch.nan) for part in ("xc", "yc")}
    assert torch.equal(means(made, dataclasses.replace(whole, **junk)), means(made, whole))
    order = torch.arange(9).repeat(3, 1)
    order[1] = torch.tensor([8, 0, 7, 1, 6, 2, 5, 3, 4])  # padding between the four real points
    moved = {
        part: getattr(whole, part).gather(1, order[..., None].expand_as(getattr(whole, part))) for part in ("xc", "yc")
    }
    spread = dataclasses.replace(whole, **moved, context_mask=mask.gather(1, order))
    assert torch.allclose(means(made, spread), expected, atol=1e-12)


@each
def test_values_not_observed_are_not_read(name: str) -> None:
    made, data = model(name), batch()
    values, flags = data.yc.chunk(2, dim=-1)
    for junk in (torch.nan, 1e3):
        other = torch.cat([torch.where(flags > 0, values, junk), flags], dim=-1)
        assert torch.equal(means(made, dataclasses.replace(data, yc=other)), means(made, data))


@each
def test_no_query_has_no_answer(name: str) -> None:
    made, data = model(name).eval(), batch()
    assert made.predict(data.xc, data.yc, data.xt[:, :0]).mean.shape[:2] == (2, 0)


@each
def test_queries_do_not_see_each_other(name: str) -> None:
    """Up to the error of the solver for latent ODEs, whose steps reach to the latest time asked."""
    made, data = model(name), batch(m=7)
    expected = means(made, data)
    order = torch.tensor([3, 0, 6, 5, 1, 2, 4])
    for chosen in (order, torch.tensor([2])):
        few = means(made, dataclasses.replace(data, xt=data.xt[:, chosen], yt=data.yt[:, chosen]))
        assert torch.allclose(few, expected[:, chosen], atol=2e-4 if name.startswith("latent") else 1e-6)


@each
@pytest.mark.parametrize("case", ["one point", "one time", "one channel", "empty point"])
def test_odd_series(name: str, case: str) -> None:
    """One point; all points at one time; channels never observed; a point without observations."""
    data = batch(1) if case == "one point" else batch()
    values, flags = data.yc.clone().chunk(2, dim=-1)
    xc = torch.full_like(data.xc, 0.4) if case == "one time" else data.xc
    if case == "one channel":
        flags[..., 1:] = 0
    if case == "empty point":
        flags[:, 3] = 0
    made, odd = model(name), dataclasses.replace(data, xc=xc, yc=torch.cat([values * flags, flags], dim=-1))
    made.loss(odd).total.backward()
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in made.parameters())
    assert means(made, odd).isfinite().all()


@pytest.mark.parametrize("name", CAUSAL)
def test_the_future_changes_no_earlier_answer(name: str) -> None:
    """Exactly: not a bit."""
    data = batch(12, m=30)
    made = model(name)
    before = means(made, data)
    cut = float(data.xc[:, 6].amax())
    later = data.xc > cut
    values, flags = data.yc.chunk(2, dim=-1)
    changed = torch.cat(
        [torch.where(later, 50 * rand(*values.shape, seed=9), values), torch.where(later, 1.0, flags)], dim=-1
    )
    after = means(made, dataclasses.replace(data, yc=changed))
    early = (data.xt <= cut)[..., 0]
    assert early.any() and (~early).any()
    assert torch.equal(after[early], before[early]) and not torch.equal(after[~early], before[~early])


@pytest.mark.parametrize("name", CAUSAL)
def test_an_answer_is_that_of_the_series_so_far(name: str) -> None:
    """All answers at once equal those of every prefix alone: for SeFT, running sums equal sums made anew."""
    data = batch(8, b=1)
    made = model(name).double().eval()
    xc, yc = data.xc.double(), data.yc.double()
    whole = made.predict(xc, yc, xc).mean
    for end in range(1, 9):
        prefix = made.predict(xc[:, :end], yc[:, :end], xc[:, end - 1 : end]).mean
        assert torch.allclose(prefix[0, 0], whole[0, end - 1], atol=1e-12)


@each
def test_saved_settings_build_the_same_model(name: str) -> None:
    made = model(name)
    again = model_from_json(model_to_json(made))
    assert type(again) is type(made) and again.config == made.config
    again.load_state_dict(made.state_dict())
    assert torch.equal(means(again, batch()), means(made, batch()))


@each
def test_a_memory_answers_again(name: str) -> None:
    made, data = model(name).eval(), batch()
    memory = made.encode(data.xc, data.yc)
    assert torch.equal(made.answer(memory, data.xt).mean, means(made, data))
    with pytest.raises(InputError, match=r"^memory: expected \w+ made by encode\(\), got int$"):
        made.answer(3, data.xt)
    with pytest.raises(InputError, match=r"^xt: expected shape"):
        made.answer(memory, data.xt[:1])


def unsorted(data: Batch) -> Batch:
    xc = data.xc.clone()
    xc[1, 5] = xc[1, 2]
    return dataclasses.replace(data, xc=xc)


def observed_nan(data: Batch) -> Batch:
    yc = data.yc.clone()
    yc[1, 4, 2], yc[1, 4, 2 + CHANNELS] = torch.nan, 1
    return dataclasses.replace(data, yc=yc)


def nothing(data: Batch) -> Batch:
    yc = data.yc.clone()
    yc[1, :, CHANNELS:] = 0
    return dataclasses.replace(data, yc=yc)


def half(data: Batch) -> Batch:
    yc = data.yc.clone()
    yc[0, 3, CHANNELS] = 0.25
    return dataclasses.replace(data, yc=yc)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (unsorted, r"^xc: expected times in order, got 0\.\d+ at series 1, point 5$"),
        (observed_nan, r"^yc: expected finite values where observed, got nan at series 1, point 4, channel 2$"),
        (nothing, r"^yc: expected at least one observation in every series, got none in series 1$"),
        (half, r"^yc: expected 1 where a channel was observed, else 0, got 0.25 at series 0, point 3, channel 0$"),
    ],
)
def test_bad_input_is_refused_by_place(spoil: Callable[[Batch], Batch], message: str) -> None:
    made, bad = model("grud"), spoil(batch())
    with pytest.raises(InputError, match=message):
        made.loss(bad)
    with pytest.raises(InputError, match=message):
        made.predict(bad.xc, bad.yc, bad.xt)


def test_settings_that_no_series_has_are_refused() -> None:
    with pytest.raises(InputError, match=r"^dim_y: expected an even number"):
        SERIES["grud"](dim_y=3)
    with pytest.raises(InputError, match=r"^dim_x: expected 1, the time, got 2"):
        SERIES["grud"](dim_x=2)
    with pytest.raises(InputError, match=r"^yc: expected shape"):
        model("grud").loss(dataclasses.replace(batch(), yc=batch().yc[..., :4]))


def test_context_of_reads_nan_as_missing() -> None:
    values = torch.tensor([[[1.0, torch.nan], [torch.nan, 2.0]]])
    xc, yc = context_of(torch.tensor([[0.0, 1.0]]), values)
    assert yc.tolist() == [[[1, 0, 1, 0], [0, 2, 0, 1]]] and xc.shape == (1, 2, 1)
    hidden = context_of(torch.tensor([[0.0]]), torch.tensor([[[7.0]]]), torch.tensor([[[False]]]))[1]
    assert hidden.tolist() == [[[0, 0]]]
    with pytest.raises(InputError, match=r"^observed: expected dtype torch.bool"):
        context_of(torch.tensor([[0.0, 1.0]]), values, torch.ones(1, 2, 2))


def test_a_series_backwards_and_back_is_itself() -> None:
    data = collate([batch(4, b=1, seed=1), batch(7, b=1, seed=2)])
    series = series_of(data.xc, data.yc, data.context_mask)
    again = series.backwards().backwards()
    for part in ("times", "values", "observed", "real"):
        first, second = getattr(series, part), getattr(again, part)
        assert torch.equal(first[series.real], second[series.real]), part
    assert (series.backwards().gaps >= 0).all()
