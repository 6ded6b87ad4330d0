"""Embeddings of points, symbols and positions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from retreever.nn.embed import PointEmbed, SequenceEmbed, SinusoidalPositions

DIM = 8


def rand(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, the same for the same shape and seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sequence(dropout: float = 0.0) -> SequenceEmbed:
    torch.manual_seed(0)
    return SequenceEmbed(vocabulary=12, dim=DIM, hidden=16, dropout=dropout)


def positions(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[None, :, None]


def test_points_embed_pairs_as_context_and_places_as_queries() -> None:
    module = PointEmbed(dim_x=2, dim_y=3, dim=DIM)
    x, y = rand(2, 5, 2), rand(2, 5, 3)
    assert module.context(x, y).shape == module.query(x).shape == (2, 5, DIM)
    assert torch.equal(module.context(x, y), module.of_context(torch.cat([x, y], -1)))
    linears = [m for m in module.of_query if isinstance(m, nn.Linear)]
    assert len(linears) == 4 and isinstance(module.of_query[1], nn.ELU)


@pytest.mark.parametrize("dim", [2, 7, 64])
def test_positions_are_sines_and_cosines(dim: int) -> None:
    """Sine in even, cosine in odd dimensions of p / 10000^(2i/dim), at whole and broken positions."""
    places = (0.0, 1.0, 2.5, 31.0, 511.0)
    got = SinusoidalPositions(dim)(positions(*places))[0]
    for row, place in enumerate(places):
        for column in range(dim):
            angle = place / 10_000 ** (2 * (column // 2) / dim)
            expected = math.cos(angle) if column % 2 else math.sin(angle)
            assert float(got[row, column]) == pytest.approx(expected, abs=1e-4)


def test_positions_are_not_part_of_saved_weights() -> None:
    assert not SinusoidalPositions(DIM).state_dict()


def test_context_says_symbol_and_place() -> None:
    """Change either and the token changes; the tokens beside it do not."""
    module, x, y = sequence(), positions(0, 1, 2), torch.tensor([[3, 4, 5]])
    tokens = module.context(x, y)
    assert tokens.shape == (1, 3, DIM)
    for other in (module.context(x, torch.tensor([[3, 9, 5]])), module.context(positions(0, 7, 2), y)):
        assert torch.equal(other[:, [0, 2]], tokens[:, [0, 2]]) and not torch.equal(other[:, 1], tokens[:, 1])


def test_a_query_says_its_place_alone() -> None:
    module = sequence()
    queries = module.query(positions(0, 1, 0))
    assert queries.shape == (1, 3, DIM)
    assert torch.equal(queries[:, 0], queries[:, 2]) and not torch.equal(queries[:, 0], queries[:, 1])
    expected = module.mix_query(module.of_nothing(torch.zeros(12)) + module.positions(positions(0, 1, 0)))
    assert torch.allclose(queries, expected, atol=1e-6)


def test_context_and_query_share_no_weights() -> None:
    module = sequence()
    module.query(positions(0, 1)).sum().backward()
    used = {name.split(".")[0] for name, parameter in module.named_parameters() if parameter.grad is not None}
    assert used == {"of_nothing", "mix_query"}


def test_sequence_dropout_acts_in_training_only() -> None:
    module, x, y = sequence(dropout=0.5), positions(0, 1), torch.tensor([[3, 4]])
    assert not torch.equal(module.context(x, y), module.context(x, y))
    module.eval()
    assert torch.equal(module.context(x, y), module.context(x, y))


def test_symbols_are_embedded_once_and_picked() -> None:
    """The same function as an embedding of every single token, with the same gradients."""
    module, x = sequence().double(), positions(0, 1, 2, 3).double().expand(2, 4, 1)
    y = torch.tensor([[3, 4, 3, 11], [0, 0, 0, 1]])
    hot = nn.functional.one_hot(y, 12).to(x.dtype)
    slow = module.mix_context(module.of_symbol(hot) + module.positions(x))
    torch.testing.assert_close(module.context(x, y), slow)
    weights = list(module.of_symbol.parameters())
    got, want = (torch.autograd.grad(tokens.square().sum(), weights) for tokens in (module.context(x, y), slow))
    for slope, true in zip(got, want, strict=True):
        torch.testing.assert_close(slope, true)


def test_positions_shared_by_a_batch_are_those_of_every_row() -> None:
    module, shared = SinusoidalPositions(DIM), positions(0, 2.5, 7).expand(3, 3, 1)
    assert torch.equal(module(shared), module(shared.contiguous()))
    assert module(shared).shape == (3, 3, DIM)


def test_positions_have_all_digits_of_their_dtype() -> None:
    """Also in a model that was made in float32 and turned to float64."""
    place = 2047.0
    exact = [math.sin(place * 10_000 ** (-2 * i / 8)) for i in range(4)]
    found = SinusoidalPositions(8).double()(torch.full((1, 1, 1), place, dtype=torch.float64))[0, 0, ::2]
    assert found.tolist() == pytest.approx(exact, abs=1e-12)
    half = SinusoidalPositions(8)(torch.full((1, 1, 1), place).half())
    assert half.dtype == torch.float16 and half[0, 0, ::2].tolist() == pytest.approx(exact, abs=1e-3)
