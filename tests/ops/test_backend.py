"""Which backend runs: chosen in one place, by device and dtype, and never another than the one asked for."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from retreever import TreePlan, tree_attention
from retreever.errors import BackendError, InputError
from retreever.ops import backend
from retreever.ops.backend import choose, unavailable, without


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is remembered from other tests, and Triton does not interpret."""
    monkeypatch.setattr(backend, "_chosen", {})
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    yield


def test_reasons_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    assert unavailable("numba", "cpu", torch.float32) is None
    assert unavailable("numba", "cpu", torch.float64) is None
    assert "bfloat16" in str(unavailable("numba", "cpu", torch.bfloat16))
    assert "needs CPU tensors, got meta" in str(unavailable("numba", "meta", torch.float32))
    monkeypatch.setattr("numba.config.DISABLE_JIT", True)
    assert "NUMBA_DISABLE_JIT" in str(unavailable("numba", "cpu", torch.float32))


def test_reasons_of_triton_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    assert "needs CUDA tensors, got cpu" in str(unavailable("triton", "cpu", torch.float32))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert unavailable("triton", "cpu", torch.float32) is None
    assert "float64" in str(unavailable("triton", "cpu", torch.float64))


@pytest.mark.parametrize("error", [ImportError("no\nsuch file"), OSError("libnuma: cannot map")])
def test_a_broken_package_is_a_reason_in_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Auto falls back to plain torch; a backend asked for by name says why it cannot run."""

    def broken(name: str) -> Any:
        raise error

    monkeypatch.setattr(backend, "import_module", broken)
    tensor = torch.zeros(1)
    assert choose("search", "auto", tensor) == "reference"
    with pytest.raises(BackendError, match=r"^impl='numba' cannot run here: numba cannot be imported: ") as raised:
        choose("search", "numba", tensor)
    assert "\n" not in str(raised.value)


def test_an_operator_without_a_kernel_of_the_backend_is_plain_torch() -> None:
    pytest.importorskip("numba")
    tensor = torch.zeros(1)
    assert choose("search", "numba", tensor) == choose("search", "auto", tensor) == "numba"
    assert choose("attention", "numba", tensor) == choose("aggregate", "auto", tensor) == "reference"
    assert choose("search", "reference", tensor) == "reference"
    with pytest.raises(InputError, match=r"^impl: expected one of auto, reference, triton, numba, got 'cuda'"):
        choose("search", "cuda", tensor)  # type: ignore[arg-type]


def test_operators_can_be_switched_off_to_measure_them() -> None:
    pytest.importorskip("numba")
    tensor = torch.zeros(1)
    with without("search"):
        assert choose("search", "auto", tensor) == "reference"
        with without("search", "attention"):
            pass
        assert choose("search", "auto", tensor) == "reference"
    assert choose("search", "auto", tensor) == "numba"


def test_a_large_search_leaves_the_threads_of_torch_alone() -> None:
    """Helpers of the search once set torch's number of threads, for every thread that started after them."""
    torch.set_num_threads(2)
    plan = TreePlan(512)
    q, keys = torch.randn(8, 256, 4, 16), torch.randn(8, plan.nodes, 4, 16)
    tree_attention(q, keys, keys, plan, impl="numba")
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert found == [2]


def test_plain_torch_needs_no_kernel_module(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def no_kernels(name: str, *rest: Any) -> Any:
        assert not name.endswith(("_numba", "_triton")), name
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", no_kernels)
    plan = TreePlan(9)
    q, keys = torch.randn(1, 3, 2, 4), torch.randn(1, plan.nodes, 2, 4)
    assert tree_attention(q, keys, keys, plan, impl="reference").output.isfinite().all()


def test_compiled_code_runs_the_same_kernels() -> None:
    """Up to torch 2.12 `torch.compiler.is_exporting` is True in compiled code, which must not pick plain torch."""
    pytest.importorskip("numba")
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(choose("search", "auto", x))
        return x + 1

    torch.compile(look, backend="eager", fullgraph=True)(torch.zeros(1))
    assert seen == ["numba"]
