"""Table and figure of `retreever bench budgets`, from its rows."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from retreever.lab.figures.style import PALETTE, STYLE, clean, legend_below, new_panels, room_between, save
from retreever.lab.figures.tables import axis_limits, ticks_of
from retreever.lab.tables import Cell, Table, number, plus_minus

PATH, ALL = "one path", "all"
OTHER = "Transformer + CA"
Row = dict[str, Any]


def by_test(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows of every test of all weights, those that read less first."""
    return {key: list(found) for key, found in groupby(rows, key=lambda row: (row["weights"], row["test"]))}


def drops(rows: list[Row]) -> list[Row]:
    """For every test, how far a score lies below one of a smaller budget at most, and whether that is "worse".

    "Worse" is more than 0.003, or 0.1 points of accuracy.
    """
    found = []
    for (weights, test), readings in by_test(rows).items():
        scores = [row["score"] for row in readings]
        drop = max(max(scores[: index + 1]) - score for index, score in enumerate(scores))
        found.append({"weights": weights, "test": test, "drop": drop, "worse": drop > _tolerance(readings[0])})
    return found


def budget_table(rows: list[Row]) -> Table:
    """A line per test, a column per reading: the score and, in brackets, the tokens read on average."""
    names = list(dict.fromkeys(row["reading"] for row in rows if row["reading"] != ALL))
    lines: list[tuple[Cell, ...]] = []
    for ((weights, test), readings), drop in zip(by_test(rows).items(), drops(rows), strict=True):
        digits = _digits(readings[0])
        shown = {row["reading"]: f"{number(row['score'], digits)} ({row['tokens']:.1f})" for row in readings}
        other = plus_minus(readings[0]["all_tokens"], readings[0]["all_tokens_std"], digits)
        fallen = f"{number(drop['drop'], digits)}{', WORSE' if drop['worse'] else ''}"
        lines.append((f"{weights}, {test}", *(shown.get(name) for name in (*names, ALL)), other, fallen))
    hardware = ", ".join(dict.fromkeys(row["hardware"] for row in rows))
    data = ", ".join(dict.fromkeys((row["data"] or "not named").partition(":")[0] for row in rows))
    return Table(
        "Score with the same weights, and tokens read per query on average",
        ("weights, test", *names, ALL, OTHER, "largest drop"),
        tuple(lines),
        (
            "log-likelihood per target; accuracy in % for activity and copy",
            "2x: a budget of twice the tokens of one path over the task's largest context; shorter contexts read less",
            f"{OTHER}: our own model with cross attention over all tokens (copy task: no encoder), over its seeds",
            "largest drop: how far a score lies below that of a smaller budget; "
            "WORSE: by more than 0.003, or 0.1 points of accuracy",
            f"{hardware}; data: {data}",
        ),
    )


def draw_budgets(rows: list[Row], file: Path) -> Path:
    """Draw score against tokens read, a panel per test; the dashed line is cross attention over all tokens."""
    tests = by_test(rows)
    figure, panels, _ = new_panels(len(tests), titled=True)
    handles: dict[str, Any] = {}
    for axis, ((weights, test), readings) in zip(panels, tests.items(), strict=True):
        tokens, scores = ([row[key] for row in readings] for key in ("tokens", "score"))
        look: dict[str, Any] = {"color": PALETTE[0], "marker": "o", "ms": 5, "lw": 2, "label": "ReTreever, one model"}
        handles["tree"] = axis.plot(tokens, scores, **look)[0]
        first = readings[0]
        if first["all_tokens"] is not None:
            look = {"color": PALETTE[3], "ls": "--", "lw": 1.5, "label": f"{OTHER}, ± standard deviation over seeds"}
            handles["other"] = axis.axhline(first["all_tokens"], **look)
            spread = first["all_tokens_std"] or 0.0
            axis.axhspan(first["all_tokens"] - spread, first["all_tokens"] + spread, color=PALETTE[3], alpha=0.12, lw=0)
        clean(axis, "tokens read per query, on average")
        axis.set_xscale("log")
        axis.set_xlim(*axis_limits(tokens))
        ticks = ticks_of(tokens)
        axis.set_xticks(ticks, [f"{tick:.{int(tick < 10)}f}" for tick in ticks])
        axis.minorticks_off()
        axis.margins(y=0.12)
        axis.set_ylim(*room_between(*axis.get_ylim()))
        axis.set_ylabel(first["metric"], color=STYLE["ink"])
        axis.set_title(f"{weights}, {test}", fontsize=10.5, color=STYLE["ink"])
    legend_below(figure, list(handles.values()))
    return save(figure, file, "Score against tokens read: one path, budgets, all leaves")


def _tolerance(row: Row) -> float:
    return 0.1 if "%" in row["metric"] else 0.003


def _digits(row: Row) -> int:
    return 2 if "%" in row["metric"] else 3
