"""A benchmark run: its device and options, and the JSON, Markdown and figure files it writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from retreever.arguments import check_int, reject
from retreever.checks import find_device
from retreever.errors import BackendError, InputError
from retreever.files import make_folder, os_errors, write_text
from retreever.lab.bench.figures import readable
from retreever.lab.bench.machine import describe, load_average, machine
from retreever.lab.bench.options import BenchOptions
from retreever.lab.bench.timing import Limits, Timing
from retreever.lab.tables import Table

Row = dict[str, Any]
Rows = list[Row]
_ENDINGS = ("json", "md", "png")


def check_different(argument: str, values: Sequence[object]) -> None:
    """There must be values, and all different: equal ones would count twice."""
    if not values or len(set(values)) < len(values):
        reject(argument, "at least one value, all different", " ".join(map(str, values)) or "none")


@dataclass(frozen=True)
class Run:
    """A running benchmark, made by `start`; `publish` writes its results."""

    name: str
    options: BenchOptions
    device: torch.device
    dtype: torch.dtype
    load: list[float] | None
    machine: dict[str, Any] = field(repr=False)

    @classmethod
    def start(cls, name: str, options: BenchOptions) -> Run:
        """Find the device, and raise `InputError` if result files exist already."""
        device = find_device(options.device)
        automatic = "float32" if device.type == "cpu" else "bfloat16"
        dtype = getattr(torch, automatic if options.dtype == "auto" else options.dtype)
        run = cls(name, options, device, dtype, load_average(), machine(device))
        taken = [str(run.file(ending)) for ending in _ENDINGS if run.file(ending).exists()]
        if taken and not options.overwrite:
            raise InputError(f"out: expected no earlier results, got {', '.join(taken)} (--overwrite replaces them)")
        with os_errors(options.out, "cannot be written"):
            make_folder(options.out)
        torch.manual_seed(0)
        return run

    @property
    def limits(self) -> Limits:
        """Limits on samples and time of one row."""
        samples, seconds = self.options.samples, self.options.seconds
        return Limits(min(samples, 11), min(seconds, 1.0)) if self.options.quick else Limits(samples, seconds)

    @property
    def dtype_name(self) -> str:
        """Name of the dtype, as in "float32"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def clock(self) -> str:
        """How calls are timed in mode "auto"."""
        return "CUDA graph" if self.device.type == "cuda" else "wall clock"

    def file(self, ending: str) -> Path:
        """The result file with that ending."""
        return self.options.out / f"{self.name}-{self.device.type}.{ending}"

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Random numbers on the device of the benchmark, in its dtype unless `dtype` is given."""
        return torch.randn(*shape, device=self.device, dtype=dtype or self.dtype)

    def publish(
        self, rows: Rows, tables: Sequence[Table], draw: Callable[[Path], object] | None, summary: Mapping[str, Any]
    ) -> None:
        """Print the tables and write all files, each atomically; without `draw` there is no figure."""
        console = Console(width=None if sys.stdout.isatty() else 180)
        for table in tables:
            console.print(table.to_rich())
        self.save(rows, summary)
        picture, written = f"![{self.name}]({self.file('png').name})\n", list(_ENDINGS)
        try:
            if draw is None:
                picture, written = "", written[:-1]
            else:
                draw(self.file("png"))
        except BackendError as error:  # no matplotlib: write the numbers without a figure
            print(f"no figure: {error}", file=sys.stderr)
            picture, written = "", written[:-1]
        body = "\n".join(table.to_markdown() for table in tables)
        write_text(self.file("md"), f"{body}\n{picture}".rstrip() + "\n")
        print(f"written: {', '.join(str(self.file(ending)) for ending in written)}")

    def save(self, rows: Rows, summary: Mapping[str, Any]) -> None:
        """Write the rows alone, atomically: what a long benchmark has so far."""
        write_text(self.file("json"), json.dumps(self._to_json(rows, summary), indent=1) + "\n")

    def footer(self) -> str:
        """One line on the machine and how times were measured."""
        load = "" if self.load is None else f"; load {self.load[0]:.1f} at the start"
        return f"{describe(self.machine)}; medians of up to {self.limits.samples} samples taken in turn{load}"

    def _to_json(self, rows: Rows, summary: Mapping[str, Any]) -> dict[str, Any]:
        options = {name: value for name, value in asdict(self.options).items() if not isinstance(value, Path)}
        return {
            "benchmark": self.name,
            "device": self.device.type,
            "dtype": self.dtype_name,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": self.machine,
            "load_average": {"start": self.load, "end": load_average()},
            "options": options,
            "summary": dict(summary),
            "rows": rows,
        }


def check_sizes(name: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes, sorted; raises `InputError` unless there is at least one and all are positive."""
    if not sizes:
        reject(name, "at least one size", sizes)
    for size in sizes:
        check_int(name, size, 1)
    return tuple(sorted(set(sizes)))


def progress(where: str, timings: Mapping[str, Timing]) -> None:
    """Print one line on stderr for a row, to show progress."""
    found = ", ".join(f"{readable(timing.seconds, 'seconds')} {name}" for name, timing in timings.items())
    print(f"{where}: {found}", file=sys.stderr, flush=True)


def timed(timings: Mapping[str, Timing], **where: Any) -> Rows:
    """One JSON row per method."""
    return [{**where, "method": name, **timing.to_json()} for name, timing in timings.items()]


def quantity(value: float | None) -> str | None:
    """A number with about three digits and thousands separators."""
    if value is None:
        return None
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}" if value >= 10 else f"{value:.2f}"


def times(value: float | None) -> str | None:
    """A ratio, as in "12x"."""
    return None if value is None else f"{quantity(value)}x"
