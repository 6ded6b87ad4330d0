"""The neural processes: published sizes, what each promises, and hand-made cases of their losses."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal, kl_divergence

from retreever import ANP, BANP, BNP, CANP, CMANP, CNP, LBANP, NP, TNPD, Batch, InputError, collate
from retreever.models.bnp import drawn_points, own_order
from retreever.models.saved import model_from_json, model_to_json
from retreever.nn.mixture import FunctionMixture

SIX: tuple[type[nn.Module], ...] = (CNP, CANP, NP, ANP, BNP, BANP)
TOKENS: tuple[type[nn.Module], ...] = (TNPD, LBANP, CMANP)
SAMPLED: tuple[type[nn.Module], ...] = (NP, ANP, BNP, BANP)
KINDS = (*SIX, *TOKENS)
models = pytest.mark.parametrize("kind", KINDS)
sampled = pytest.mark.parametrize("kind", SAMPLED)
TINY = {"dim_x": 2, "dim_y": 3, "dim": 16, "heads": 2}
MORE: dict[type[nn.Module], dict[str, int]] = {
    TNPD: {"layers": 2, "hidden": 16},
    LBANP: {"layers": 2, "hidden": 16, "latents": 5},
    CMANP: {"layers": 2, "hidden": 16, "latents": 5, "block_latents": 4},
}
IMAGES = {"celeba": {"dim_x": 2, "dim_y": 3}, "emnist": {"dim_x": 2, "dim_y": 1}}
DEPTHS = {"gp": (4, 2, 4, 2, 3), "celeba": (6, 3, 6, 3, 5), "emnist": (5, 3, 5, 3, 4)}
DEPTH_NAMES = ("pre_depth", "post_depth", "value_depth", "key_depth", "decoder_depth")
PUBLISHED = {
    CNP: (215_682, 349_190, 298_626),
    NP: (232_194, 365_702, 315_138),
    BNP: (248_450, 381_958, 331_394),
    CANP: (331_906, 465_542, 414_978),
    ANP: (348_418, 482_054, 431_490),
    BANP: (364_674, 498_310, 447_746),
    TNPD: (222_082, 222_790, 222_146),
}


def model(kind: type[nn.Module], **settings: object) -> Any:
    """A tiny model on plain torch, the same every time."""
    torch.manual_seed(0)
    return kind(**(TINY | MORE.get(kind, {}) | {"impl": "reference"} | settings))


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch(n: int = 11, m: int = 5, b: int = 3, seed: int = 0) -> Batch:
    return Batch(*(rand(b, size, dim, seed=seed + i) for i, (size, dim) in enumerate(((n, 2), (n, 3), (m, 2), (m, 3)))))


def ragged(where: str = "tail") -> Batch:
    """Contexts of 1, 5 and 11 points, with 4, 6 and 3 targets; "holes" scatters the padding."""
    made = collate([batch(n, m, b=1, seed=10 * n) for n, m in ((1, 4), (5, 6), (11, 3))])
    if where == "tail":
        return made
    order = torch.argsort(torch.rand(3, 11, generator=torch.Generator().manual_seed(5)), dim=1)
    xc, yc = (part.gather(1, order[..., None].expand_as(part)) for part in (made.xc, made.yc))
    return dataclasses.replace(made, xc=xc, yc=yc, context_mask=made.context_mask.gather(1, order))


def predict(module: Any, data: Batch, **more: Any) -> Any:
    """Predictions with the same samples every time."""
    torch.manual_seed(3)
    return module.predict(data.xc, data.yc, data.xt, data.context_mask, **more)


def gap(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).detach().abs().max())


def loss_and_gradients(module: Any, data: Batch) -> list[Tensor]:
    module.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    loss = module.loss(data)
    loss.total.backward()
    return [loss.total.detach(), *(p.grad for p in module.parameters())]


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("kind", PUBLISHED)
def test_parameters_are_those_published(kind: type[nn.Module]) -> None:
    """And the defaults are the sizes of GP regression."""
    gp, *images = PUBLISHED[kind]
    assert parameters(kind(dim_x=1, dim_y=1)) == parameters(kind()) == gp
    for (task, fields), expected in zip(IMAGES.items(), images, strict=True):
        depths = {} if kind is TNPD else dict(zip(DEPTH_NAMES, DEPTHS[task], strict=True))
        assert parameters(kind(**fields, **depths)) == expected


def test_parameters_of_models_with_latents_are_those_published() -> None:
    assert parameters(LBANP(dim_x=1, dim_y=1)) == parameters(LBANP(latents=8)) == 784_834
    assert parameters(LBANP(latents=128)) == 792_514 and parameters(CMANP(dim_x=1, dim_y=1)) == 1_341_634


@pytest.mark.parametrize("head", ["gaussian", "bounded", "floored"])
@models
def test_every_model_predicts_and_trains(kind: type[nn.Module], head: str) -> None:
    module, data = model(kind, head=head), batch()
    dist = predict(module, data)
    assert dist.batch_shape == (3, 5) and dist.event_shape == (3,) and dist.log_prob(data.yt).shape == (3, 5)
    assert dist.sample().shape == data.yt.shape and dist.sample((4,)).shape == (4, *data.yt.shape)
    found = loss_and_gradients(module, data)
    assert all(part is not None and part.isfinite().all() and part.any() for part in found)
    floor = {"gaussian": 0.0, "bounded": 0.05, "floored": 0.1}[head]
    assert float(dist.stddev.min().detach()) > floor


@pytest.mark.parametrize("kind", TOKENS)
def test_models_of_tokens_classify(kind: type[nn.Module]) -> None:
    module, data = model(kind, head="categorical", outputs=4), batch()
    assert module.predict(data.xc, data.yc, data.xt).logits.shape == (3, 5, 4)
    loss = module.loss(dataclasses.replace(data, yt=torch.ones(3, 5, dtype=torch.int64))).total
    assert loss.isfinite()


@models
def test_encoding_once_and_answering_often_equals_predict(kind: type[nn.Module]) -> None:
    module, data = model(kind).eval(), ragged()
    torch.manual_seed(3)
    memory = module.encode(data.xc, data.yc, data.context_mask)
    for xt in (data.xt, data.xt[:, :1], data.xt):
        torch.manual_seed(3)
        expected = module.predict(data.xc, data.yc, xt, data.context_mask)
        assert gap(module.answer(memory, xt).mean, expected.mean) <= 1e-6


@pytest.mark.parametrize("where", ["tail", "holes"])
@models
@torch.no_grad()
def test_a_ragged_batch_equals_its_rows_one_by_one(kind: type[nn.Module], where: str) -> None:
    module, whole = model(kind).eval(), ragged(where)
    noise = None
    if kind in SAMPLED:
        noise = module._noise(whole.xc, 6, torch.Generator().manual_seed(1)).values
        memory = module._sampled(whole.xc, whole.yc, whole.context_mask, noise)
        together = module.answer(memory, whole.xt)
    else:
        together = predict(module, whole)
    for i, (given, wanted) in enumerate(zip(whole.context_mask, whole.target_mask, strict=True)):
        xc, yc, xt = whole.xc[i : i + 1, given], whole.yc[i : i + 1, given], whole.xt[i : i + 1, wanted]
        if noise is None:
            alone = module.predict(xc, yc, xt)
        else:
            own = noise[i : i + 1] if kind in (NP, ANP) else noise[i : i + 1, ..., : xc.shape[1]]
            alone = module.answer(module._sampled(xc, yc, None, own), xt)
        assert gap(together.mean[i, wanted], alone.mean[0]) <= 1e-5
        assert gap(together.stddev[i, wanted], alone.stddev[0]) <= 1e-5


@pytest.mark.parametrize("value", [torch.nan, 1e30])
@pytest.mark.parametrize("where", ["tail", "holes"])
@models
def test_padding_changes_nothing_at_all(kind: type[nn.Module], where: str, value: float) -> None:
    """Loss, gradients and predictions differ by exactly 0."""
    module, clean = model(kind), ragged(where)
    context, target = ~clean.context_mask[..., None], ~clean.target_mask[..., None]
    dirty = dataclasses.replace(
        clean,
        **{name: getattr(clean, name).masked_fill(context, value) for name in ("xc", "yc")},
        **{name: getattr(clean, name).masked_fill(target, value) for name in ("xt", "yt")},
    )
    pairs = zip(loss_and_gradients(module, clean), loss_and_gradients(module, dirty), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    module.eval()
    same_targets = dataclasses.replace(dirty, xt=clean.xt)
    assert torch.equal(predict(module, clean).mean, predict(module, same_targets).mean)


@models
@torch.no_grad()
def test_the_order_of_the_context_does_not_matter(kind: type[nn.Module]) -> None:
    module, shuffle = model(kind).eval(), torch.randperm(11, generator=torch.Generator().manual_seed(1))
    for data in (batch(), ragged()):
        mask = None if data.context_mask is None else data.context_mask[:, shuffle]
        other = dataclasses.replace(data, xc=data.xc[:, shuffle], yc=data.yc[:, shuffle], context_mask=mask)
        one, two = predict(module, data), predict(module, other)
        assert gap(one.mean, two.mean) <= 1e-5 and gap(one.stddev, two.stddev) <= 1e-5


@models
def test_the_smallest_contexts_work(kind: type[nn.Module]) -> None:
    assert all(part.isfinite().all() for part in loss_and_gradients(model(kind), batch(n=1, m=1)))


@models
def test_unknown_outputs_do_not_count(kind: type[nn.Module]) -> None:
    """Whatever stands there, the loss is the same and finite."""
    module, data = model(kind), batch()
    known = torch.rand(3, 5, 3, generator=torch.Generator().manual_seed(2)) < 0.5
    known[..., 0] = True
    data = dataclasses.replace(data, output_mask=known)
    other = dataclasses.replace(data, yt=data.yt.masked_fill(~known, 9.0))
    assert torch.equal(loss_and_gradients(module, data)[0], loss_and_gradients(module, other)[0])


@models
def test_a_saved_model_comes_back(kind: type[nn.Module]) -> None:
    module, data = model(kind).eval(), batch()
    again = model_from_json(json.loads(json.dumps(model_to_json(module)))).eval()
    again.load_state_dict(module.state_dict())
    assert again.config == module.config and torch.equal(predict(again, data).mean, predict(module, data).mean)


@models
def test_other_precisions(kind: type[nn.Module]) -> None:
    """Double precision agrees with single; bfloat16 under autocast trains."""
    module, data = model(kind), batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss = module.loss(data).total
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in module.parameters())
    if kind not in SAMPLED:  # whose draws differ
        single = module.eval().predict(data.xc, data.yc, data.xt).mean
        double = module.double().predict(data.xc.double(), data.yc.double(), data.xt.double()).mean
        assert double.dtype == torch.float64 and gap(single.double(), double) <= 1e-4


def test_tokens_read_per_query() -> None:
    assert [model(kind).tokens(40) for kind in KINDS] == [1, 40, 1, 40, 1, 40, 40, 5, 5]


@pytest.mark.parametrize("kind", [CNP, CANP])
def test_conditional_processes_are_trained_on_context_and_targets(kind: type[nn.Module]) -> None:
    """And evaluated on targets alone."""
    module, data = model(kind), batch()
    x, y = torch.cat([data.xc, data.xt], dim=1), torch.cat([data.yc, data.yt], dim=1)
    all_points = module.predict(data.xc, data.yc, x).log_prob(y)
    assert gap(module.loss(data).total, -all_points.mean()) <= 1e-6
    assert gap(module.eval().loss(data).total, -all_points[:, 11:].mean()) <= 1e-6


@pytest.mark.parametrize("kind", [NP, ANP])
def test_one_sample_gives_reconstruction_minus_divergence(kind: type[nn.Module]) -> None:
    module, data = model(kind, samples=1), batch()
    noise = module.draws_for(data, torch.Generator().manual_seed(0))
    x, y = torch.cat([data.xc, data.xt], dim=1), torch.cat([data.yc, data.yt], dim=1)
    prior, posterior = module.latent_given(data.xc, data.yc), module.latent_given(x, y)
    z = posterior.mean + posterior.stddev * noise.values[:, 0]
    memory = dataclasses.replace(module.encode(data.xc, data.yc), latents=z[None])
    reconstruction = module.answer(memory, x).log_prob(y).sum(dim=1)
    bound = (reconstruction - kl_divergence(posterior, prior)) / 16
    assert gap(module.loss(data, noise).total, -bound.mean()) <= 1e-6


@pytest.mark.parametrize("kind", [NP, ANP])
def test_several_samples_are_weighted_by_importance(kind: type[nn.Module]) -> None:
    """log (1/K) sum_k p(y | z_k) p(z_k | C) / q(z_k | C, T), per row over its own number of points."""
    module, data = model(kind, samples=3), ragged()
    noise = module.draws_for(data, torch.Generator().manual_seed(0))
    bounds = []
    for i, (given, wanted) in enumerate(zip(data.context_mask, data.target_mask, strict=True)):
        xc, yc = data.xc[i, given][None], data.yc[i, given][None]
        x = torch.cat([xc, data.xt[i, wanted][None]], dim=1)
        y = torch.cat([yc, data.yt[i, wanted][None]], dim=1)
        prior, posterior = module.latent_given(xc, yc), module.latent_given(x, y)
        weights = []
        for eps in noise.values[i]:
            z = posterior.mean + posterior.stddev * eps
            memory = dataclasses.replace(module.encode(xc, yc), latents=z[None])
            fit = module.answer(memory, x).log_prob(y).sum()
            weights.append(fit + prior.log_prob(z)[0] - posterior.log_prob(z)[0])
        bounds.append((torch.stack(weights).logsumexp(dim=0) - math.log(3)) / x.shape[1])
    assert gap(module.loss(data, noise).total, -torch.stack(bounds).mean()) <= 1e-5


def test_the_latent_of_an_np_is_bounded() -> None:
    std = model(NP).latent_given(1e3 * rand(2, 7, 2), 1e3 * rand(2, 7, 3)).stddev.detach()
    assert float(std.min()) >= 0.1 and float(std.max()) <= 1.0


class MeanOfValues(nn.Module):
    """Stands in for an encoder: the mean of the values it is given."""

    def build(self, x: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
        real = torch.ones_like(y[..., :1]) if mask is None else mask[..., None].float()
        return (y * real).sum(dim=1) / real.sum(dim=1)

    def read(self, built: Tensor, xt: Tensor) -> Tensor:
        return built[:, None].expand(-1, xt.shape[1], -1)


class ByHand(nn.Module):
    """Stands in for a decoder: mean = the encoding + x, std = 1 + x."""

    def forward(self, inputs: Tensor) -> Independent:
        encoding, x = inputs[..., :1], inputs[..., 1:2]
        return Independent(Normal(encoding + x, 1 + x), 1)


def test_a_residual_bootstrap_by_hand() -> None:
    """Three points, y = 0, 3, 6 at x = 0, 1, 2; resampled are points 0, 0, 2, then residuals 2, 2, 1."""
    module = model(BNP, dim_x=1, dim_y=1)
    module.encoders, module.head = nn.ModuleList([MeanOfValues()]), ByHand()
    x, y = torch.tensor([0.0, 1.0, 2.0])[None, :, None], torch.tensor([0.0, 3.0, 6.0])[None, :, None]
    # The mean of the resampled values 0, 0, 6 is 2, so the prediction at x is 2 + x with std 1 + x: residuals
    # (0 - 2) / 1 = -2, (3 - 3) / 2 = 0, (6 - 4) / 3 = 2/3. Resampled: 2/3, 2/3, 0; centred: 2/9, 2/9, -4/9.
    made = module.bootstrap(x, y, None, torch.tensor([[0, 0, 2]]), torch.tensor([[2, 2, 1]]))
    expected = [2 + 1 * 2 / 9, 3 + 2 * 2 / 9, 4 - 3 * 4 / 9]
    assert gap(made.flatten(), torch.tensor(expected)) <= 1e-6
    # The same with a fourth slot that is padding.
    padded = [torch.nn.functional.pad(part, (0, 0, 0, 1)) for part in (x, y)]
    mask = torch.tensor([[True, True, True, False]])
    made = module.bootstrap(*padded, mask, torch.tensor([[0, 0, 2, 1]]), torch.tensor([[2, 2, 1, 0]]))
    assert gap(made[0, :3, 0], torch.tensor(expected)) <= 1e-6


def test_bootstraps_draw_real_points_uniformly() -> None:
    mask = torch.arange(6) < torch.tensor([[6], [2]])
    uniform = torch.rand(2, 2, 4000, 6, generator=torch.Generator().manual_seed(0))
    index = drawn_points(uniform, mask)
    assert index.shape == (2, 4000, 2, 6) and int(index.min()) == 0
    for row, count in ((0, 6), (1, 2)):
        share = torch.bincount(index[:, :, row].flatten(), minlength=6) / index[:, :, row].numel()
        assert gap(share[:count], torch.full((count,), 1 / count)) <= 0.01 and float(share[count:].sum()) == 0
    below_one = torch.full((1, 2, 1, 6), 1 - 2**-24)
    assert int(drawn_points(below_one, None).max()) == 5


def test_points_have_an_order_of_their_own() -> None:
    """It does not depend on the order given, and puts padding last."""
    data, shuffle = ragged("holes"), torch.randperm(11, generator=torch.Generator().manual_seed(1))
    one = own_order(data.xc, data.yc, data.context_mask)
    two = own_order(data.xc[:, shuffle], data.yc[:, shuffle], data.context_mask[:, shuffle])
    count = data.context_mask.sum(dim=1)
    for row in range(3):
        real = slice(None, int(count[row]))
        assert torch.equal(data.xc[row, one[row, real]], data.xc[row, shuffle][two[row, real]])
        assert data.context_mask[row, one[row, real]].all()


@pytest.mark.parametrize("kind", [BNP, BANP])
def test_a_bootstrapping_process_has_two_terms(kind: type[nn.Module]) -> None:
    """The base, which sees zeros in place of a bootstrap, and the mixture; without gradients through bootstraps."""
    module, data = model(kind), ragged()
    noise = module.draws_for(data, torch.Generator().manual_seed(0))
    assert noise.values.shape == (3, 2, 4, 11)
    x, y = torch.cat([data.xc, data.xt], dim=1), torch.cat([data.yc, data.yt], dim=1)
    mask = torch.cat([data.context_mask, data.target_mask], dim=1)
    memory = module._sampled(data.xc, data.yc, data.context_mask, noise.values)
    parts = [encoder.read(part, x) for encoder, part in zip(module.encoders, memory.parts, strict=True)]
    base = module.head(torch.cat([*parts, x, torch.zeros(3, 17, 32)], dim=-1)).log_prob(y)
    terms = base + module.answer(memory, x).log_prob(y)
    assert gap(module.loss(data, noise).total, -terms[mask].mean()) <= 1e-5


def test_targets_of_a_tnp_never_see_each_other() -> None:
    """Another place of one target changes no other prediction at all, alone and in the pass that trains."""
    module, data = model(TNPD).eval(), batch()
    moved = data.xt.clone()
    moved[:, 2] += 1.0
    others = [0, 1, 3, 4]
    for call in (module.predict, lambda xc, yc, xt: module._predict(xc, yc, None, xt)):
        one, two = call(data.xc, data.yc, data.xt), call(data.xc, data.yc, moved)
        assert torch.equal(one.mean[:, others], two.mean[:, others]) and gap(one.mean[:, 2], two.mean[:, 2]) > 1e-4
        assert torch.equal(one.stddev[:, others], two.stddev[:, others])


@pytest.mark.parametrize("data", [batch(), ragged("holes")], ids=["equal", "ragged"])
@pytest.mark.parametrize("kind", [TNPD, CMANP])
@torch.no_grad()
def test_both_passes_are_the_same(kind: type[nn.Module], data: Batch) -> None:
    """That of training, and encoding then answering."""
    module = model(kind).eval()
    xc, yc = (part.nan_to_num(0) for part in (data.xc, data.yc))
    one = module._predict(xc, yc, data.context_mask, data.xt).mean
    assert gap(one, predict(module, data).mean) <= 1e-5


def test_a_tnp_is_torchs_transformer() -> None:
    """Layer for layer, with a mask that lets all tokens attend to the context alone."""
    module, data = model(TNPD).eval(), batch()
    layers = []
    for ours in module.layers:
        theirs = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True).eval()
        inner = ours.attention
        with torch.no_grad():
            theirs.self_attn.in_proj_weight.copy_(torch.cat([inner.to_q.weight, inner.to_kv.weight]))
            theirs.self_attn.in_proj_bias.copy_(torch.cat([inner.to_q.bias, inner.to_kv.bias]))
        theirs.self_attn.out_proj.load_state_dict(inner.to_out.state_dict())
        theirs.linear1.load_state_dict(ours.feed_forward[0].state_dict())
        theirs.linear2.load_state_dict(ours.feed_forward[2].state_dict())
        layers.append(theirs)
    blank = torch.cat([data.xt, torch.zeros(3, 5, 3)], dim=-1)
    tokens = module.embed_point(torch.cat([torch.cat([data.xc, data.yc], dim=-1), blank], dim=1))
    hidden = torch.zeros(16, 16, dtype=torch.bool)
    hidden[:, 11:] = True
    for layer in layers:
        tokens = layer(tokens, src_mask=hidden)
    assert gap(module.predict(data.xc, data.yc, data.xt).mean, module.head(tokens[:, 11:]).mean) <= 1e-5


@pytest.mark.parametrize("residual", ["normalised", "pre"])
@pytest.mark.parametrize("cuts", [(1,), (4, 5), (3, 6, 9), tuple(range(1, 11))])
@torch.no_grad()
def test_updates_of_a_cmanp_equal_encoding_all_at_once(cuts: tuple[int, ...], residual: str) -> None:
    module = model(CMANP, residual=residual).eval()
    data = batch()
    expected = predict(module, data)
    first, *rest = torch.tensor_split(torch.arange(11), cuts)
    memory = module.encode(data.xc[:, first], data.yc[:, first])
    for block in rest:
        memory = module.update(memory, data.xc[:, block], data.yc[:, block])
    found = module.answer(memory, data.xt)
    assert gap(found.mean, expected.mean) <= 1e-5 and gap(found.stddev, expected.stddev) <= 1e-5


@torch.no_grad()
def test_updates_of_a_cmanp_take_ragged_blocks_and_constant_memory() -> None:
    module, whole = model(CMANP).eval(), batch()
    first = torch.arange(11) < torch.tensor([[3], [9], [4]])
    rest = ~first & (torch.arange(11) != 10)
    memory = module.encode(whole.xc, whole.yc, first)
    both = module.update(memory, whole.xc, whole.yc, rest)
    expected = module.predict(whole.xc, whole.yc, whole.xt, first | rest)
    assert gap(module.answer(both, whole.xt).mean, expected.mean) <= 1e-5
    sizes = [sum(part.output.numel() for part in m.parts) for m in (memory, both)]
    assert sizes[0] == sizes[1]


@sampled
@torch.no_grad()
def test_a_mixture_is_the_mean_over_samples_per_point(kind: type[nn.Module]) -> None:
    module, data = model(kind).eval(), batch()
    dist = predict(module, data, samples=7)
    assert isinstance(dist, FunctionMixture) and dist.components.batch_shape == (7, 3, 5)
    density = dist.components.log_prob(data.yt).double().exp().mean(dim=0)
    assert gap(dist.log_prob(data.yt).double(), density.log()) <= 1e-5
    expected = -dist.log_prob(data.yt).mean()
    torch.manual_seed(3)
    assert abs(float(module.loss(data).task) - float(expected)) < 0.5  # 50 samples instead of 7


def test_moments_of_a_mixture() -> None:
    mean, std = rand(4, 2, 3, 2), rand(4, 2, 3, 2, seed=1).abs() + 0.1
    dist = FunctionMixture(Independent(Normal(mean, std), 1))
    assert gap(dist.mean, mean.mean(dim=0)) <= 1e-6
    second = (std**2 + mean**2).mean(dim=0)
    assert gap(dist.variance, second - mean.mean(dim=0) ** 2) <= 1e-5 and gap(dist.stddev**2, dist.variance) <= 1e-5
    torch.manual_seed(0)
    drawn = dist.sample((20_000,))
    assert gap(drawn.mean(dim=0), dist.mean) <= 0.1 and gap(drawn.std(dim=0), dist.stddev) <= 0.1


def test_a_sample_is_one_function() -> None:
    """All points of a context come from the same component, rows from their own."""
    level = torch.tensor([-100.0, 0.0, 100.0])
    mean = level[:, None, None, None].expand(3, 2, 50, 1)
    dist = FunctionMixture(Independent(Normal(mean, torch.ones_like(mean)), 1))
    torch.manual_seed(0)
    drawn = (dist.sample((64,)) / 100).round()  # (64, 2, 50, 1)
    assert torch.equal(drawn, drawn[:, :, :1].expand_as(drawn))
    assert len(drawn[:, 0, 0].unique()) == 3 and not torch.equal(drawn[:, 0], drawn[:, 1])


@sampled
@torch.no_grad()
def test_samples_come_from_the_generator_given(kind: type[nn.Module]) -> None:
    module, data = model(kind).eval(), batch()
    one, two, other = (
        module.predict(data.xc, data.yc, data.xt, samples=5, generator=torch.Generator().manual_seed(seed)).mean
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, two) and gap(one, other) > 1e-6


@sampled
def test_draws_fix_a_training_step(kind: type[nn.Module]) -> None:
    """Rows of the draws belong to rows of the batch."""
    module, data = model(kind), batch(b=4)
    draws = module.draws_for(data, torch.Generator().manual_seed(0))
    whole = module.loss(data, draws).total
    halves = [module.loss(data.rows(part), draws.rows(part)).total for part in (slice(0, 2), slice(2, 4))]
    assert gap(whole, torch.stack(halves).mean()) <= 1e-5


def errors_of(module: Any, data: Batch) -> list[tuple[str, Callable[[], object]]]:
    """Calls that must be refused, and how their message starts."""
    empty = torch.zeros(3, 0, 2)
    return [
        ("xc: expected at least one point", lambda: module.predict(empty, torch.zeros(3, 0, 3), data.xt)),
        ("xt: expected shape", lambda: module.predict(data.xc, data.yc, torch.zeros(3, 5, 1))),
        ("xt: expected shape", lambda: module.predict(data.xc, data.yc, data.xt[:2])),
        ("yc: expected shape", lambda: module.predict(data.xc, data.yc[..., :2], data.xt)),
        ("yt: expected shape", lambda: module.loss(dataclasses.replace(data, yt=data.yt[..., :2]))),
        ("memory: expected", lambda: module.answer("nothing", data.xt)),
        ("inputs: expected points", lambda: model(type(module), inputs="sequence")),
        ("heads: expected a divisor", lambda: model(type(module), heads=3)),
    ]


@models
def test_bad_input_is_refused_in_one_line(kind: type[nn.Module]) -> None:
    module = model(kind)
    for start, call in errors_of(module, batch()):
        with pytest.raises(InputError, match=rf"^{start}[^\n]*, got [^\n]*$"):
            call()


@pytest.mark.parametrize("samples", [0, -1, 2.5, True])
@sampled
def test_numbers_of_samples_that_mean_nothing_are_refused(kind: type[nn.Module], samples: Any) -> None:
    module, data = model(kind), batch()
    with pytest.raises(InputError, match=r"^samples: expected an int >= 1, got [^\n]*$"):
        module.predict(data.xc, data.yc, data.xt, samples=samples)


def test_settings_that_mean_nothing_are_refused() -> None:
    for settings, message in (
        ({"head": "categorical"}, "head: expected one of floored, gaussian, bounded, got 'categorical'"),
        ({"outputs": 2}, "outputs: expected dim_y=3, since context points are predicted, too, got 2"),
        ({"pre_depth": 2}, "pre_depth: expected an int >= 3, got 2"),
        ({"samples": 0}, "samples: expected an int >= 1, got 0"),
    ):
        with pytest.raises(InputError, match=f"^{message}$"):
            model(CNP, **settings)
    with pytest.raises(InputError, match=r"^latents: expected an int >= 1, got 0$"):
        model(LBANP, latents=0)
    with pytest.raises(InputError, match=r"^residual: expected one of normalised, pre, got 'doubled'$"):
        model(LBANP, residual="doubled")


def test_updates_that_do_not_fit_are_refused() -> None:
    module, data = model(CMANP).eval(), batch()
    memory = module.encode(data.xc, data.yc)
    other = model(LBANP).encode(data.xc, data.yc)
    with pytest.raises(InputError, match=r"^memory: expected LayerMemory made by encode\(\) or update\(\), got one"):
        module.update(other, data.xc, data.yc)
    with pytest.raises(InputError, match=r"^memory: expected LayerMemory .*, got str$"):
        module.update("memory", data.xc, data.yc)
    with pytest.raises(InputError, match=r"^xc: expected a row for each of the 3 contexts in memory, got "):
        module.update(memory, data.xc[:2], data.yc[:2])


@models
def test_no_query_has_no_answer(kind: type[Any]) -> None:
    made, x = kind(dim_x=1, dim_y=1, dim=16, heads=2).eval(), torch.rand(2, 5, 1)
    assert made.predict(x, x, x[:, :0]).mean.shape == (2, 0, 1)


@sampled
def test_what_is_no_generator_is_refused(kind: type[Any]) -> None:
    x = torch.rand(2, 5, 1)
    with pytest.raises(InputError, match=r"^generator: expected a torch.Generator, or None, got int"):
        kind(dim=16, heads=2).eval().predict(x, x, x, generator=3)
