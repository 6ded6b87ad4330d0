"""Attention block, feed-forward and MLP by hand, and taking over a trained `nn.MultiheadAttention`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retreever import CrossAttention, InputError, TreeCrossAttention
from retreever.nn.blocks import MLP, AttentionBlock, FeedForward, self_attention_block

DIM, HEADS = 16, 4


def rand(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, the same for the same shape and seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def block(dim: int = DIM, heads: int = HEADS, **settings: object) -> AttentionBlock:
    """A block whose norms and biases are not the identity they start as."""
    torch.manual_seed(0)
    made = AttentionBlock(dim, heads, **settings).eval()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def gap(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).detach().abs().max())


def layer_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """Written out: zero mean, unit variance, scale and shift."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias


def attention_by_hand(b: AttentionBlock, query: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q k / sqrt(e)) v per head, one head after the other, then the output projection."""
    q, kv = b.to_q(query), b.to_kv(context)
    dim, width = q.shape[-1], q.shape[-1] // b.heads
    parts = []
    for head in range(b.heads):
        at = slice(head * width, (head + 1) * width)
        scores = q[..., at] @ kv[..., :dim][..., at].transpose(1, 2) / width**0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], -torch.inf)
        parts.append(scores.softmax(-1) @ kv[..., dim:][..., at])
    return b.to_out(torch.cat(parts, -1))


def gated(b: AttentionBlock, x: Tensor) -> Tensor:
    """GEGLU by hand."""
    assert b.feed_forward is not None
    value, gate = b.feed_forward.up(x).chunk(2, -1)
    return b.feed_forward.down(value * gate * 0.5 * (1 + torch.erf(gate / 2**0.5)))


def test_a_bare_block_is_multi_head_attention() -> None:
    bare, query, context = block(kdim=12, residual="none"), rand(2, 3, DIM), rand(2, 5, 12)
    mask = torch.tensor([[True] * 5, [True, False, True, False, False]])
    assert gap(bare(query, context), attention_by_hand(bare, query, context)) <= 2e-6
    assert gap(bare(query, context, mask), attention_by_hand(bare, query, context, mask)) <= 2e-6


@pytest.mark.parametrize("context_norm", ["none", "shared", "own"])
@pytest.mark.parametrize("residual", ["pre", "normalised", "doubled", "none"])
def test_residual_forms_are_what_they_are_documented_to_be(residual: str, context_norm: str) -> None:
    """pre: x + f(LN x); normalised: LN x + f(LN x); doubled: x + LN x + f(LN x); none: f(x)."""
    b, x, context = block(4, 2, hidden=6, residual=residual, context_norm=context_norm), rand(1, 3, 4), rand(1, 5, 4)
    lx = x if residual == "none" else layer_norm(x, b.norm)
    read = context
    if context_norm == "own":
        read = layer_norm(context, b.context_norm)
    elif context_norm == "shared" and residual != "none":
        read = layer_norm(context, b.norm)
    attended = attention_by_hand(b, lx, read)
    kept = {"pre": x, "normalised": lx, "doubled": x + lx, "none": torch.zeros_like(x)}[residual]
    after = kept + attended
    fed = after if residual == "none" else layer_norm(after, b.feed_norm)
    kept = {"pre": after, "normalised": fed, "doubled": fed, "none": torch.zeros_like(x)}[residual]
    assert gap(b(x, context), kept + gated(b, fed)) <= 2e-6


def test_numbers_worked_out_on_paper() -> None:
    """One head, identity projections: LN(3, 1) is (1, -1), and attention to one token gives that token."""
    b = AttentionBlock(2, 1, residual="doubled").eval()
    with torch.no_grad():
        for weight in (b.to_q.weight, b.to_out.weight):
            weight.copy_(torch.eye(2))
        b.to_kv.weight.copy_(torch.eye(2).repeat(2, 1))
        b.to_out.bias.zero_()
    query, context = torch.tensor([[[3.0, 1.0]]]), torch.tensor([[[10.0, 20.0]]])
    assert gap(b(query, context), torch.tensor([[[14.0, 20.0]]])) <= 1e-4
    for residual, expected in {"pre": [13.0, 21.0], "normalised": [11.0, 19.0], "none": [10.0, 20.0]}.items():
        b.residual = residual
        assert gap(b(query, context), torch.tensor([[expected]])) <= 1e-4


def test_without_feed_forward_the_block_ends_after_attention() -> None:
    b = block(hidden=0)
    assert b.feed_forward is None and isinstance(b.feed_norm, nn.Identity)
    assert sum(p.numel() for p in b.parameters()) == 2 * DIM + 3 * DIM * DIM + DIM * DIM + DIM


def test_keys_and_values_of_a_token_lie_side_by_side() -> None:
    """One tensor, read once: the values start where the keys of the same token end."""
    keys, values = block().key_values(rand(2, 5, DIM))
    assert keys.shape == values.shape == (2, 5, HEADS, DIM // HEADS)
    assert values.data_ptr() - keys.data_ptr() == DIM * keys.element_size()


def test_dropout_acts_in_training_only() -> None:
    b, query, context = block(hidden=8, dropout=0.5), rand(2, 3, DIM), rand(2, 5, DIM)
    assert torch.equal(b(query, context), b(query, context))
    b.train()
    assert not torch.equal(b(query, context), b(query, context))


def test_self_attention_reads_raw_keys_only_in_the_published_form() -> None:
    assert self_attention_block(DIM, HEADS, 8, "pre", 0.0).shared_norm
    published = self_attention_block(DIM, HEADS, 8, "normalised", 0.0)
    assert not published.shared_norm and published.context_norm is None


def test_feed_forward_is_gated() -> None:
    feed = FeedForward(4, 6)
    x = rand(3, 4)
    value, gate = feed.up(x).split(6, dim=-1)
    assert gap(feed(x), feed.down(value * F.gelu(gate))) <= 1e-6


def test_mlp_has_depth_linear_layers_and_no_activation_at_the_end() -> None:
    layers = list(MLP(3, 8, 2, 4, nn.ELU))
    assert [(m.in_features, m.out_features) for m in layers[::2]] == [(3, 8), (8, 8), (8, 8), (8, 2)]
    assert all(isinstance(m, nn.ELU) for m in layers[1::2]) and isinstance(layers[-1], nn.Linear)
    assert len(list(MLP(3, 8, 2, 1))) == 1


MASKS = {
    "all-real": None,
    "tail": torch.arange(11) < torch.tensor([1, 2, 3, 5, 8, 11])[:, None],
    "holes": torch.rand(6, 11, generator=torch.Generator().manual_seed(4)) < 0.5,
}


def multihead(bias: bool = True, kdim: int | None = None, heads: int = HEADS, **more: object) -> nn.MultiheadAttention:
    """A "trained" attention: torch starts all biases at 0, so they are moved away from there."""
    torch.manual_seed(1)
    attention = nn.MultiheadAttention(DIM, heads, bias=bias, kdim=kdim, vdim=kdim, batch_first=True, **more).eval()
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.2)
    return attention


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("heads", [1, 4, 8])
@pytest.mark.parametrize("kdim", [None, 12])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [CrossAttention, TreeCrossAttention])
def test_from_multihead_is_the_same_function(
    kind: type[nn.Module], bias: bool, kdim: int | None, heads: int, mask: Tensor | None
) -> None:
    """Both modules, and the tree when its branch is at least the number of tokens."""
    attention, query, context = multihead(bias, kdim, heads), rand(6, 5, DIM), rand(6, 11, kdim or DIM)
    padding = None if mask is None else ~mask
    theirs = attention(query, context, context, key_padding_mask=padding, need_weights=False)[0]
    more = {"branch": 11} if kind is TreeCrossAttention else {}
    module = kind.from_multihead(attention, **more).eval()
    assert gap(module(query, module.build(context, mask)).output, theirs) <= 1e-6


def test_from_multihead_shares_no_memory_with_the_original() -> None:
    attention = multihead()
    module = CrossAttention.from_multihead(attention)
    before = module.block.to_q.weight.clone()
    nn.init.zeros_(attention.in_proj_weight)
    assert torch.equal(module.block.to_q.weight, before)


def test_from_multihead_keeps_the_dropout_of_plain_attention_only() -> None:
    """A search has no dropout on its scores: they are also its policy."""
    attention = multihead(dropout=0.25)
    assert CrossAttention.from_multihead(attention).block.dropout == 0.25
    assert TreeCrossAttention.from_multihead(attention).block.dropout == 0.0


@pytest.mark.parametrize("kind", [CrossAttention, TreeCrossAttention])
def test_from_multihead_keeps_the_dtype(kind: type[nn.Module]) -> None:
    attention, query, context = multihead().double(), rand(2, 5, DIM).double(), rand(2, 2, DIM).double()
    module = kind.from_multihead(attention).eval()
    module.impl = "reference"  # no need to compile a kernel for this
    assert gap(module(query, module.build(context)).output, attention(query, context, context)[0]) <= 1e-12


@pytest.mark.parametrize("kind", [CrossAttention, TreeCrossAttention])
@pytest.mark.parametrize(
    ("attention", "words"),
    [
        (nn.MultiheadAttention(DIM, 2), "batch_first=True, .*, got batch_first=False"),
        (nn.MultiheadAttention(DIM, 2, add_bias_kv=True, batch_first=True), "no add_bias_kv and no add_zero_attn"),
        (nn.MultiheadAttention(DIM, 2, add_zero_attn=True, batch_first=True), "no add_bias_kv and no add_zero_attn"),
        (nn.MultiheadAttention(DIM, 2, kdim=8, vdim=4, batch_first=True), "kdim equal to vdim, got kdim=8, vdim=4"),
        (nn.MultiheadAttention(DIM, 2, kdim=8, batch_first=True), "kdim equal to vdim, got kdim=8, vdim=16"),
        (nn.Linear(2, 2), "an nn.MultiheadAttention, got Linear"),
        (None, "an nn.MultiheadAttention, got NoneType"),
    ],
)
def test_from_multihead_refuses_what_it_cannot_express(
    kind: type[CrossAttention], attention: nn.MultiheadAttention, words: str
) -> None:
    with pytest.raises(InputError, match=f"^attention: expected {words}"):
        kind.from_multihead(attention)
