"""Tables and figure of `retreever bench jobs`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from retreever.lab.bench import figures
from retreever.lab.bench.jobs.training import ALL, PERCEIVER
from retreever.lab.bench.report import Row, Rows, Run, quantity
from retreever.lab.tables import Cell, Table, percent, plus_minus


def job_tables(run: Run, found: Rows, left: Mapping[str, str]) -> list[Table]:
    """One table per job."""
    tables, seconds = [], run.options.seconds
    for job in dict.fromkeys(row["job"] for row in found):
        rows = [row for row in found if row["job"] == job]
        better = "smaller is better" if rows[0]["smaller"] else "larger is better"
        title = f"{job}: {rows[0]['measure']} ({better}), {rows[0]['n']:,} tokens, {seconds:g} s of training"
        dense = any("likelihood" in row for row in rows)
        measures = (rows[0]["measure"], "/ all tokens", *(["log-likelihood"] if dense else []))
        columns = ("method", *measures, "tokens read", "of all", "us a query", "steps", "seeds")
        tables.append(Table(title, columns, tuple(_line(row, dense) for row in rows)))
    notes = (
        "mean ± standard deviation over seeds; data are made outside the time of training",
        f"/ {ALL}: over the same seeds",
        f"{ALL}: cross attention as nn.MultiheadAttention computes it; us a query: contexts prepared",
        *(f"left out: {name}: {reason}" for name, reason in left.items()),
        run.footer(),
    )
    last = tables[-1]
    return [*tables[:-1], Table(last.title, last.columns, last.rows, notes)]


def _line(row: Row, likelihood: bool) -> tuple[Cell, ...]:
    digits = 4 if row["smaller"] else 1
    ratio = f"{row['ratio']:.2f}" if "ratio" in row else None
    tokens = row.get("tokens")
    return (
        row["method"],
        plus_minus(row["score"], row["std"], digits),
        ratio,
        *([f"{row['likelihood']:.3f}" if "likelihood" in row else None] if likelihood else []),
        None if tokens is None else f"{tokens:,.0f}",
        None if tokens is None else percent(tokens / row["n"], 2),
        quantity(row.get("us")),
        None if "steps" not in row else f"{row['steps']:,.0f}",
        row["seeds"] if "steps" in row else None,
    )


def draw_jobs(run: Run, found: Rows, file: Path) -> Path:
    """Draw bars of scores, a panel per job."""
    colours = {ALL: figures.FULL, PERCEIVER: figures.PERCEIVER}
    groups = {}
    for job in dict.fromkeys(row["job"] for row in found):
        rows = [row for row in found if row["job"] == job]
        usual = {row["method"]: figures.REFERENCE for row in rows if "tokens" not in row}
        look = {row["method"]: colours.get(row["method"], usual.get(row["method"], figures.TREE)) for row in rows}
        title = f"{job}: {rows[0]['measure']}, {'shorter' if rows[0]['smaller'] else 'longer'} is better"
        groups[title] = {row["method"]: (row["score"], look[row["method"]]) for row in rows}
    where = run.machine["accelerator"] or run.machine["processor"]
    return figures.draw_bars(groups, file, f"Real jobs, trained for the same time, {where}", "score")
