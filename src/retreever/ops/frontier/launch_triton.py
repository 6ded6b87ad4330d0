"""Budgeted searches on CUDA tensors. No call waits for the device, so all of them can be captured in a CUDA graph."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from triton import JITFunction

from retreever.ops.frontier import kernels_triton as kernels
from retreever.ops.launching_triton import on_device_of
from retreever.ops.search.inputs import SearchInputs
from retreever.ops.search.tiles_triton import Operands
from retreever.tree.budget import Spread, slots
from retreever.tree.plan import TreePlan

LARGEST = 32_768  # numbers in a tile of children
COMPILED = isinstance(kernels.expand, JITFunction)  # and not run by the interpreter


def fits_triton(inputs: SearchInputs, spread: Spread) -> bool:
    """Whether the children of all nodes opened on a level fit into one tile."""
    h, e = inputs.q.shape[2:]
    return _cells(inputs.plan, spread) * _power(h) * _power(e) <= LARGEST


def expand_triton(inputs: SearchInputs, path: Tensor, budget: int, spread: Spread) -> tuple[Tensor, Tensor, Tensor]:
    """Output, logsumexp per head and rows of the nodes read (-1 where unused), without gradients."""
    q, plan, counts = inputs.q, inputs.plan, inputs.log_count
    b, m, h, e = q.shape
    operands = Operands(q, inputs.keys, inputs.values, inputs.node_mask)
    rows = torch.empty(b, m, slots(plan, budget), dtype=torch.int64, device=q.device)
    output = torch.empty(b, m, h, e, dtype=q.dtype, device=q.device)
    lse = torch.empty(b, m, h, dtype=torch.float32, device=q.device)
    cells, row = _cells(plan, spread), _power(h) * _power(e)
    if counts is not None:
        counts = counts.float() if counts.stride(1) == 1 else counts.float().contiguous()
    with on_device_of(q):
        kernels.expand[(b * m,)](
            *operands.tensors, counts, path.contiguous(), spread.own, _table(spread.table, q.device), rows, output, lse,
            m, plan.depth, plan.block, plan.blocks, plan.leaf_offset, rows.shape[2],
            0 if counts is None else counts.stride(0), *operands.strides,
            operands.unit, *operands.head_strides, plan.branch, _width(plan), cells, max(1, 1024 // row), h, e,
            _power(h), _power(e), COMPILED, num_warps=_warps(cells * row),
        )  # fmt: skip
    return output, lse, rows


@lru_cache(maxsize=256)
def _table(table: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """The table on the device, cached there, since a CUDA graph cannot copy it."""
    with torch.inference_mode(False):
        return torch.tensor(table, dtype=torch.int32).reshape(len(table), -1).to(device)


def _warps(numbers: int) -> int:
    """Measured on an H200: few numbers a thread, until the warps wait for each other longer than for their loads."""
    return min(4 if numbers <= 4096 else 8, max(1, numbers // 256))


def _width(plan: TreePlan) -> int:
    return _power(max(plan.branch, plan.block))


def _cells(plan: TreePlan, spread: Spread) -> int:
    return _power(max(spread.widest, default=1)) * _width(plan)


def _power(size: int) -> int:
    """The smallest power of two >= `size`."""
    return 1 << (size - 1).bit_length()
