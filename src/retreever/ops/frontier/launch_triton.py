"""Budgeted searches on CUDA tensors. No call waits for the device, so all of them can be captured in a CUDA graph."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from retreever.ops.frontier import kernels_triton as kernels
from retreever.ops.launching_triton import on_device_of
from retreever.ops.search.inputs import SearchInputs
from retreever.tree.budget import Spread, slots
from retreever.tree.plan import TreePlan

LARGEST = 32_768  # numbers in a tile of children


def fits_triton(inputs: SearchInputs, spread: Spread) -> bool:
    """Whether the children of all nodes opened on a level fit into one tile."""
    h, e = inputs.q.shape[2:]
    return _cells(inputs.plan, spread) * _power(h) * _power(e) <= LARGEST


def expand_triton(inputs: SearchInputs, path: Tensor, budget: int, spread: Spread) -> tuple[Tensor, Tensor, Tensor]:
    """Output, logsumexp per head and rows of the nodes read (-1 where unused), without gradients."""
    q, keys, values, plan, mask, *_ = inputs
    b, m, h, e = q.shape
    q, keys, values = _dense(q), _dense(keys), _dense(values)
    rows = torch.empty(b, m, slots(plan, budget), dtype=torch.int64, device=q.device)
    output = torch.empty(b, m, h, e, dtype=q.dtype, device=q.device)
    lse = torch.empty(b, m, h, dtype=torch.float32, device=q.device)
    cells, width = _cells(plan, spread), _width(plan)
    shares = torch.empty(b * m, plan.depth, cells, dtype=torch.float32, device=q.device)
    counts = None if inputs.log_count is None else inputs.log_count.float().contiguous()
    with on_device_of(q):
        kernels.expand[(b * m,)](
            q, keys, values, None if mask is None else mask.contiguous(), counts, path.contiguous(), spread.own,
            _table(spread.table, q.device), rows, output, lse, shares,
            m, plan.depth, plan.block, plan.blocks, plan.leaf_offset, plan.nodes, rows.shape[2],
            *q.stride()[:2], *keys.stride()[:2], *values.stride()[:2],
            q.stride(2), keys.stride(2), values.stride(2), plan.branch, width, cells,
            h, e, _power(h), _power(e), num_warps=min(8, max(1, cells * _power(h) * _power(e) // 256)),
        )  # fmt: skip
    return output, lse, rows


@lru_cache(maxsize=256)
def _table(table: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """The table on the device, cached there, since a CUDA graph cannot copy it."""
    with torch.inference_mode(False):
        return torch.tensor(table, dtype=torch.int32).reshape(len(table), -1).to(device)


def _width(plan: TreePlan) -> int:
    return _power(max(plan.branch, plan.block))


def _cells(plan: TreePlan, spread: Spread) -> int:
    return _power(max(spread.widest, default=1)) * _width(plan)


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _power(size: int) -> int:
    """The smallest power of two >= `size`."""
    return 1 << (size - 1).bit_length()
