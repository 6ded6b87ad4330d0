"""Tables that `retreever results` puts into the README and the pages in docs, from the files of benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retreever.errors import ConfigError
from retreever.files import write_text
from retreever.lab.bench.budget_tables import budget_table
from retreever.lab.bench.figures import BUDGET, FULL, TREE
from retreever.lab.bench.report import quantity, times
from retreever.lab.tables import Cell, Table, number, percent
from retreever.train.run import read_json

Bench = dict[str, Any]  # JSON of a benchmark
DEVICES = ("cuda", "cpu")
QUERIES = 256  # of the table on speed
PARTS: dict[str, tuple[str, ...]] = {
    "module": (TREE, FULL),
    "compiled module": (TREE, FULL),
    "operator": (TREE, BUDGET, FULL),
}
TITLES = {TREE: "tree", BUDGET: "4x tokens", FULL: "all tokens"}
FASTER = {TREE: "faster", BUDGET: "4x tokens, faster"}
READ = (80, 110, 160, 228)  # vectors, of the table on conversion
TREE_ORDERED, TOP = "tree, order of keys", "exact top-k"
KINDS = ("as trained", "soft", "peaked")


def put_blocks(page: Path, blocks: Mapping[str, str]) -> None:
    """Replace the text between the marks of every block in a page; blocks without marks there are left out."""
    before = text = page.read_text(encoding="utf-8") if page.exists() else ""
    for name, block in blocks.items():
        start, end = marks(name)
        head, found, rest = text.partition(start)
        _, closed, tail = rest.partition(end)
        if found and closed:
            text = f"{head}{start}\n{block}\n{end}{tail}"
    if text != before:
        write_text(page, text, ConfigError)


def marks(name: str) -> tuple[str, str]:
    """The lines that begin and end a block."""
    return f"<!-- {name}: made by `retreever results` -->", f"<!-- end of {name} -->"


def bench_blocks(folder: Path, link: str) -> dict[str, str]:
    """Blocks on speed, budgets, conversion and growing trees from the files in `folder`, which a page links as `link`.

    Those on budgets and conversion are of a GPU where there is such a file, and have its figure.
    """
    blocks = {}
    speed = [speed_table(read_json(file)).to_markdown() for file in _files(folder, "attention")]
    if speed:
        blocks["speed"] = "\n".join(speed)
    for name, stem, make in (("budgets", "budgets", dial_table), ("conversion", "rivals", conversion_table)):
        for file in _files(folder, stem)[:1]:
            blocks[name] = f"{make(read_json(file)).to_markdown()}\n![{name}]({link}/{file.stem}.png)\n"
    grown = [file.with_suffix(".md").read_text(encoding="utf-8") for file in _files(folder, "grow")]
    if grown:
        blocks["growing"] = "\n".join(grown).replace("](grow-", f"]({link}/grow-")
    if (folder / "stream.json").exists():
        blocks["stream"] = stream_table(read_json(folder / "stream.json")).to_markdown()
    return blocks


def stream_table(found: Bench) -> Table:
    """The stream of examples/stream.py: time of a step and errors between doublings of its length."""
    names = ("tree", "linear", "last value")
    lines = tuple(
        (f"{r['points']:,}", number(r["ms"], 3), *(number(r[name], 4) for name in names)) for r in found["rows"]
    )
    load = "" if found["load"] is None else f"; load {found['load'][0]:.1f} at the start"
    notes = (
        "step: one prediction and one append; errors: mean absolute ones in metres, of the points since the line above",
        "linear: least squares on the same window of 8 steps; 494,580 points are one pass over all series",
        f"seed {found['seed']}; {found['updates']} steps of training; {found['machine']}{load}",
    )
    columns = ("points", "step, ms", "tree", "linear", "last value")
    return Table("A stream, point by point", columns, lines, notes)


def dial_table(bench: Bench) -> Table:
    """Score against tokens read."""
    return budget_table(bench["rows"])


def speed_table(bench: Bench) -> Table:
    """Microseconds of a call with 256 queries: the module, the module compiled, the operator alone."""
    us = {(r["part"], r["n"], r["method"]): r.get("us") for r in bench["rows"] if r["m"] == QUERIES}
    lines = [_speed_line(us, n) for n in sorted({n for part, n, _ in us if part in PARTS})]
    titles = [title for title in lines[0] if any(line[title] for line in lines)]
    machine = bench["machine"]
    where = machine["accelerator"] or f"{machine['processor']}, {machine['threads']} threads"
    rows = tuple(tuple(line[title] for title in titles) for line in lines)
    return Table(f"Microseconds per call of {QUERIES} queries: {where}, {bench['dtype']}", tuple(titles), rows)


def _speed_line(us: Mapping[tuple[str, int, str], float | None], n: int) -> dict[str, Cell]:
    """Times over a context of `n` tokens, and how much faster than all tokens; None where a method was not timed."""
    line: dict[str, Cell] = {"n": f"{n:,}"}
    for part, methods in PARTS.items():
        taken = {method: us.get((part, n, method)) for method in methods}
        line |= {f"{part}, {TITLES[method]}": quantity(value) for method, value in taken.items()}
        for method in methods[:-1]:
            slow, fast = taken[FULL], taken[method]
            line[f"{part}, {FASTER[method]}"] = times(slow / fast) if slow and fast else None
    return line


def conversion_table(bench: Bench) -> Table:
    """Attention trained without a tree, read by a tree and by exact top-k."""
    found = {(r["n"], r["budget"], r["method"]): r for r in bench["rows"] if r["part"] == "fields"}
    keys = {kind: f"error, {kind}" for kind in KINDS} | {"RMSE": "rmse_ratio"}
    lines: list[tuple[Cell, ...]] = []
    for n, budget in sorted({key[:2] for key in found if key[1] in READ}):
        pair = [found[n, budget, method] for method in (TREE_ORDERED, TOP)]
        cells = [number(row[key], 2 if key == "rmse_ratio" else 4) for key in keys.values() for row in pair]
        lines.append((f"{n:,}", budget, percent(budget / n, 2), *cells))
    columns = [f"{kind}: {name}" for kind in keys for name in ("tree", "top-k")]
    notes = (
        "as trained, soft (all scores times 1/4) and peaked (times 3): relative error of the output of the attention",
        "RMSE: error of the predictions, as a multiple of that of all tokens",
        f"{bench['device']}; the tree has the order of the keys; exact top-k scores all tokens",
    )
    return Table("Attention trained without a tree", ("n", "read", "of n", *columns), tuple(lines), notes)


def _files(folder: Path, stem: str) -> list[Path]:
    """Files of a benchmark, that of a GPU first."""
    return [file for device in DEVICES if (file := folder / f"{stem}-{device}.json").exists()]
