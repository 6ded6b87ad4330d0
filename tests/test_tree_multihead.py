"""`TreeMultihead` in the place of an `nn.MultiheadAttention`, alone and in torch's decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retreever import InputError, Tree, TreeMultihead

DIM, HEADS, N, M = 16, 4, 50, 6


def rand(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, the same for the same shape and seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def multihead(**settings: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(DIM, HEADS, **{"batch_first": True} | settings).eval()


def decoder(layers: int = 2, **settings: Any) -> nn.TransformerDecoder:
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(DIM, HEADS, 2 * DIM, batch_first=True, **settings)
    return nn.TransformerDecoder(layer, layers, norm=nn.LayerNorm(DIM)).eval()


def with_trees(original: nn.TransformerDecoder, budget: int | None, **settings: Any) -> nn.TransformerDecoder:
    converted = decoder(len(original.layers))
    converted.load_state_dict(original.state_dict())
    for layer in converted.layers:
        layer.multihead_attn = TreeMultihead(layer.multihead_attn, budget=budget, **settings)
    return converted


def padding() -> Tensor:
    """As torch has it: True where a token is padding. The rows have 50 and 31 tokens."""
    mask = torch.zeros(2, N, dtype=torch.bool)
    mask[1, ::2], mask[1, 44:] = True, True
    mask[1, :13:2] = False
    return mask


def close(one: Tensor, other: Tensor, tolerance: float = 1e-5) -> bool:
    return one.shape == other.shape and float((one - other).detach().abs().max()) <= tolerance


@pytest.mark.parametrize("order", ["keys", "given"])
@pytest.mark.parametrize("mask", [None, padding()], ids=["all-real", "padded"])
def test_at_full_budget_it_is_the_original(mask: Tensor | None, order: Any) -> None:
    mha, query, context = multihead(), rand(2, M, DIM), rand(2, N, DIM, seed=1)
    output, weights = TreeMultihead(mha, order=order, budget=N)(query, context, context, key_padding_mask=mask)
    exact = mha(query, context, context, key_padding_mask=mask, need_weights=False)[0]
    assert weights is None and close(output, exact)


def test_a_smaller_budget_approximates_and_a_larger_one_does_better() -> None:
    mha, query = multihead(), rand(2, M, DIM)
    context = rand(2, 5, DIM, seed=1).repeat_interleave(10, dim=1) + 0.1 * rand(2, N, DIM, seed=2)
    exact = mha(query, context, context, need_weights=False)[0]
    errors = []
    for budget in (None, 12, 24, N):
        output = TreeMultihead(mha, budget=budget)(query, context, context)[0]
        errors.append(float(((output - exact).norm() / exact.norm()).detach()))
    assert errors == sorted(errors, reverse=True)
    assert 1e-4 < errors[1] < 0.2 and errors[-1] < 1e-5


@pytest.mark.parametrize("norm_first", [False, True])
def test_torchs_decoder_layer_works_with_it(norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(DIM, HEADS, 2 * DIM, batch_first=True, norm_first=norm_first).eval()
    target, memory = rand(2, M, DIM), rand(2, N, DIM, seed=1)
    exact = layer(target, memory, memory_key_padding_mask=padding())
    layer.multihead_attn = TreeMultihead(layer.multihead_attn, budget=N)
    assert close(layer(target, memory, memory_key_padding_mask=padding()), exact)
    layer.multihead_attn.tca.budget = None
    assert not close(layer(target, memory, memory_key_padding_mask=padding()), exact, 1e-3)


def test_torchs_decoder_works_with_it_in_every_layer() -> None:
    original, target, memory = decoder(), rand(2, M, DIM), rand(2, N, DIM, seed=1)
    causal = nn.Transformer.generate_square_subsequent_mask(M)  # among the targets, not for the memory
    arguments: dict[str, Any] = {"tgt_mask": causal, "memory_key_padding_mask": padding()}
    assert close(with_trees(original, N)(target, memory, **arguments), original(target, memory, **arguments))


def test_padding_is_never_read() -> None:
    module, query, context = TreeMultihead(multihead(), budget=16), rand(2, M, DIM), rand(2, N, DIM, seed=1)
    mask = padding()
    output = module(query, context, context, mask)[0]
    broken = context.masked_fill(mask[..., None], torch.nan)
    assert close(module(query, broken, broken, mask)[0], output, 0)
    alone = context[1:, ~mask[1]]
    assert close(module(query[1:], alone, alone)[0], output[1:])


def test_a_tree_that_was_built_takes_the_place_of_its_context() -> None:
    module, query, context = TreeMultihead(multihead(), budget=16), rand(2, M, DIM), rand(2, N, DIM, seed=1)
    tree = module.build(context, padding())
    assert isinstance(tree, Tree)
    assert torch.equal(module(query, tree, tree)[0], module(query, context, context, padding())[0])


def test_trees_that_were_built_go_through_torchs_layers() -> None:
    original, target, memory = decoder(), rand(2, M, DIM), rand(2, N, DIM, seed=1)
    converted = with_trees(original, 16)
    trees = [layer.multihead_attn.build(memory) for layer in converted.layers]
    output = target
    for layer, tree in zip(converted.layers, trees, strict=True):
        output = layer(output, tree)
    assert torch.equal(converted.norm(output), converted(target, memory))


def test_weights_are_copied_and_the_mode_is_kept() -> None:
    mha = multihead()
    module = TreeMultihead(mha, branch=4, order="given", budget=8)
    assert (module.tca.branch, module.tca.order, module.tca.budget, module.batch_first) == (4, "given", 8, True)
    assert not module.training and not module.tca.training and TreeMultihead(mha.train()).tca.training
    query, context = rand(2, M, DIM), rand(2, N, DIM, seed=1)
    before = module(query, context, context)[0]
    with torch.no_grad():
        mha.out_proj.weight.zero_()
    assert torch.equal(module(query, context, context)[0], before)


def test_gradients_reach_the_weights_and_the_context() -> None:
    module, context = TreeMultihead(multihead(), budget=16), rand(2, N, DIM, seed=1).requires_grad_()
    module(rand(2, M, DIM), context, context)[0].square().sum().backward()
    assert context.grad is not None and context.grad.abs().sum() > 0
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in module.parameters())


CONTEXT = rand(2, N, DIM, seed=1)
FLAT = CONTEXT[0]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("value", {"value": CONTEXT.clone()}),
        ("need_weights", {"need_weights": True}),
        ("is_causal", {"is_causal": True}),
        ("attn_mask", {"attn_mask": torch.zeros(M, N)}),
        ("key_padding_mask", {"key_padding_mask": torch.zeros(2, N)}),
        ("key_padding_mask", {"key_padding_mask": torch.zeros(2, N + 1, dtype=torch.bool)}),
        ("key_padding_mask", {"key_padding_mask": torch.ones(2, N, dtype=torch.bool)}),
        ("query", {"query": rand(M, DIM)}),
        ("context", {"key": FLAT, "value": FLAT}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_calls_it_cannot_answer_are_refused(name: str, given: dict[str, Any]) -> None:
    arguments = {"query": rand(2, M, DIM), "key": CONTEXT, "value": CONTEXT}
    with pytest.raises(InputError, match=rf"\A{name}: expected .*\Z"):
        TreeMultihead(multihead())(**arguments | given)


def test_a_mask_beside_a_tree_is_refused() -> None:
    module = TreeMultihead(multihead())
    tree = module.build(CONTEXT)
    with pytest.raises(InputError, match=r"\Akey_padding_mask: expected None with a tree"):
        module(rand(2, M, DIM), tree, tree, padding())


@pytest.mark.parametrize("settings", [{"batch_first": False}, {"add_zero_attn": True}, {"vdim": 8}], ids=str)
def test_attention_it_cannot_convert_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"\Aattention: expected .*\Z"):
        TreeMultihead(multihead(**settings))
