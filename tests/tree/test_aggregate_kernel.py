"""The aggregator as one kernel per level equals the plain one: in Triton's interpreter, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from retreever.tree.aggregate import TransformerAggregator
from retreever.tree.build import build_nodes

kernel = pytest.importorskip("retreever.tree.aggregate_kernel")
CASES = [(8, 2, 64, 4, False), (13, 2, 64, 4, True), (30, 4, 32, 2, True), (27, 3, 64, 4, False)]


def an_aggregator(dim: int, heads: int, residual: str) -> TransformerAggregator:
    torch.manual_seed(0)
    aggregator = TransformerAggregator(dim, heads, 2 * dim, residual).eval()
    for parameter in aggregator.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return aggregator


def a_context(b: int, n: int, dim: int, masked: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    torch.manual_seed(1)
    mask = torch.rand(b, n) < 0.7
    mask[:, 0] = mask[0] = True
    return torch.randn(b, n, dim), mask if masked else None


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize("residual", ["pre", "normalised"])
@pytest.mark.parametrize(("n", "branch", "dim", "heads", "masked"), CASES)
def test_interpreted_levels_equal_plain_ones(
    n: int, branch: int, dim: int, heads: int, masked: bool, residual: str
) -> None:
    aggregator, (context, mask) = an_aggregator(dim, heads, residual), a_context(3, n, dim, masked)
    with torch.inference_mode():
        plan, nodes, node_mask = build_nodes(context, aggregator, branch, mask)
        ours = nodes.clone()
        ours[:, : plan.leaf_offset] = torch.nan  # every inner node must be written
        assert kernel.fits(aggregator.layer, branch, context)
        kernel.aggregate_levels(aggregator.layer, plan, ours, node_mask)
    assert torch.allclose(ours, nodes, atol=5e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("residual", ["pre", "normalised"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "branch", "dim", "heads", "masked"), [*CASES, (1000, 2, 64, 4, True)])
def test_fused_build_equals_plain_build(
    n: int, branch: int, dim: int, heads: int, masked: bool, dtype: torch.dtype, residual: str
) -> None:
    """Against float64, the fused build errs no more than twice as much as plain torch in the same dtype."""
    aggregator = an_aggregator(dim, heads, residual).to("cuda", dtype)
    context, mask = a_context(3, n, dim, masked)
    context, mask = context.to("cuda", dtype), None if mask is None else mask.cuda()
    with torch.inference_mode():
        _, fused, fused_mask = build_nodes(context, aggregator, branch, mask)
    with torch.enable_grad():  # asking for a gradient takes the plain path
        _, plain, plain_mask = build_nodes(context, aggregator, branch, mask)
        _, exact, _ = build_nodes(context.double(), aggregator.double(), branch, mask)
    assert (fused_mask is None and plain_mask is None) or torch.equal(fused_mask, plain_mask)
    ours, theirs = (fused - exact).abs().max(), (plain - exact).abs().max()
    assert ours <= 2 * theirs + 8 * torch.finfo(dtype).eps * exact.abs().max()


def test_layers_the_kernel_cannot_do_are_left_to_plain_torch() -> None:
    tokens = torch.zeros(1, 4, 24)
    assert not kernel.fits(TransformerAggregator(24, 2, 48).layer, 2, tokens)  # not a power of two
    assert not kernel.fits(TransformerAggregator(64, 8, 128).layer, 2, torch.zeros(1, 4, 64))  # heads too narrow
    assert not kernel.fits(TransformerAggregator(64, 4, 128).layer, 32, torch.zeros(1, 4, 64))  # families too wide
    assert not kernel.fits(TransformerAggregator(64, 4, 128).layer, 2, torch.zeros(1, 4, 64).double())
