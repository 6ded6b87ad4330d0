"""Models on raw tokens and raw queries: vectors without coordinates or values, tensors in and out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from retreever import Batch, InputError, PerceiverIO, ReTreever, TransformerCA, collate
from retreever.models.saved import model_from_json, model_to_json

TINY = {"dim": 16, "heads": 2, "layers": 1, "hidden": 16, "impl": "reference"}
RAW = {"inputs": "tokens", "dim_y": 6, "dim_x": 4, "outputs": 5}
MODELS = (ReTreever, TransformerCA, PerceiverIO)
each_model = pytest.mark.parametrize("kind", MODELS)


def tokens_and_queries(n: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    return torch.randn(2, n, 6, generator=generator), torch.randn(2, 3, 4, generator=generator)


def a_model(kind: type, **settings: object) -> ReTreever | TransformerCA | PerceiverIO:
    torch.manual_seed(0)
    return kind(**TINY | RAW | settings).eval()


@each_model
@pytest.mark.parametrize("head", ["categorical", "point", "gaussian"])
def test_a_call_gives_a_tensor_and_the_prepared_context_the_same(kind: type, head: str) -> None:
    model, (tokens, queries) = a_model(kind, head=head), tokens_and_queries()
    output = model(tokens, queries)
    assert output.shape == (2, 3, 5)
    prepared = model.answer(model.encode(tokens, tokens[..., :0]), queries)
    assert torch.equal(output, prepared.logits if head == "categorical" else prepared.mean)


@each_model
def test_padding_does_not_count(kind: type) -> None:
    model, (tokens, queries) = a_model(kind), tokens_and_queries()
    padded = torch.cat([tokens, torch.full((2, 4, 6), torch.nan)], dim=1)
    mask = torch.arange(13).expand(2, -1) < 9
    assert torch.allclose(model(padded, queries, mask), model(tokens, queries), atol=1e-5)


@pytest.mark.parametrize("order", ["kd", "principal", "ball"])
def test_tokens_are_their_own_coordinates(order: str) -> None:
    """In every order but the given one, the order of the tokens has no effect on a model without positions."""
    model, (tokens, queries) = a_model(ReTreever, order=order), tokens_and_queries()
    assert torch.allclose(model(tokens.flip(1), queries), model(tokens, queries), atol=1e-5)


@each_model
def test_a_batch_of_tokens_trains(kind: type) -> None:
    model = a_model(kind, head="categorical").train()
    rows = []
    for n in (9, 6):
        tokens, queries = tokens_and_queries(n)
        rows.append(Batch(tokens, tokens[..., :0], queries, torch.ones(2, 3, dtype=torch.int64)))
    model.loss(collate(rows)).total.backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())


def test_the_settings_can_be_saved() -> None:
    model, (tokens, queries) = a_model(PerceiverIO, latents=3), tokens_and_queries()
    again = model_from_json(model_to_json(model)).eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(tokens, queries), model(tokens, queries))


def test_what_does_not_fit_is_named() -> None:
    model, (tokens, queries) = a_model(PerceiverIO), tokens_and_queries()
    with pytest.raises(InputError, match=r"tokens: expected shape \(b, n, c=6\), got \(2, 3, 4\)"):
        model(queries, tokens)
    with pytest.raises(InputError, match=r"queries: expected shape \(b=2, m, dx=4\)"):
        model(tokens, tokens)
    with pytest.raises(InputError, match=r"yc: expected shape \(b, n, dy=0\)"):
        model.predict(tokens, tokens, queries)
    with pytest.raises(InputError, match=r"xt: expected shape \(b, m, dx=4\)"):
        model.loss(Batch(tokens, tokens[..., :0], tokens, torch.zeros(2, 9, 5)))
