"""Kernels that are launched in a test are recorded, and compiled ahead of time for a GPU that need not be there."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor


class Recorder:
    """Stands in for a kernel and keeps its launches."""

    def __init__(self, kernel: Any, launches: list[Any]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.launches.append((self.kernel, args, options))


def compile_for_hopper(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Ahead of time, as the launch would: same types, constants and alignment."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.bool: "*i1"}
    pointers |= {torch.int64: "*i64", torch.int32: "*i32"}
    signature, constants, attributes = {}, {}, {}
    for place, (parameter, value) in enumerate(zip(kernel.params, args, strict=True)):
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[(place,)] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name], attributes[(place,)] = pointers[value.dtype], [["tt.divisibility", 16]]
        else:
            assert parameter.do_not_specialize, "a size would compile a kernel of its own"
            signature[parameter.name] = "i32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


class AheadOfTime:
    """Records the launches of some kernels instead of starting them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.launches: list[Any] = []

    def record(self, owner: Any, name: str) -> None:
        """Record the launches of the kernel that `owner` has under `name`."""
        self.monkeypatch.setattr(owner, name, Recorder(getattr(owner, name), self.launches))

    def compile(self, launch: Any) -> int:
        """Bytes of the machine code of a launch."""
        return len(compile_for_hopper(*launch).asm["cubin"])


@pytest.fixture
def ahead_of_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AheadOfTime:
    compiler = pytest.importorskip("triton.compiler")
    if "constexprs" not in inspect.signature(compiler.ASTSource.__init__).parameters:
        pytest.skip("this triton compiles ahead of time by other means")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return AheadOfTime(monkeypatch)
