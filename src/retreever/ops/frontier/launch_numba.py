"""Budgeted searches on the CPU through Numba: CPU tensors of float32 or float64."""

# mypy: allow-untyped-calls
from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from retreever.ops.frontier.kernels_numba import expand
from retreever.ops.search.inputs import SearchInputs
from retreever.ops.search.launch_numba import addresses, run
from retreever.ops.search.threads_numba import Entries
from retreever.tree.budget import Spread, slots

_EXPAND = Entries(expand, 11, 4, 4, 8)


def expand_numba(inputs: SearchInputs, path: Tensor, budget: int, spread: Spread) -> tuple[Tensor, Tensor, Tensor]:
    """Output, logsumexp per head and rows of the nodes read (-1 where unused), without gradients."""
    q, keys, values, plan, node_mask, *_ = inputs
    b, m, h, e = q.shape
    keys, values = (x if x.stride(3) == 1 else x.contiguous() for x in (keys, values))
    q, path = q.contiguous(), path.contiguous()
    mask = None if node_mask is None else node_mask.contiguous()
    counts = None if inputs.log_count is None else inputs.log_count.to(q.dtype).contiguous()
    rows = torch.empty(b, m, slots(plan, budget), dtype=torch.int64)
    output, lse = torch.empty_like(q), q.new_empty(b, m, h)
    tensors = (q, keys, values, mask, counts, path, spread.own, _tensor(spread.table), rows, output, lse)
    widest = max(spread.widest, default=1)
    sizes = (m, h, e, plan.branch, plan.depth, plan.block, rows.shape[2], widest)
    work = 2 * b * m * h * e * rows.shape[2]
    run(_EXPAND, q.dtype, (addresses(*tensors), keys.stride(), values.stride(), sizes), b * m, work, tensors)
    return output, lse, rows


@lru_cache(maxsize=256)
def _tensor(table: tuple[tuple[int, ...], ...]) -> Tensor:
    return torch.tensor(table, dtype=torch.int64).reshape(len(table), -1)
