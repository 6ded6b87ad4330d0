"""The doctor finds what is wrong, names it in one line, and does not cry wolf."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from retreever.lab.doctor import checks, collect, facts, installed, run_doctor
from retreever.ops.search import api
from retreever.tree.plan import TreePlan

Search = Callable[..., tuple[Tensor, ...]]


def fresh_doctor(before: str = "") -> subprocess.CompletedProcess[str]:
    """`retreever doctor` in a process of its own, as a user starts it, after some lines of Python."""
    code = f"import sys\n{before}\nfrom retreever.lab.doctor import run_doctor\nsys.exit(run_doctor())"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)


def line_of(output: str, backend: str) -> str:
    """The one line of the checks about a backend on the CPU."""
    lines = output.partition("checks\n")[2].splitlines()
    (line,) = (line for line in lines if line.split()[:2] == [backend, "cpu"])
    return line


def test_a_healthy_machine_gets_a_clean_bill() -> None:
    done = fresh_doctor()
    assert (done.returncode, done.stderr) == (0, "")
    assert line_of(done.stdout, "reference").split()[2] == "ok"
    assert line_of(done.stdout, "numba").split()[2] == "ok"
    assert "not available" in line_of(done.stdout, "triton")
    assert done.stdout.splitlines()[-1] == "nothing is wrong"


def test_a_package_that_cannot_be_imported_is_not_available_rather_than_wrong() -> None:
    done = fresh_doctor('sys.modules["numba"] = sys.modules["triton"] = None')
    assert (done.returncode, done.stderr) == (0, "")
    assert "not available" in line_of(done.stdout, "numba")
    assert "numba cannot be imported: import of numba halted" in line_of(done.stdout, "numba")
    assert "not available" in line_of(done.stdout, "triton") and "ok" in line_of(done.stdout, "reference").split()


def value(results: tuple[Tensor, ...], _: Tensor) -> tuple[Tensor, ...]:
    return 1.001 * results[0], *results[1:]


def value_in_inference(results: tuple[Tensor, ...], _: Tensor) -> tuple[Tensor, ...]:
    return results if torch.is_grad_enabled() else (*results[:3], 0.999 * results[3])


def gradient(results: tuple[Tensor, ...], keys: Tensor) -> tuple[Tensor, ...]:
    return results[0] + 1e-3 * (keys - keys.detach()).sum(), *results[1:]


def path(results: tuple[Tensor, ...], _: Tensor) -> tuple[Tensor, ...]:
    return results[0], results[1].flip(1), results[2], results[3]


def not_a_number(results: tuple[Tensor, ...], _: Tensor) -> tuple[Tensor, ...]:
    return results[0], results[1], results[2] * torch.nan, results[3]


def failure(*_: Any) -> tuple[Tensor, ...]:
    raise RuntimeError("the kernel broke,\n  and says so at length")


SABOTAGE = [
    (value, "output (argmax) is off by 1e-03 of its scale, 1e-05 is allowed"),
    (value_in_inference, "entropy (argmax) is off by 1e-03 of its scale, 1e-05 is allowed"),
    (gradient, "gradient of keys (argmax) is off by"),
    (path, "path (argmax) is off by"),
    (not_a_number, "log_prob (argmax) is off by nan"),
    (failure, "RuntimeError: the kernel broke, and says so at length"),
]


def sabotage(
    monkeypatch: pytest.MonkeyPatch, impl: str, dtype: torch.dtype, spoil: Callable[..., tuple[Tensor, ...]]
) -> None:
    """Spoil the results of a backend on their way out. Triton's interpreter, which is slow, is left out."""
    search = checks.search

    def spoiled(inputs: Any, chosen: str) -> Any:
        found = search(inputs, chosen)
        wrong = chosen == impl and inputs.keys.dtype == dtype
        return api.TreeAttention(*spoil(found, inputs.keys)) if wrong else found

    monkeypatch.setattr(checks, "search", spoiled)
    monkeypatch.setattr(checks, "BACKENDS", ("reference", "numba"))
    monkeypatch.setattr(checks, "device_names", lambda: ["cpu"])


@pytest.mark.parametrize(("spoil", "complaint"), SABOTAGE, ids=[spoil.__name__ for spoil, _ in SABOTAGE])
def test_a_backend_that_computes_wrongly_is_named_in_one_line(
    spoil: Callable[..., tuple[Tensor, ...]],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sabotage(monkeypatch, "numba", torch.float32, spoil)
    assert run_doctor() == 1
    output = capsys.readouterr().out
    assert line_of(output, "numba").split()[2] == "wrong" and complaint in line_of(output, "numba")
    assert line_of(output, "reference").split()[2] == "ok"
    assert output.splitlines()[-1] == "wrong: numba on cpu"


@pytest.mark.parametrize("spoil", [value, not_a_number])
def test_the_reference_does_not_vouch_for_itself(
    spoil: Callable[..., tuple[Tensor, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many branches as tokens it must be torch's own attention."""
    sabotage(monkeypatch, "reference", torch.float64, spoil)
    assert checks.judge(checks.flat_errors("cpu", torch.float64))[0] == ("wrong" if spoil is value else "ok")


def test_an_error_while_a_backend_is_looked_for_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "unavailable", failure)
    assert checks.check("numba", "cpu", lambda: checks.search_errors("numba", "cpu")).status == "wrong"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize("name", ["search_errors", "attention_errors", "building_errors"])
def test_triton_is_checked_in_its_interpreter_when_that_is_switched_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(checks, "TreePlan", lambda n, branch=2: TreePlan(min(n, 9), branch))  # the rest takes long
    arguments = ("triton", "cpu") if name == "search_errors" else ("cpu",)
    state = torch.get_rng_state()
    found = checks.check("triton", "cpu", lambda: getattr(checks, name)(*arguments))
    assert found.status == "ok" and torch.equal(torch.get_rng_state(), state), found


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_fused_tree_building_is_measured_against_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = pytest.importorskip("retreever.ops.aggregate.launch_triton")
    levels = launch.aggregate_triton

    def spoiled(nodes: Tensor, *rest: Any) -> None:
        levels(nodes, *rest)
        nodes[:, 0] *= 1.001

    monkeypatch.setattr(launch, "aggregate_triton", spoiled)
    found = checks.check("tree building", "cpu", lambda: checks.building_errors("cpu"))
    assert found.status == "wrong" and "nodes is off by" in found.detail, found


def test_without_triton_trees_are_built_in_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "unavailable", lambda *_: "triton is not there")
    found = checks.check("tree building", "cuda:0", lambda: checks.building_errors("cuda:0"))
    assert (found.status, found.detail) == ("not available", "triton is not there: trees are built in plain torch")


@pytest.mark.gpu
def test_everything_is_well_on_a_gpu() -> None:
    found = {(check.name, check.device): check for check in collect()}
    for name in ("reference", "triton", "attention", "tree building"):
        assert found[name, "cuda:0"].status == "ok", found[name, "cuda:0"]
    assert found["numba", "cuda:0"].status == "not available"


def test_facts_name_versions_devices_settings_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("NUMBA_SOMETHING", "7")
    monkeypatch.setenv("SECRET", "not for reports")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "later"))
    found = facts()
    assert found["versions"]["torch"] == torch.__version__ and {"python", "numpy", "numba"} <= found["versions"].keys()
    assert f"threads of torch: {torch.get_num_threads()}" in found["devices"]["cpu"]
    assert found["settings"]["OMP_WAIT_POLICY"].startswith("PASSIVE; modules then take")
    assert found["settings"]["NUMBA_SOMETHING"] == "7"
    assert found["folders"]["triton"] == f"{tmp_path / 'later'} (writable)" and "numba" in found["folders"]
    assert "not for reports" not in json.dumps(found)


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert installed.settings()["OMP_WAIT_POLICY"] == "not set"
    monkeypatch.setattr(installed, "PACKAGES", ("no-such-package-anywhere",))
    assert facts()["versions"]["no-such-package-anywhere"] == "not installed"
    (tmp_path / "file").touch()
    assert installed.folder(str(tmp_path / "file" / "cache")).endswith("(not writable: every process compiles anew)")


def test_accelerators_have_a_name_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    card = SimpleNamespace(name="Big Card", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    assert checks.device_names() == ["cpu", "cuda:0", "cuda:1"]
    assert facts()["devices"]["cuda:1"] == "Big Card, 80 GiB"
