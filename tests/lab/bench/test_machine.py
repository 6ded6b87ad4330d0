"""Every result says what it was measured on."""

from __future__ import annotations

import json

import pytest
import torch

from retreever.checks import find_device
from retreever.errors import BackendError, InputError
from retreever.lab.bench.machine import describe, load_average, machine
from retreever.version import __version__


def test_the_machine_is_plain_json_with_versions() -> None:
    facts = json.loads(json.dumps(machine()))
    assert facts["processor"] and facts["cores"] >= 1 and facts["threads"] == torch.get_num_threads()
    assert (facts["torch"], facts["retreever"], facts["accelerator"]) == (torch.__version__, __version__, None)
    assert {"python", "triton", "numba", "system"} <= facts.keys()


def test_settings_that_change_times_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    environment = machine()["environment"]
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE" and "OMP_NUM_THREADS" not in environment


def test_a_missing_package_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import PackageNotFoundError

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("retreever.lab.bench.machine.version", missing)
    facts = machine()
    assert facts["triton"] is None and facts["numba"] is None
    assert "triton" not in describe(facts) and torch.__version__ in describe(facts)


def test_load_has_three_numbers_or_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    found = load_average()
    assert found is None or len(found) == 3
    monkeypatch.delattr("os.getloadavg", raising=False)
    assert load_average() is None


def test_devices_are_found_by_name() -> None:
    assert find_device("cpu") == torch.device("cpu")
    assert find_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_unknown_and_absent_devices_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"^device: expected .* got 'abacus'$"):
        find_device("abacus")
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    with pytest.raises(BackendError, match=r"^device: cuda is not available here, only cpu$"):
        find_device("cuda")
    assert find_device("auto").type == "cpu"
