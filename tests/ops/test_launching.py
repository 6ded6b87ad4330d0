"""`Launcher`: which calls go straight to a kernel that is already compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

launching = pytest.importorskip("retreever.ops.launching_triton")


class Kernel:
    """Stands for a Triton function: compiles something new in every call, and says so."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(*args: Any, **options: Any) -> Any:
            self.log.append("compile")
            return Compiled(self.log, args)

        return start


class Compiled:
    def __init__(self, log: list[str], args: tuple[Any, ...]) -> None:
        self.log, self.constants = log, args[-1]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert grid == (3, 1, 1)
        return lambda *args: self.log.append(f"start {args[-1]}")


def test_only_calls_of_the_same_kind_are_started_directly() -> None:
    if not launching.DIRECT:
        pytest.skip("this triton has other compiled kernels")
    kernel = Kernel()
    launch = launching.Launcher(kernel)
    launch.compiles = True
    x = torch.zeros(9)
    launch(3, (x, None), (5, 6), ("a",), num_warps=4)
    launch(3, (x.clone(), None), (7, 8), ("a",), num_warps=4)  # sizes and addresses may differ
    assert kernel.log == ["compile", "start a"]
    others: list[tuple[Any, ...]] = [
        ((x[1:], None), (5, 6), ("a",), 4),  # another alignment
        ((x.half(), None), (5, 6), ("a",), 4),
        ((x, x), (5, 6), ("a",), 4),
        ((x, None), (5, 6), ("b",), 4),
        ((x, None), (5, 6), ("a",), 8),
        ((x, None), (5, 2**31), ("a",), 4),
        ((x, None), (5, 2**31), ("a",), 4),  # never: its integers are of 64 bits
    ]
    for tensors, sizes, constants, warps in others:
        launch(3, tensors, sizes, constants, num_warps=warps)
    assert kernel.log[2:] == ["compile"] * len(others)
    launch(3, (x, None), (5, 6), ("a",), num_warps=4)
    assert kernel.log[-1] == "start a"


def test_the_interpreter_is_always_called() -> None:
    kernel = Kernel()
    launch = launching.Launcher(kernel)  # no function that triton compiles
    for _ in range(2):
        launch(3, (torch.zeros(4), None), (5, 6), ("a",), num_warps=4)
    assert kernel.log == ["compile", "compile"]
