"""One way up a tree of means, as one Triton kernel, equals sums over the tokens: any branch, width and padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from retreever.ops.aggregate.api import climbs_means
from retreever.ops.backend import interpreting
from retreever.tree.plan import TreePlan, packed_plan

means_triton = pytest.importorskip("retreever.ops.aggregate.means_triton")
pytestmark = pytest.mark.skipif(not interpreting(), reason="needs Triton's interpreter")


def means_of(plan: TreePlan, leaves: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Means (b, t, ...) of the real tokens below every node, and their numbers (b, t), in float64."""
    sums, counts = [leaves.double() * real[..., None, None]], [real.int()]
    for _ in range(plan.depth):
        sums.append(sums[-1].unflatten(1, (-1, plan.branch)).sum(dim=2))
        counts.append(counts[-1].unflatten(1, (-1, plan.branch)).sum(dim=2, dtype=torch.int32))
    count = torch.cat(counts[::-1], dim=1)
    return torch.cat(sums[::-1], dim=1) / count.clamp_min(1)[..., None, None], count


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 60), st.integers(2, 5), st.integers(1, 3), st.integers(1, 40), st.booleans(), st.integers(0, 2**31)
)
def test_the_kernel_gives_the_means_of_the_tokens(n: int, branch: int, h: int, e: int, evicts: bool, seed: int) -> None:
    """Another token on a slot of every row, or none; padding holds NaN, and keys and values lie side by side."""
    torch.manual_seed(seed)
    b, plan = 2, packed_plan(n, branch)
    real = torch.rand(b, plan.leaves) < 0.6
    before, after = torch.randn(2, b, plan.leaves, 2 * h, e)
    slots, rows = torch.randint(plan.leaves, (b,)), torch.arange(b)
    found, count = means_of(plan, before, real)
    now = torch.tensor([not evicts, True])
    stored = found.float().masked_fill((count == 0)[..., None, None], torch.nan).view(b, plan.nodes, 2, h, e)
    mask, keys, values = count > 0, stored[:, :, 0], stored[:, :, 1]
    logs, counted = torch.zeros(b, plan.nodes), torch.zeros(b, plan.nodes, h, e + 1)
    token = after[rows, slots].view(b, 2, h, e)
    assert climbs_means("triton", (keys, values), (count, mask, logs, counted), 1) is not torch.is_grad_enabled()
    means_triton.climb_means_triton(
        (keys, values), count, mask, (logs, counted), slots, now, (token[:, 0], token[:, 1]), plan
    )
    real[rows, slots] = now
    before[rows, slots] = after[rows, slots]
    means, counts = means_of(plan, before, real)
    assert torch.equal(count, counts) and torch.equal(mask, counts > 0)
    assert torch.allclose(stored.flatten(2, 3)[mask].double(), means[mask], atol=1e-5)
    for row, slot in enumerate(slots.tolist()):
        for height in range(plan.depth + 1):
            node = plan.offsets[plan.depth + 1 - height] + slot // branch**height
            log = counts[row, node].clamp_min(1).log()
            assert torch.allclose(logs[row, node], log) and torch.allclose(counted[row, node, :, e], log)
            assert torch.equal(counted[row, node, :, :e], keys[row, node])


def test_trees_that_do_not_lie_densely_are_left_to_plain_torch() -> None:
    count, mask = torch.zeros(2, 6, dtype=torch.int32), torch.zeros(2, 6, dtype=torch.bool)
    keys = torch.zeros(2, 6, 2, 8)
    across = torch.zeros(2, 6, 8, 2).transpose(2, 3)
    with torch.no_grad():
        assert climbs_means("triton", (keys, keys), (count, mask, None, None), 1)
        assert not climbs_means("triton", (keys, keys), (count, mask, None, None), 2)
        assert not climbs_means("triton", (keys, across), (count, mask, None, None), 1)
        assert not climbs_means("triton", (keys, keys), (count[:, ::2], mask, None, None), 1)
        assert not climbs_means("reference", (keys, keys), (count, mask, None, None), 1)
    assert not climbs_means("triton", (keys, keys), (count, mask, None, None), 1)  # gradients are wanted
