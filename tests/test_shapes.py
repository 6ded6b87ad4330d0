"""Shapes written in signatures are the shapes that pass: tests run again with every annotation checked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
CHECKED = [
    "attention",
    "batch",
    "detours",
    "models",
    "nn",
    "objective",
    "ops.attention.api",
    "ops.search.reference",
    "results",
    "tasks",
    "tree",
]
AGAIN = [
    "test_detours.py",
    "models/test_models.py",
    "models/series/test_oracles.py",
    "models/test_neural_processes.py",
    "ops/search/test_policy.py",
    "ops/search/test_reference.py",
    "tree/test_selected.py",
    "tree/test_order_layout.py",
]


def test_annotations_hold() -> None:
    """Tests of deliberate mistakes are left out: there the checker would speak first."""
    packages = ",".join([*(f"retreever.{name}" for name in CHECKED), "beartype.beartype"])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--jaxtyping-packages={packages}"]
    command += ["-k", "not by_heart and not frozen_path and not refused"]  # long, or mistakes
    few = os.environ | {"RETREEVER_EXAMPLES": "15"}  # shapes are wrong at once or never
    done = subprocess.run([*command, *(str(TESTS / name) for name in AGAIN)], capture_output=True, text=True, env=few)
    assert done.returncode == 0, done.stdout[-3000:]
