"""Exponential and logarithm of vectors, against numbers of more digits."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("numba")

import numpy as np
from numba import njit

from retreever.ops.search.lanes_numba import LANES, splat
from retreever.ops.search.memory_numba import load, pointer, store
from retreever.ops.search.series_numba import exp, log


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exponentials_and_logarithms_are_exact_to_two_units(dtype: Any) -> None:
    @njit
    def both(address: int, to: int, length: int, one: float) -> None:
        numbers, results = pointer(address, one), pointer(to, one)
        for i in range(0, length, LANES):
            vector = load(numbers, i)
            store(results, i, exp(vector))
            store(results, length + i, log(splat(0.0, one) - vector))

    tiny = np.finfo(dtype).tiny
    lowest = np.log(tiny) + 1e-3
    numbers = -np.concatenate([np.geomspace(tiny, -lowest, 4000), 1 + np.linspace(-0.01, 0.01, 96)]).astype(dtype)
    results = np.empty((2, len(numbers)), dtype)
    both(numbers.ctypes.data, results.ctypes.data, len(numbers), dtype(1))
    exact = np.stack([np.exp(numbers.astype(np.longdouble)), np.log(-numbers.astype(np.longdouble))])
    error = np.abs(results - exact) / np.maximum(np.abs(exact), np.finfo(np.longdouble).tiny)
    assert error[exact != 0].max() <= 2 * np.finfo(dtype).eps
    numbers[:4] = -np.inf, np.nan, lowest - 2, 0
    both(numbers.ctypes.data, results.ctypes.data, len(numbers), dtype(1))
    assert results[0, 0] == 0 and np.isnan(results[0, 1]) and results[0, 2] == 0 and results[0, 3] == 1
