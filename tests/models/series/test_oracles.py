"""Every part of the models of series against its formula, written out in loops or computed by other software."""

from __future__ import annotations

import math
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retreever import GRUD, ODERNN, BackendError, Batch, IPNets, LatentODE, MTANDEnc, RNNImpute, SeFT, context_of
from retreever.models.series import ode
from retreever.models.series.interpolate import average_observed
from retreever.models.series.observed import Series, series_of
from retreever.models.series.ode import euler, solve_adaptive, solve_fixed
from retreever.nn.blocks import MLP

CHANNELS = 3
SMALL = {"dim_y": 2 * CHANNELS, "dropout": 0.0}


def series(n: int = 10, b: int = 2, seed: int = 0) -> Series:
    generator = torch.Generator().manual_seed(seed)
    times = torch.rand(b, n, generator=generator, dtype=torch.float64).sort(dim=1).values
    values = torch.randn(b, n, CHANNELS, generator=generator, dtype=torch.float64)
    observed = torch.rand(b, n, CHANNELS, generator=generator) < 0.5
    observed[0, :, 2], observed[:, 0, 0] = False, True  # a channel never seen
    return series_of(*context_of(times, values, observed), None)


def by_recursion(given: Series, row: int, channel: int, mean: float) -> list[tuple[float, float]]:
    """Last value and time since, by the recursion of GRU-D's paper."""
    found, since, last = [], 0.0, mean
    for i in range(given.times.shape[1]):
        if i:
            gap = float(given.times[row, i] - given.times[row, i - 1])
            since = gap if given.observed[row, i - 1, channel] else gap + since
            last = float(given.values[row, i - 1, channel]) if given.observed[row, i - 1, channel] else last
        found.append((last, since))
    return found


def test_elapsed_times_and_imputed_values_are_those_of_the_recursion() -> None:
    model, given = GRUD(**SMALL).double().requires_grad_(False), series()
    with torch.no_grad():
        model.impute.mean.copy_(torch.tensor([0.5, -1.0, 2.0]))
        model.impute.bias.fill_(0.1)
    since, imputed = model._since(given), model.impute(given)
    for row in range(2):
        for channel in range(CHANNELS):
            mean = float(model.impute.mean[channel])
            for i, (last, elapsed) in enumerate(by_recursion(given, row, channel, mean)):
                assert math.isclose(float(since[row, i, channel]), elapsed, abs_tol=1e-12)
                kept = math.exp(-max(0.0, float(model.impute.rate[channel]) * elapsed + 0.1))
                seen = bool(given.observed[row, i, channel])
                expected = float(given.values[row, i, channel]) if seen else kept * last + (1 - kept) * mean
                assert math.isclose(float(imputed[row, i, channel]), expected, abs_tol=1e-6)


def set_decay(model: GRUD, bias: float) -> None:
    with torch.no_grad():
        for weight in (model.decay.weight, model.impute.rate):
            weight.zero_()
        for weight in (model.decay.bias, model.impute.bias):
            weight.fill_(bias)


def test_without_decay_grud_is_a_gru_on_last_values() -> None:
    model, given = GRUD(**SMALL).double(), series()
    set_decay(model, 0.0)
    gru = nn.GRU(2 * CHANNELS, 128, batch_first=True).double()
    gru.load_state_dict({f"{name}_l0": weight for name, weight in model.cell.state_dict().items()})
    held = torch.zeros_like(given.values)
    for i in range(given.times.shape[1]):
        before = held[:, i - 1] if i else torch.zeros_like(held[:, 0])
        held[:, i] = torch.where(given.observed[:, i], given.values[:, i], before)
    expected = gru(torch.cat([held, given.flags], dim=-1))[0]
    assert torch.allclose(model.summarise(given).states, expected, atol=1e-12)


def test_with_infinite_decay_grud_forgets() -> None:
    """Missing values are the mean, and every state is that of its own point alone."""
    model, given = GRUD(**SMALL).double(), series()
    set_decay(model, torch.inf)
    with torch.no_grad():
        model.impute.mean.fill_(0.7)
    inputs = torch.where(given.observed, given.values, 0.7)
    expected = model.cell(torch.cat([inputs, given.flags], dim=-1).flatten(0, 1))
    assert torch.allclose(model.summarise(given).states.flatten(0, 1), expected, atol=1e-12)


def test_rnn_impute_takes_gaps() -> None:
    """Its one call of a GRU gives the states of cell after cell."""
    model, given = RNNImpute(**SMALL).double(), series()
    state = torch.zeros(2, 128, dtype=torch.float64)
    states, imputed = model.summarise(given).states, model.impute(given)
    for i in range(10):
        gap = (given.times[:, i] - given.times[:, i - 1])[:, None] if i else torch.zeros(2, 1)
        inputs = torch.cat([imputed[:, i], given.flags[:, i], gap.double()], dim=-1)
        weights = [getattr(model.gru, f"{name}_l0") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        state = torch.gru_cell(inputs, state, *weights)
        assert torch.allclose(states[:, i], state, atol=1e-12)


def test_the_kernel_smoother_is_the_direct_sum() -> None:
    """In float64, channel by channel; and in float32 to its precision."""
    model, given = IPNets(**SMALL).double().requires_grad_(False), series()
    with torch.no_grad():
        model.kappa.copy_(torch.tensor([-1.0, 0.0, 2.0]))
        model.mean.fill_(0.3)
    at = torch.linspace(-0.1, 1.1, 7, dtype=torch.float64).expand(2, -1)
    smoothed, intensity = model.smooth(given, at, sharpness=10.0)
    for row in range(2):
        for channel in range(CHANNELS):
            seen = given.observed[row, :, channel]
            alpha = 10 * math.log1p(math.exp(float(model.kappa[channel]))) / 0.05**2
            for i in range(7):
                kernel = torch.exp(-alpha * (at[row, i] - given.times[row, seen]).square())
                if not seen.any():
                    assert smoothed[row, i, channel] == model.mean[channel] and intensity[row, i, channel].exp() == 0
                elif kernel.sum() > 1e-300:
                    expected = (kernel * given.values[row, seen, channel]).sum() / kernel.sum()
                    assert torch.allclose(smoothed[row, i, channel], expected, atol=1e-10)
                    assert torch.allclose(intensity[row, i, channel].exp(), kernel.sum(), rtol=1e-9)
    single = Series(given.times.float(), given.values.float(), given.observed, given.real)
    assert torch.allclose(model.float().smooth(single, at.float(), 10.0)[0].double(), smoothed, atol=2e-4)


def test_trends_mix_channels_by_their_share_of_the_intensity() -> None:
    model, given = IPNets(**SMALL).double(), series()
    with torch.no_grad():
        model.mix.add_(torch.randn(CHANNELS, CHANNELS, dtype=torch.float64))
    smoothed, intensity = model.smooth(given, given.times)
    level = smoothed.mean(dim=1, keepdim=True)
    total = intensity.exp().sum(dim=-1)
    for d in range(CHANNELS):
        terms = [model.mix[d, e] * intensity[..., e].exp() * (smoothed - level)[..., e] for e in range(CHANNELS)]
        expected = level[..., d] + sum(terms) / total
        assert torch.allclose(model.cross(smoothed, intensity, level)[..., d], expected, atol=1e-10)


def test_reconstruction_hides_some_and_never_all_of_a_channel() -> None:
    """With nearly everything hidden, channels with a single observation keep it and cost nothing."""
    given = series(b=1)
    only = torch.zeros_like(given.observed)
    only[:, 3] = True
    alone = Series(given.times, torch.ones_like(given.values) * only, only, given.real)
    assert IPNets(**SMALL, hide=0.999).double().reconstruct(alone) == 0
    assert IPNets(**SMALL, hide=0.5).double().reconstruct(given) > 0


def test_attention_over_time_is_a_loop_over_channels() -> None:
    model, given = MTANDEnc(**SMALL, hidden=16, dim=8).double(), series()
    at = torch.rand(2, 6, dtype=torch.float64)
    scores = model.to_q(model.embed_time(at)) @ model.to_k(model.embed_time(given.times)).mT / math.sqrt(8)
    columns = []
    for part in (given.values, given.flags):
        for channel in range(CHANNELS):
            masked = scores.masked_fill(~given.observed[:, None, :, channel], -1e9)
            columns.append((masked.softmax(dim=-1) @ part[..., channel, None])[..., 0])
    expected = model.to_inputs(torch.stack(columns, dim=-1))
    assert torch.allclose(model.interpolate(given, at), expected, atol=1e-12)


def test_the_time_embedding_is_linear_first_then_periodic() -> None:
    model = MTANDEnc(**SMALL, dim=4).embed_time
    t = torch.tensor([[0.3]])
    weight, bias = model.linear.weight[:, 0], model.linear.bias
    expected = [weight[0] * 0.3 + bias[0], *(torch.sin(weight[i] * 0.3 + bias[i]) for i in (1, 2, 3))]
    assert torch.allclose(model(t)[0, 0], torch.stack(expected))


@pytest.mark.parametrize("kind", [IPNets, MTANDEnc])
def test_asked_at_its_own_times_an_interpolating_model_answers_with_its_gru(kind: type) -> None:
    model, given = kind(**SMALL, hidden=16).double().eval(), series()
    memory = model.summarise(given)
    assert torch.allclose(model.features(memory, given.times), memory.states, atol=1e-12)


def test_mtand_has_the_published_number_of_parameters() -> None:
    model = MTANDEnc(dim_y=24, outputs=11, head="categorical")
    assert sum(weight.numel() for weight in model.parameters()) == 1_627_659


def test_a_channel_without_observations_has_mean_zero_and_no_weight() -> None:
    given = series()
    scores = torch.randn(2, 1, 4, 10, dtype=torch.float64)
    mean, total = average_observed(scores, given, given.observed)
    assert (mean[0, :, 2] == 0).all() and (total[0, :, 2].exp() == 0).all()


def test_seft_attends_to_everything_so_far() -> None:
    """Running sums equal a softmax over the observations of each prefix, with keys written out."""
    model, given = SeFT(**SMALL, dim=8, hidden=6).double(), series()
    with torch.no_grad():
        model.query.normal_()
    elements = model.elements(given)
    psi, phi = F.relu(model.psi(elements)), model.phi(elements)
    got = model.features(model.summarise(given), given.times)
    for row in range(2):
        keys = []
        for i in range(10):
            now = psi[row, : i + 1][given.observed[row, : i + 1]]
            mean = now.mean(dim=0) if len(now) else torch.zeros(8, dtype=torch.float64)
            summary = F.relu(model.summary(mean)).expand(CHANNELS, -1)
            keys.append(model.to_k(torch.cat([elements[row, i], summary], dim=-1)).unflatten(-1, (4, 8)))
        scores = (torch.stack(keys) * model.query).sum(dim=-1) / math.sqrt(8)
        for i in range(10):
            seen = given.observed[row, : i + 1]
            weights = scores[: i + 1][seen].softmax(dim=0)
            expected = torch.einsum("kh,kd->hd", weights, phi[row, : i + 1][seen]).flatten()
            assert torch.allclose(got[row, i], expected, atol=1e-10)


def test_seft_points_at_one_time_see_each_other() -> None:
    model = SeFT(**SMALL, dim=8).double().eval()
    times = torch.tensor([[0.1, 0.4, 0.4]], dtype=torch.float64)
    values = torch.randn(1, 3, CHANNELS, dtype=torch.float64)
    swapped = values[:, [0, 2, 1]]
    answers = [model.predict(*context_of(times, v), times[..., None]).mean for v in (values, swapped)]
    assert torch.allclose(*answers, atol=1e-12)


def test_ode_rnn_steps_are_those_of_its_equations() -> None:
    model, given = ODERNN(**SMALL, hidden=5, units=7, layers=1, gru_units=4, steps=2).double(), series(4, b=1)
    r = model.recurrence
    mean = spread = torch.zeros(1, 5, dtype=torch.float64)
    for i, state in enumerate(r(given)[0]):
        gap = given.times[0, i] - given.times[0, i - 1] if i else 0.0
        for _ in range(2):
            mean = mean + gap / 2 * r.field(mean)
        point = torch.cat([given.values[:, i], given.flags[:, i]], dim=-1)
        if given.observed[0, i].any():
            keep, reset = r.gates(torch.cat([mean, spread, point], dim=-1)).sigmoid().chunk(2, dim=-1)
            fresh = r.candidate(torch.cat([mean * reset, spread * reset, point], dim=-1)).chunk(2, dim=-1)
            mean, spread = (1 - keep) * fresh[0] + keep * mean, (1 - keep) * fresh[1].abs() + keep * spread
        assert torch.allclose(state, torch.cat([mean, spread], dim=-1)[0], atol=1e-12)


def field() -> MLP:
    torch.manual_seed(0)
    return MLP(4, 16, 4, 3, nn.Tanh).double()


def asked() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    return start, 2 * torch.rand(3, 6, generator=generator, dtype=torch.float64)


def test_solvers_agree_with_torchdiffeq() -> None:
    odeint = pytest.importorskip("torchdiffeq", reason="needs torchdiffeq (pip install 'retreever[ode]')").odeint
    f, (start, times) = field(), asked()
    with torch.no_grad():
        grid = torch.linspace(0, 1.5, 9, dtype=torch.float64)
        steps = odeint(lambda _, z: f(z), start, grid, method="euler")[-1]
        assert torch.allclose(euler(f, start, torch.full((3, 1), 1.5).double(), 8), steps, atol=1e-12)
        for row in range(3):
            exact_at = torch.cat([torch.zeros(1).double(), times[row].sort().values])
            exact = odeint(lambda _, z: f(z), start[row], exact_at, method="dopri5", rtol=1e-9, atol=1e-9)[1:]
            fixed = solve_fixed(f, start, times, 16)[row][times[row].argsort()]
            assert torch.allclose(fixed, exact, atol=1e-5)
            adaptive = solve_adaptive(f, start, times, 1e-7, 1e-7)[row][times[row].argsort()]
            assert torch.allclose(adaptive, exact, atol=1e-5)


def test_the_fixed_solver_has_the_order_of_its_parts() -> None:
    """dz/dt = -z has exp(-t): halving steps divides the error at the end by 2^5, between steps by 2^4."""
    start = torch.ones(1, 1, dtype=torch.float64)
    ends, between = [], []
    for steps in (4, 8):
        times = torch.tensor([[4.0, 4 / steps / 2]], dtype=torch.float64)
        error = (solve_fixed(lambda z: -z, start, times, steps)[0, :, 0] - torch.exp(-times[0])).abs()
        ends.append(float(error[0]))
        between.append(float(error[1]))
    assert 20 < ends[0] / ends[1] < 80 and 10 < between[0] / between[1] < 30


def test_gradients_of_the_fixed_solver() -> None:
    start, times = asked()
    torch.autograd.gradcheck(lambda z: solve_fixed(torch.sin, z, times, 3), (start.requires_grad_(),))


def test_latent_odes_count_evaluations() -> None:
    settings = {**SMALL, "units": 6, "gru_units": 4, "hidden": 6, "latents": 2}
    times = torch.rand(2, 7).sort(dim=1).values
    xc, yc = context_of(times, torch.randn(2, 7, CHANNELS))
    model = LatentODE(**settings, steps=5).eval()
    model.predict(xc, yc, xc)
    assert model.evaluations == 6 * 5 + 1 and model.capturable
    adaptive = LatentODE(**settings, solver="adaptive").eval()
    assert not adaptive.capturable
    adaptive.load_state_dict(model.state_dict())
    pytest.importorskip("torchdiffeq", reason="needs torchdiffeq (pip install 'retreever[ode]')")
    assert torch.allclose(adaptive.predict(xc, yc, xc).mean, model.predict(xc, yc, xc).mean, atol=1e-3)
    assert adaptive.evaluations > 0


def test_without_torchdiffeq_the_adaptive_solver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchdiffeq", None)
    with pytest.raises(BackendError, match=r"^solver: adaptive needs torchdiffeq .* pip install 'retreever\[ode\]'$"):
        ode.solve_adaptive(torch.sin, *asked())


def test_draws_of_z0_average_the_loss() -> None:
    """In training the loss is the mean over draws, in evaluation that of the mean of z0; without spread they agree."""
    settings = {**SMALL, "units": 6, "gru_units": 4, "hidden": 6, "latents": 2, "head": "point"}
    model = LatentODE(**settings, samples=4)
    with torch.no_grad():
        for weight in (model.to_initial[-1].weight, model.to_initial[-1].bias):
            weight[2:].zero_()
    xc, yc = context_of(torch.rand(2, 5).sort(dim=1).values, torch.randn(2, 5, CHANNELS))
    data = Batch(xc, yc, xc, torch.randn(2, 5, CHANNELS))
    assert torch.allclose(model.loss(data).total, model.eval().loss(data).total, atol=1e-6)
