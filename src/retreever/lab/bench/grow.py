"""Time to add one token to a tree, compared with building the tree anew and with encoding all tokens again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from retreever.attention import TreeCrossAttention
from retreever.growing import FOLD
from retreever.lab.bench.figures import APPENDS, ENCODE, FOLDS, REBUILDS, Panel, draw_panels, lines_of
from retreever.lab.bench.options import GrowBench
from retreever.lab.bench.report import Row, Rows, Run, check_sizes, progress, quantity, timed, times
from retreever.lab.bench.timing import Call, Mode, synchronize, time_together
from retreever.lab.tables import Table
from retreever.nn.blocks import self_attention_block
from retreever.tree.aggregate import AGGREGATORS, Aggregator
from retreever.tree.value import Tree

SIZES, QUICK = (4096, 65536, 1 << 20), (256, 4096)
LARGEST_ENCODED = 1 << 14  # tokens: a layer of self-attention takes time that grows with their square


def measure(options: GrowBench) -> None:
    """Run the benchmark and write its files."""
    run = Run.start("grow", options)
    sizes = check_sizes("n", options.n or (QUICK if options.quick else SIZES))
    run = replace(run, options=replace(options, n=sizes))
    modules = {kind: module_of(run, options, kind) for kind in AGGREGATORS}
    with torch.inference_mode():
        rows = [row for n in sizes for kind in AGGREGATORS for row in append_rows(run, modules[kind], kind, n)]
        rows += [row for n in sizes if n <= LARGEST_ENCODED for row in encode_rows(run, options, n)]
        length = min(options.stream, 2_000) if options.quick else options.stream
        streams = [row for kind in AGGREGATORS for row in stream_rows(run, modules[kind], kind, length)]
    tables = append_table(run, options, rows), fold_table(rows), stream_table(streams)
    run.publish(rows + streams, tables, partial(draw_grow, run, rows), {"faster": _ratios(rows)})


def module_of(run: Run, options: GrowBench, kind: Aggregator) -> TreeCrossAttention:
    """The module whose trees grow."""
    module = TreeCrossAttention(options.dim, options.heads, options.branch, aggregator=kind)
    return module.to(run.device, run.dtype).eval()


def append_rows(run: Run, module: TreeCrossAttention, kind: Aggregator, n: int) -> Rows:
    """Rows of an append, eager and as a CUDA graph, of a build over all tokens, and of folding in what lies beside."""
    context = run.randn(1, n, module.block.kdim)
    tree = module.build(context, capacity=2 * n)
    append = append_call(module, tree, run.randn(1, 1, module.block.kdim))
    methods: dict[str, Sequence[Call]] = {
        APPENDS[kind, "eager"]: [append],
        REBUILDS[kind]: [partial(module.build, context)],
    }
    rows = _timed(run, methods, "eager", n)
    if run.device.type == "cuda":
        rows += _timed(run, {APPENDS[kind, "graph"]: [append]}, "graph", n)
    del tree, append, methods  # a million tokens take gigabytes
    beside = max(1, int(FOLD * n))
    both = module.append(module.build(context), run.randn(1, beside, module.block.kdim))
    folds = _timed(run, {FOLDS[kind]: [partial(module.fold, both)]}, "eager", n)
    return rows + [{**row, "tokens": beside, "us_per_token": row["us"] / beside} for row in folds]


def append_call(module: TreeCrossAttention, tree: Tree, token: Tensor) -> Call:
    """A call that appends in place and then forgets that it did, so that all calls do the same."""

    def append() -> None:
        grown = module.append(tree, token, in_place=True)
        assert grown.length is not None
        grown.length.sub_(1)

    return append


def encode_rows(run: Run, options: GrowBench, n: int) -> Rows:
    """Rows of one layer of self-attention over all tokens, which an encoder that mixes all of them must run again."""
    layer = self_attention_block(options.dim, options.heads, 2 * options.dim, "pre", 0.0)
    layer = layer.to(run.device, run.dtype).eval()
    tokens = run.randn(1, n, options.dim)
    return _timed(run, {ENCODE: [partial(layer, tokens, tokens)]}, "eager", n)


def stream_rows(run: Run, module: TreeCrossAttention, kind: Aggregator, length: int) -> Rows:
    """Rows of a stream appended token by token: time per append between powers of four, growth of the tree included.

    The last row has the bytes of the tree, and of one built at once.
    """
    tree = module.build(run.randn(1, 1, module.block.kdim), capacity=1)
    rows: Rows = []
    done, end = 1, 4
    while done < length:
        stop = min(end, length)
        started = perf_counter()
        tokens = run.randn(1, min(stop - done, 4096), module.block.kdim)
        for place in range(stop - done):
            at = place % tokens.shape[1]
            tree = module.append(tree, tokens[:, at : at + 1], in_place=True)
        synchronize(run.device)
        seconds = (perf_counter() - started) / (stop - done)
        rows.append({"part": "stream", "method": APPENDS[kind, "eager"], "n": stop, "us": 1e6 * seconds})
        done, end = stop, 4 * end
    built = module.build(run.randn(1, length, module.block.kdim))
    if rows:
        rows[-1] |= {"bytes": tree_bytes(tree), "built_bytes": tree_bytes(built)}
    return rows


def tree_bytes(tree: Tree) -> int:
    """Bytes of all tensors of a tree."""
    parts: list[Any] = [getattr(tree, part.name) for part in fields(tree)]
    return sum(part.numel() * part.element_size() for part in parts if isinstance(part, Tensor))


def append_table(run: Run, options: GrowBench, rows: Rows) -> Table:
    """Table of microseconds of an append, and of what it saves."""
    found = {(row["n"], row["method"]): row["us"] for row in rows}
    lines = []
    for n in sorted({row["n"] for row in rows}):
        for kind in AGGREGATORS:
            append, rebuild = found[n, APPENDS[kind, "eager"]], found[n, REBUILDS[kind]]
            graph = found.get((n, APPENDS[kind, "graph"]))
            encode = found.get((n, ENCODE))
            cells = (quantity(append), quantity(graph), quantity(rebuild), times(rebuild / append), quantity(encode))
            lines.append((f"{n:,}", kind, *cells))
    return Table(
        f"One token appended, µs: branch {options.branch}, width {options.dim}, {run.dtype_name}",
        ("n", "aggregator", "append", "CUDA graph", "rebuild", "rebuild / append", "encode again"),
        tuple(lines),
        (run.footer(), "encode again: one layer of self-attention over all tokens"),
    )


def fold_table(rows: Rows) -> Table:
    """Table of the cost of tokens that lie beside a tree of fixed order until they are folded in."""
    folds = [row for row in rows if "us_per_token" in row]
    lines = tuple(
        (f"{row['n']:,}", row["method"], quantity(row["us"] / 1e3), quantity(row["us_per_token"])) for row in folds
    )
    columns = ("n", "tree", "fold, ms", "per token beside, µs")
    return Table(f"Folding in {FOLD:.1%} of new tokens", columns, lines, ("each token is folded in once per rebuild",))


def stream_table(rows: Rows) -> Table:
    """Table of a stream: time per append against its length."""
    lines = tuple(
        (row["method"], f"{row['n']:,}", quantity(row["us"]), quantity(row["us"] / max(1, (row["n"] - 1).bit_length())))
        for row in rows
        if row["n"] >= 64
    )
    notes = [
        f"{row['method']}: {row['bytes'] / row['built_bytes']:.3f} times the bytes of a tree built at once"
        for row in rows
        if "bytes" in row
    ]
    columns = ("tree", "tokens so far", "µs per append", "µs per doubling")
    return Table("A stream, token by token, doublings of the room included", columns, lines, tuple(notes))


def draw_grow(run: Run, rows: Rows, file: Path) -> Path:
    """Draw time against tokens."""
    where = run.machine["accelerator"] or run.machine["processor"]
    shown = [row for row in rows if "us_per_token" not in row]
    panel = Panel("", lines_of(shown, "us", 1e-6), (REBUILDS["transformer"], APPENDS["transformer", "eager"]))
    return draw_panels([[panel]], file, f"One more token, {where}, {run.dtype_name}", "seconds", ["time"])


def _timed(run: Run, methods: dict[str, Sequence[Call]], mode: Mode, n: int) -> Rows:
    timings = time_together(methods, run.device, mode, run.limits)
    progress(f"n={n:,}", timings)
    return timed(timings, part="grow", n=n)


def _ratios(rows: Rows) -> list[Row]:
    found = {(row["n"], row["method"]): row["us"] for row in rows}
    return [
        {"n": n, "aggregator": kind, "ratio": float(f"{found[n, REBUILDS[kind]] / us:.4g}")}
        for (n, method), us in found.items()
        for kind in AGGREGATORS
        if method == APPENDS[kind, "eager"]
    ]
