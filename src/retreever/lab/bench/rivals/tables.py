"""Tables and figure of `retreever bench rivals`, from its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from retreever.lab.bench.report import Row, Rows, Run, quantity
from retreever.lab.bench.rivals import models
from retreever.lab.bench.rivals.attention import ALL, ALL_HALF, FLAT, HNSW_, IVF_, KINDS, TREE_KD, TREE_KEYS, methods_in
from retreever.lab.figures.style import PALETTE, STYLE, clean, legend_below, new_panels, save
from retreever.lab.tables import Cell, Table, number, percent

TICKS = (20, 50, 100, 200, 500)


def make_tables(run: Run, rows: Rows, summary: Mapping[str, Any]) -> list[Table]:
    """All tables."""
    fields = [row for row in rows if row["part"] == "fields"]
    apart = [row for row in fields if row["method"] != FLAT]  # finds the same as exact top-k
    left = tuple(f"left out: {name}: {reason}" for name, reason in summary["left_out"].items())
    m, trained = run.options.queries, summary["training"]  # type: ignore[attr-defined]
    stages = ", ".join(f"{s:,} steps at {p:,} points" for s, p in zip(trained["steps"], trained["points"], strict=True))
    known = [
        f"n = {a['n']:,}: all tokens have RMSE {a['rmse']:.4f}; the weights of a query are those of "
        + ", ".join(f"{tokens:,.0f} equal tokens ({kind})" for kind, tokens in a["effective_tokens"].items())
        for a in summary["fields"]
    ]
    tables = [
        _by_budget("Fields: RMSE against the truth, times that of all tokens", apart, _cell("rmse_ratio", 3),
                   (f"trained without a tree: {stages}, {trained['seconds']:g} s on {trained['device']}",
                    *known, "best blocks are whole blocks of 64: 64, 128 or 192 where the budget is more")),
        *(_by_budget(f"Fields, attention {kind}: relative error of its output", apart, _cell(f"error, {kind}", 4),
                     (f"all scores times {factor:g}",)) for kind, factor in KINDS.items()),
        _by_budget("Fields: keys scored per query and head", apart, lambda row: f"{row['scored']:,.0f}"),
        _by_budget(f"Fields: ms per call of {m:,} queries", fields, _milliseconds("us"), (run.footer(), "float32")),
        _builds(fields),
    ]  # fmt: skip
    scores, times = _model_scores(rows), _model_times(run, rows)
    return [*tables, *([Table(*scores, left)] if scores[2] else []), *([times] if times.rows else [])]


def _by_budget(title: str, rows: Rows, cell: Callable[[Row], Cell], notes: tuple[str, ...] = ()) -> Table:
    """A line per context size and budget, a column per method."""
    found = {(row["n"], row["budget"], row["method"]): row for row in rows}
    names = methods_in(rows)
    lines: list[tuple[Cell, ...]] = []
    for n, budget in sorted({(row["n"], row["budget"]) for row in rows}):
        cells = [cell(row) if (row := found.get((n, budget, name))) else None for name in names]
        lines.append((f"{n:,}", budget, percent(budget / n, 2), *cells))
    return Table(title, ("n", "read", "of n", *names), tuple(lines), notes)


def _cell(key: str, digits: int) -> Callable[[Row], Cell]:
    return lambda row: number(row[key], digits)


def _milliseconds(key: str) -> Callable[[Row], Cell]:
    return lambda row: quantity(row[key] / 1e3) if key in row else None


def _builds(rows: Rows) -> Table:
    """Time to prepare a context; methods that prepare for one budget have that of the largest."""
    names = methods_in(rows)
    built = {(row["n"], row["method"]): row["build_us"] for row in rows if "build_us" in row}
    lines = [
        (f"{n:,}", *(quantity(built[n, name] / 1e3) if (n, name) in built else None for name in names))
        for n in sorted({row["n"] for row in rows})
    ]
    notes = ("from projected keys and values to what `read` needs; flat clusters: for the largest budget",)
    return Table("Fields: ms to prepare a context", ("n", *names), tuple(lines), notes)


def _model_scores(rows: Rows) -> tuple[str, tuple[str, ...], tuple[tuple[Cell, ...], ...]]:
    """Scores of the weights in the package."""
    found = [row for row in rows if row["part"] == "models"]
    score = {(row["weights"], row["test"], row["budget"], row["method"]): row for row in found}
    names = [name for name in methods_in(found) if name != models.ALL]
    lines: list[tuple[Cell, ...]] = []
    for weights, test, budget in dict.fromkeys(key[:3] for key in score if key[2]):
        at = [score[weights, test, budget, name] for name in names]
        full = score[weights, test, 0, models.ALL]
        digits = 2 if "%" in full["metric"] else 3
        scored = f"{at[0]['scored']:.1f} / {at[1]['scored']:.1f}"
        lines.append((
            weights, test, budget, f"{at[0]['read']:.1f}", scored,
            *(number(row["score"], digits) for row in at), number(full["score"], digits),
        ))  # fmt: skip
    columns = ("weights", "test", "budget", "read", "scored: tree / top-k", *names, models.ALL)
    return "Weights in the package: test scores, larger is better", columns, tuple(lines)


def _model_times(run: Run, rows: Rows) -> Table:
    """Times over the largest context of every task."""
    found = [row for row in rows if row["part"] == "model times"]
    us = {(row["weights"], row["n"], row["m"], row["budget"], row["method"]): row["us"] for row in found}
    names = [name for name in methods_in(found) if name != models.BUILD]
    lines: list[tuple[Cell, ...]] = []
    for weights, n, m, budget in dict.fromkeys(key[:4] for key in us if key[3]):
        taken = [us[weights, n, m, budget, name] for name in names] + [us[weights, n, m, 0, models.BUILD]]
        lines.append((weights, n, m, budget, *map(quantity, taken)))
    title = "Weights in the package: µs to read the largest context once, and to build its tree"
    return Table(title, ("weights", "n", "queries", "budget", *names, models.BUILD), tuple(lines), (run.footer(),))


def draw_rivals(run: Run, rows: Rows, file: Path) -> Path:
    """Draw relative errors against vectors read: a panel per context size and kind."""
    fields = [row for row in rows if row["part"] == "fields" and row["method"] not in (ALL, ALL_HALF, FLAT)]
    names = methods_in(fields)
    places = [(n, kind) for n in sorted({row["n"] for row in fields}) for kind in KINDS]
    figure, panels, leftmost = new_panels(len(places), titled=True)
    handles: dict[str, Any] = {}
    for axis, (n, kind) in zip(panels, places, strict=True):
        for index, name in enumerate(names):
            points = [
                (r["read"], max(1e-6, r[f"error, {kind}"])) for r in fields if r["n"] == n and r["method"] == name
            ]
            tree = name in (TREE_KD, TREE_KEYS)
            look: dict[str, Any] = {"lw": 2.4 if tree else 1.4, "marker": "o", "ms": 3.5, "label": name}
            dashed = index >= len(PALETTE) or name in (IVF_, HNSW_)  # the latter lie on exact top-k
            look |= {"color": PALETTE[index % len(PALETTE)], "ls": "--" if dashed else "-"}
            handles[name] = axis.plot([x for x, _ in points], [y for _, y in points], **look)[0]
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.minorticks_off()
        axis.set_xticks(TICKS, map(str, TICKS))
        axis.set_title(f"n = {n:,}, {kind}", fontsize=10.5, color=STYLE["ink"])
        clean(axis, "vectors read per query and head")
    for axis in leftmost:
        axis.set_ylabel("relative error", color=STYLE["ink"])
    legend_below(figure, list(handles.values()))
    return save(figure, file, f"Attention trained without a tree, read by other means ({run.device.type})")
