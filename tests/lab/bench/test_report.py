"""Results reach the disk whole, never over earlier ones, and read well."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from retreever.errors import BackendError, InputError, RetreeverError
from retreever.lab.bench.figures import TREE, Panel, draw_bars, draw_panels, readable, short
from retreever.lab.bench.options import AttentionBench, BenchOptions, BuildBench, MemoryBench, TrainBench
from retreever.lab.bench.report import Run, check_sizes, quantity, times
from retreever.lab.tables import Table

TABLE = Table("Times", ("n", "us"), (("256", "1.5"),))


def options(out: Path, **others: Any) -> BenchOptions:
    return BenchOptions(out=out, device="cpu", **others)


def draw(file: Path) -> Path:
    """The simplest figure."""
    return draw_panels([[Panel("", {TREE: [(8, 1e-6), (16, 2e-6)]})]], file, "title", "seconds")


def publish(run: Run) -> None:
    run.publish([{"n": 256, "us": 1.5}], [TABLE], draw, {"best": 1})


def test_json_markdown_and_figure_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(Run.start("demo", options(tmp_path / "new" / "folder")))
    folder = tmp_path / "new" / "folder"
    assert sorted(file.name for file in folder.iterdir()) == ["demo-cpu.json", "demo-cpu.md", "demo-cpu.png"]
    result = json.loads((folder / "demo-cpu.json").read_text())
    assert result["rows"] == [{"n": 256, "us": 1.5}] and result["summary"] == {"best": 1}
    assert result["device"] == "cpu" and result["dtype"] == "float32"
    assert "samples" in result["options"] and str(tmp_path) not in json.dumps(result)  # results are passed on
    assert result["machine"]["torch"] and set(result["load_average"]) == {"start", "end"}
    text = (folder / "demo-cpu.md").read_text()
    assert "| 256 |" in text and "](demo-cpu.png)" in text
    assert "Times" in capsys.readouterr().out


@pytest.mark.parametrize("ending", ["json", "md", "png"])
def test_earlier_results_are_kept_unless_told_otherwise(tmp_path: Path, ending: str) -> None:
    """It is said before any time is spent, in one line."""
    earlier = tmp_path / f"demo-cpu.{ending}"
    earlier.write_text("earlier")
    with pytest.raises(InputError, match=r"^out: expected no earlier results, got .* \(--overwrite replaces them\)$"):
        Run.start("demo", options(tmp_path))
    assert earlier.read_text() == "earlier"
    publish(Run.start("demo", options(tmp_path, overwrite=True)))
    assert earlier.read_bytes() != b"earlier"


def test_other_benchmarks_in_the_folder_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "other-cpu.json").write_text("{}")
    (tmp_path / "demo-cuda.json").write_text("{}")
    Run.start("demo", options(tmp_path))


def test_without_matplotlib_the_numbers_are_still_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(width: float, height: float) -> None:
        raise BackendError("figures need matplotlib")

    monkeypatch.setattr("retreever.lab.bench.figures.new_figure", missing)
    publish(Run.start("demo", options(tmp_path)))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["demo-cpu.json", "demo-cpu.md"]
    assert "png" not in (tmp_path / "demo-cpu.md").read_text()
    assert "no figure: figures need matplotlib" in capsys.readouterr().err


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, target: object) -> None:
        raise OSError("no space left on device")

    run = Run.start("demo", options(tmp_path))
    monkeypatch.setattr("os.replace", full)
    with pytest.raises(RetreeverError, match=r"demo.*cannot be written: no space"):
        publish(run)
    assert list(tmp_path.iterdir()) == []


def test_quick_means_few_samples(tmp_path: Path) -> None:
    slow, quick = (Run.start("demo", options(tmp_path, quick=quick)).limits for quick in (False, True))
    assert quick.samples < slow.samples and quick.seconds < slow.seconds


def test_options_load_without_torch() -> None:
    """The command line must answer --help at once."""
    code = "import sys, retreever.lab.bench.options; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("kind", [AttentionBench, BuildBench, MemoryBench, TrainBench])
def test_defaults_are_explained(kind: type[BenchOptions]) -> None:
    assert kind.__doc__ and callable(kind.run) and kind().out == Path("runs/bench")  # type: ignore[attr-defined]


def test_sizes_are_checked_and_sorted() -> None:
    assert check_sizes("n", (16, 8, 16)) == (8, 16)
    for wrong in ((), (0,), (8, -1)):
        with pytest.raises(InputError, match=r"^n: expected "):
            check_sizes("n", wrong)


def test_numbers_are_readable() -> None:
    assert [quantity(value) for value in (0.123, 12.34, 123.4, 12345.6, None)] == [
        "0.12",
        "12.3",
        "123",
        "12,346",
        None,
    ]
    assert times(1690.4) == "1,690x" and times(None) is None
    assert [readable(s, "seconds") for s in (5e-7, 1e-6, 0.0012, 2.0)] == ["0.5 µs", "1 µs", "1.2 ms", "2 s"]
    assert [readable(b, "bytes") for b in (512, 2048, 1023 * 1024, 3 * 2**30)] == [
        "512 B", "2 KiB", "1,023 KiB", "3 GiB",
    ]  # fmt: skip
    assert [short(n) for n in (256, 4096, 2**20)] == ["256", "4k", "1M"]


def test_bars_are_drawn(tmp_path: Path) -> None:
    file = draw_bars({"N = 64": {"TCA": (1.0, TREE)}}, tmp_path / "bars.png", "title", "ms")
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
