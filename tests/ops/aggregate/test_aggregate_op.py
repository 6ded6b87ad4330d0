"""The aggregator as one kernel per level equals the plain one: in Triton's interpreter, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from retreever import TreeCrossAttention
from retreever.nn.plain import plain_projection
from retreever.ops.aggregate.api import aggregates
from retreever.ops.backend import interpreting
from retreever.tree.aggregate import TransformerAggregator, plain_weights
from retreever.tree.build import build_nodes
from retreever.tree.plan import TreePlan

launch_triton = pytest.importorskip("retreever.ops.aggregate.launch_triton")
LONG = [(1000, 2, 64, 4, True), (20_000, 2, 64, 4, False)]
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
        _, plain, plain_mask = build_nodes(context, aggregator, branch, mask, impl="reference")
        _, fused, fused_mask = build_nodes(context, aggregator, branch, mask, impl="triton")
    assert not torch.equal(plain, fused)  # the kernel ran: it rounds differently
    assert (fused_mask is None and plain_mask is None) or torch.equal(fused_mask, plain_mask)
    assert torch.allclose(fused, plain, atol=5e-6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize(("n", "masked"), [(70, True), (256, False)])
def test_long_levels_equal_plain_ones(n: int, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tiles that levels of thousands of parents have."""
    monkeypatch.setattr(launch_triton, "SHORT", 0)
    aggregator, (context, mask) = an_aggregator(64, 4, "pre"), a_context(2, n, 64, masked)
    with torch.inference_mode():
        plain = build_nodes(context, aggregator, 2, mask, impl="reference")[1]
        fused = build_nodes(context, aggregator, 2, mask, impl="triton")[1]
    assert torch.allclose(fused, plain, atol=5e-6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize("aggregator", ["mean", "transformer"])
def test_keys_and_values_of_the_kernel_equal_those_of_the_layers(aggregator: Any) -> None:
    torch.manual_seed(0)
    fused = TreeCrossAttention(32, 2, kdim=64, aggregator=aggregator, impl="triton").eval()
    plain = TreeCrossAttention(32, 2, kdim=64, aggregator=aggregator, impl="reference").eval()
    for parameter in fused.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    plain.load_state_dict(fused.state_dict())
    context, mask = a_context(2, 37, 64, masked=True)
    with torch.inference_mode():
        ours, theirs = fused.build(context, mask), plain.build(context, mask)
    assert not torch.equal(ours.keys, theirs.keys)  # the kernel ran: it rounds differently
    for name in ("keys", "values"):
        real = theirs.mask
        assert torch.allclose(getattr(ours, name)[real], getattr(theirs, name)[real], atol=5e-6)


@pytest.mark.parametrize("attached", ["to_kv", "context_norm"])
def test_what_is_attached_to_the_projection_counts(attached: str) -> None:
    module = TreeCrossAttention(32, 2).eval()
    assert plain_projection(module.block) is not None
    getattr(module.block, attached).register_forward_hook(lambda *_: None)
    assert plain_projection(module.block) is None


@pytest.mark.gpu
@pytest.mark.parametrize("residual", ["pre", "normalised"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("n", "branch", "dim", "heads", "masked"), [*CASES, (1000, 2, 64, 4, True), (20_000, 2, 64, 4, False)]
)
def test_fused_build_equals_plain_build(
    n: int, branch: int, dim: int, heads: int, masked: bool, dtype: torch.dtype, residual: str
) -> None:
    """Against float64, the fused build errs no more than twice as much as plain torch in the same dtype."""
    aggregator = an_aggregator(dim, heads, residual).to("cuda", dtype)
    context, mask = a_context(3, n, dim, masked)
    context, mask = context.to("cuda", dtype), None if mask is None else mask.cuda()
    with torch.inference_mode():
        _, fused, _ = build_nodes(context, aggregator, branch, mask)
        _, plain, _ = build_nodes(context, aggregator, branch, mask, impl="reference")
        _, exact, _ = build_nodes(context.double(), aggregator.double(), branch, mask, impl="reference")
    ours, theirs = (fused - exact).abs().max(), (plain - exact).abs().max()
    assert ours <= 2 * theirs + 8 * torch.finfo(dtype).eps * exact.abs().max()


def test_what_the_kernel_cannot_do_is_left_to_plain_torch() -> None:
    def taken(dim: int, heads: int, branch: int = 2, dtype: torch.dtype = torch.float32) -> bool:
        weights = plain_weights(TransformerAggregator(dim, heads, 2 * dim).to(dtype).eval())
        assert weights is not None
        plan = TreePlan(64, branch)
        return aggregates(plan, weights, torch.zeros(1, plan.leaves, dim, dtype=dtype))

    with torch.no_grad():
        assert taken(64, 4)
        assert not taken(24, 2)  # not a power of two
        assert not taken(64, 8)  # heads too narrow
        assert not taken(64, 4, branch=32)  # too many siblings
    assert not taken(64, 4)  # gradients are wanted


@pytest.mark.skipif(not interpreting(), reason="kernels are compiled anyway")
def test_the_kernels_of_one_way_up_compile_without_a_gpu() -> None:
    command = [sys.executable, "-m", "pytest", __file__, "-p", "no:cacheprovider", "-k", "for_hopper"]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.skipif(interpreting(), reason="the interpreter does not compile")
@pytest.mark.parametrize("aggregator", ["transformer", "mean"])
def test_the_kernels_of_one_way_up_compile_for_hopper(aggregator: Any, ahead_of_time: Any) -> None:
    path, pairs, means, project = (
        pytest.importorskip(f"retreever.ops.aggregate.{name}_triton") for name in ("path", "pairs", "means", "project")
    )
    for launcher in (path._climb, pairs._climb, means._climb, project._project_way):
        ahead_of_time.record(launcher, "kernel")
    module, plan = TreeCrossAttention(64, 4, aggregator=aggregator).eval(), TreePlan(16)
    mask, count = torch.ones(1, plan.nodes, dtype=torch.bool), torch.ones(1, plan.nodes, dtype=torch.int32)
    slots, real = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool)
    nodes, tokens = torch.zeros(1, plan.nodes, 64), torch.zeros(1, 1, 64)
    keys, logs = nodes.view(1, -1, 4, 16), (torch.zeros(1, plan.nodes), torch.zeros(1, plan.nodes, 4, 17))
    if module.aggregator is None:
        leaf = keys[:, 0]
        means.climb_means_triton((keys, keys), count, mask, logs, slots[:, 0], real[:, 0], (leaf, leaf), plan)
    else:
        weights, projection = plain_weights(module.aggregator), plain_projection(module.block)
        assert pairs.fits(plan, weights)
        path.climb_triton(nodes, mask, slots, plan, weights)
        path.climb_triton(nodes, mask, slots, plan, weights, count, tokens, real)
        pairs.climb_pairs_triton(nodes, mask, slots, plan, weights, count, tokens, None)
        project.project_way_triton(nodes, (keys, keys), count, logs, slots, plan, projection)
    assert all(ahead_of_time.compile(launch) > 0 for launch in ahead_of_time.launches)
    assert len(ahead_of_time.launches) == (1 if module.aggregator is None else 4)
