"""Encoders: shapes, formulas, masks and limits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from retreever import InputError
from retreever.nn.encoders import ENCODERS, ChordMixerEncoder, LinformerEncoder, TransformerEncoder, make_encoder
from retreever.nn.local import LocalEncoder

DIM, LIMIT = 16, 20


def rand(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, the same for the same shape and seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def encoder(name: str, layers: int = 2, dim: int = DIM, residual: str = "pre") -> nn.Module:
    torch.manual_seed(0)
    return make_encoder(name, dim, 2, layers, 24, residual, 0.0, LIMIT).eval()


def gap(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).detach().abs().max())


@pytest.mark.parametrize("residual", ["pre", "normalised"])
@pytest.mark.parametrize("dim", [4, 16, 18])
@pytest.mark.parametrize("n", [1, 2, 7, LIMIT])
@pytest.mark.parametrize("name", ENCODERS)
def test_tokens_in_tokens_out(name: str, n: int, dim: int, residual: str) -> None:
    out = encoder(name, dim=dim, residual=residual)(rand(3, n, dim))
    assert out.shape == (3, n, dim) and out.isfinite().all()


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_a_padded_row_is_encoded_as_alone(name: str) -> None:
    """Real tokens first, then padding of any value: the real ones come out as without it."""
    module, tokens, lengths = encoder(name), rand(4, 11, DIM), (1, 4, 8, 11)
    mask = torch.arange(11) < torch.tensor(lengths)[:, None]
    together = module(tokens, mask)
    other = module(tokens.masked_fill(~mask[..., None], 7.0), mask)
    assert torch.equal(together[mask], other[mask])
    for row, length in enumerate(lengths):
        assert gap(together[row : row + 1, :length], module(tokens[row : row + 1, :length])) <= 1e-6


@pytest.mark.parametrize("name", ["transformer", "local", "linformer", "chordmixer"])
def test_every_weight_learns(name: str) -> None:
    module = encoder(name)
    module(rand(2, LIMIT, DIM)).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in module.parameters())


def test_identity_changes_nothing() -> None:
    tokens = rand(2, 5, DIM)
    assert encoder("identity")(tokens) is tokens and not list(encoder("identity").parameters())


def test_a_transformer_of_no_layers_changes_nothing_and_layers_are_applied_in_order() -> None:
    tokens, module = rand(2, 5, DIM), encoder("transformer")
    assert torch.equal(encoder("transformer", layers=0)(tokens), tokens)
    assert isinstance(module, TransformerEncoder)
    first, second = module.layers
    middle = first(tokens, tokens)
    assert torch.equal(module(tokens), second(middle, middle))


@torch.no_grad()
def test_a_transformer_does_not_know_the_order() -> None:
    module, tokens, order = encoder("transformer"), rand(2, 7, DIM), torch.tensor([3, 0, 6, 1, 5, 2, 4])
    assert gap(module(tokens)[:, order], module(tokens[:, order])) <= 1e-6


def local(window: int, layers: int = 2) -> LocalEncoder:
    torch.manual_seed(0)
    module = make_encoder("local", DIM, 2, layers, 24, "pre", 0.0, LIMIT, window=window).double().eval()
    assert isinstance(module, LocalEncoder)
    return module


@pytest.mark.parametrize("window", [1, 3, 64])
@torch.no_grad()
def test_local_attends_to_the_tokens_before_within_its_window(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the transformer would under a mask of the band, token by token; in pieces as at once."""
    module, tokens = local(window), rand(2, 13, DIM).double()
    wanted = tokens
    for layer in module.layers:
        steps = [wanted[:, max(0, i + 1 - window) : i + 1] for i in range(13)]
        wanted = torch.cat([layer(step[:, -1:], step) for step in steps], dim=1)
    assert gap(module(tokens), wanted) <= 1e-12
    monkeypatch.setattr("retreever.nn.local.PIECE", 10)
    assert gap(module(tokens), wanted) <= 1e-12


@given(
    window=st.integers(1, 6),
    steps=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 3)), min_size=1, max_size=5),
)
@settings(max_examples=25)
@torch.no_grad()
def test_a_growing_context_is_encoded_as_at_once(window: int, steps: list[tuple[int, int]]) -> None:
    """Whatever arrives together, with rows of different lengths."""
    module = local(window)
    state = module.start(torch.zeros(2, 1, DIM, dtype=torch.float64))
    rows: list[list[Tensor]] = [[], []]
    found: list[list[Tensor]] = [[], []]
    for seed, (n, missing) in enumerate(steps):
        lengths = torch.tensor([n, max(0, n - missing)])
        tokens = rand(2, n, DIM, seed=seed).double()
        encoded, state = module.extend(tokens, state, lengths)
        for row in range(2):
            rows[row].append(tokens[row, : lengths[row]])
            found[row].append(encoded[row, : lengths[row]])
    for row in range(2):
        together = torch.cat(rows[row])
        if len(together):
            assert gap(torch.cat(found[row]), module(together[None])[0]) <= 1e-12


def test_a_transformer_warns_before_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its estimate, before anything is computed; short contexts get no warning."""
    module = encoder("transformer", dim=64)
    tokens = torch.zeros(1, 1, 64).expand(1, 1_000_000, 64)
    with pytest.raises(UserWarning, match=r"O\(n\^2\) time: about [\d,]+ (s|min|hours|days) for 1,000,000 tokens here"):
        module(tokens)  # warnings are errors in tests
    monkeypatch.setattr("retreever.nn.encoders.LONG", 16)
    module(tokens[:, :64])


@torch.no_grad()
def test_linformer_attends_to_mixtures_of_the_sequence() -> None:
    """softmax(q (E k)^T / sqrt(e)) (F v) with the first n columns of E and F, then the block's residual."""
    module = encoder("linformer", layers=1)
    assert isinstance(module, LinformerEncoder)
    tokens, layer, (mix_keys, mix_values) = rand(2, 7, DIM), module.layers[0], module.mixers[0][:, :, :7]
    normed = layer.norm(tokens)
    q, (k, v) = layer.to_q(normed), layer.to_kv(normed).chunk(2, -1)
    heads = []
    for part in (slice(0, 8), slice(8, 16)):
        weights = (q[..., part] @ (mix_keys @ k[..., part]).transpose(1, 2) / 8**0.5).softmax(-1)
        heads.append(weights @ (mix_values @ v[..., part]))
    expected = layer.finish(tokens, normed, torch.stack(heads, 2))
    assert gap(module(tokens), expected) <= 1e-6


@torch.no_grad()
def test_chordmixer_rolls_tracks_by_powers_of_two() -> None:
    """With dim 6 x 3, limit 20: 5 blocks, 6 tracks; track i of position p comes from p + 2^(i-1) modulo the length."""
    module = encoder("chordmixer", dim=18)
    assert isinstance(module, ChordMixerEncoder) and module.tracks == 6 and len(module.mlps) == 5
    x = tokens = rand(1, 7, 18)
    for norm, mlp in zip(module.norms, module.mlps, strict=True):
        mixed = mlp(norm(x))
        tracks = [mixed[..., 3 * i : 3 * i + 3] for i in range(6)]
        rolled = [track.roll(-shift, dims=1) for track, shift in zip(tracks, (0, 1, 2, 4, 8, 16), strict=True)]
        x = x + torch.cat(rolled, -1)
    assert gap(module(tokens), x) <= 1e-6


def test_chordmixer_lets_every_token_see_every_other() -> None:
    module, tokens = encoder("chordmixer"), rand(1, LIMIT, DIM).requires_grad_()
    for position in (0, 7, LIMIT - 1):
        (grad,) = torch.autograd.grad(module(tokens)[0, position].square().sum(), tokens)
        assert grad.abs().sum(-1).gt(0).all()


@pytest.mark.parametrize("name", ["linformer", "chordmixer"])
def test_encoders_tied_to_positions_refuse_longer_contexts(name: str) -> None:
    with pytest.raises(InputError, match=f"^tokens: expected at most max_tokens={LIMIT} tokens, got {LIMIT + 1}$"):
        encoder(name)(rand(1, LIMIT + 1, DIM))


@pytest.mark.parametrize("residual", ["pre", "normalised"])
@torch.no_grad()
def test_dropout_acts_in_training_only(residual: str) -> None:
    for name in ("transformer", "linformer", "chordmixer"):
        module, tokens = make_encoder(name, DIM, 2, 1, 24, residual, 0.5, LIMIT), rand(2, 5, DIM)
        assert not torch.equal(module(tokens), module(tokens))
        assert torch.equal(module.eval()(tokens), module(tokens))
