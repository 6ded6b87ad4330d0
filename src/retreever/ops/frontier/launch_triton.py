"""Budgeted searches on CUDA tensors. No call waits for the device, so all of them can be captured in a CUDA graph."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch
from torch import Tensor

from retreever.ops.frontier import kernels_triton as kernels
from retreever.ops.launching_triton import Launcher, on_device_of
from retreever.ops.search.inputs import SearchInputs
from retreever.ops.search.tiles_triton import Operands
from retreever.tree.budget import Spread, slots
from retreever.tree.plan import TreePlan

expand = Launcher(kernels.expand)
LARGEST = 32_768  # numbers in a tile of children


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
    table, count_batch = _table(spread.table, q.device), 0 if counts is None else counts.stride(0)
    with on_device_of(q):
        expand(
            b * m,
            (*operands.tensors, counts, path.contiguous(), spread.own, table, rows, output, lse),
            (m, plan.depth, plan.block, plan.blocks, plan.leaf_offset, rows.shape[2], count_batch, *operands.strides),
            (operands.unit, *operands.head_strides, plan.branch, _width(plan), cells, max(1, 1024 // row), h, e,
             _power(h), _power(e), expand.compiles),
            num_warps=_warps(cells * row),
        )  # fmt: skip
    return output, lse, rows


@lru_cache(maxsize=256)
def _table(table: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """The table on the device, cached there, since a CUDA graph cannot copy it.

    It is made in a thread of its own: in the caller's, a compiled graph may take all new memory for its own.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_copy, table, device).result()


def _copy(table: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    found = torch.tensor(table, dtype=torch.int32).reshape(len(table), -1).to(device)
    if found.is_cuda:
        torch.cuda.current_stream(device).synchronize()
    return found


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
