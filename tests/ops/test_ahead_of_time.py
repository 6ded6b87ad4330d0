"""Triton kernels are compiled without a GPU, too, in a process that does not interpret them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = [HERE / "search" / "test_triton.py", HERE / "frontier" / "test_kernels.py"]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="this is not the interpreter")
@pytest.mark.usefixtures("ahead_of_time")  # skipped where those tests would be
def test_kernels_compile_without_a_gpu() -> None:
    """The tests named for_hopper, all of which the interpreter skips."""
    command = [sys.executable, "-m", "pytest", *map(str, FILES), "-p", "no:cacheprovider", "-k", "for_hopper"]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "4 passed" in done.stdout, done.stdout[-4000:]
