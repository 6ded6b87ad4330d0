"""Numba kernel of one way up a tree of means: counts, masks, keys and values of all nodes above a changed leaf."""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

from math import log

import numpy as np
from torch import Tensor

from retreever.ops.search.lanes_numba import kernel
from retreever.tree.plan import TreePlan


@kernel
def climb_means(keys, values, count, mask, logs, counted, slots, real, new_keys, new_values, offsets, branch):
    """Put a key and a value on one leaf slot of every row, and write the means of all nodes above it.

    `logs` and `counted` have no rows in trees without log counts.
    """
    b, _, heads, width = keys.shape
    key_sum, value_sum = np.empty((heads, width), np.float64), np.empty((heads, width), np.float64)
    for row in range(b):
        place, node = slots[row], offsets[-1] + slots[row]
        now = 1 if real[row] else 0
        added = now - count[row, node]
        for h in range(heads):
            for i in range(width):
                keys[row, node, h, i], values[row, node, h, i] = new_keys[row, h, i], new_values[row, h, i]
                key_sum[h, i], value_sum[h, i] = now * new_keys[row, h, i], now * new_values[row, h, i]
        for level in range(len(offsets) - 1, 0, -1):
            count[row, node] += added
            total = max(1, count[row, node])
            mask[row, node] = count[row, node] > 0
            if level < len(offsets) - 1:
                for h in range(heads):
                    for i in range(width):
                        keys[row, node, h, i] = key_sum[h, i] / total
                        values[row, node, h, i] = value_sum[h, i] / total
            if logs.shape[1] > 0:
                logs[row, node] = log(total)
                for h in range(heads):
                    counted[row, node, h, width] = logs[row, node]
                    for i in range(width):
                        counted[row, node, h, i] = keys[row, node, h, i]
            place //= branch
            first = offsets[level] + place * branch
            for child in range(first, first + branch):
                if child != node and count[row, child] > 0:
                    for h in range(heads):
                        for i in range(width):
                            key_sum[h, i] += count[row, child] * keys[row, child, h, i]
                            value_sum[h, i] += count[row, child] * values[row, child, h, i]
            node = offsets[level - 1] + place


def climb_means_numba(
    nodes: tuple[Tensor, Tensor],
    count: Tensor,
    mask: Tensor,
    logs: tuple[Tensor | None, Tensor | None],
    slots: Tensor,
    real: Tensor,
    leaves: tuple[Tensor, Tensor],
    plan: TreePlan,
) -> None:
    """Put keys and values `leaves` (b, h, e) on `slots` (b), and write all nodes above them in place."""
    keys, values = (part.numpy() for part in nodes)
    log_count, counted = (
        np.empty((0,) * size, keys.dtype) if part is None else part.numpy()
        for part, size in zip(logs, (2, 4), strict=True)
    )
    new_keys, new_values = (part.numpy() for part in leaves)
    climb_means(
        keys, values, count.numpy(), mask.numpy(), log_count, counted, slots.numpy(), real.numpy(), new_keys,
        new_values, np.array(plan.offsets, np.int64), plan.branch,
    )  # fmt: skip
