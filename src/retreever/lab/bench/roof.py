"""How close the search comes to what memory allows: the bytes it must read, at the bandwidth a copy reaches."""

from __future__ import annotations

from functools import partial

import torch

from retreever.lab.bench.figures import readable
from retreever.lab.bench.report import Row, Run, progress, times
from retreever.lab.bench.timing import time_together
from retreever.lab.tables import Table
from retreever.ops.search.api import tree_attention
from retreever.tree.plan import TreePlan


def memory_roof(
    run: Run, n: int = 1 << 20, m: int = 4096, heads: int = 4, width: int = 64, sets: int = 4, copied: int = 1 << 30
) -> Row:
    """Time of one search, over `sets` of queries in turn, beside the time its bytes need by a clone of `copied`."""
    plan = TreePlan(n, 2)
    large = torch.empty(copied, dtype=torch.uint8, device=run.device).random_()
    copy = time_together({"copy": [large.clone]}, run.device, "eager", run.limits)["copy"]
    del large
    keys, values = run.randn(1, plan.nodes, 2, heads, width).unbind(dim=2)
    calls = [partial(tree_attention, run.randn(1, m, heads, width), keys, values, plan) for _ in range(sets)]
    search = time_together({"search": calls}, run.device, "auto", run.limits)["search"]
    bandwidth = 2 * copied / copy.seconds
    moved = m * rows_read(plan) * heads * width * keys.element_size()
    progress(f"memory roof, {bandwidth / 1e12:.2f} TB/s", {"copy": copy, "search": search})
    return {
        "n": n,
        "m": m,
        "heads": heads,
        "width": width,
        "copy_bytes_per_second": bandwidth,
        "bytes_read": moved,
        "roof_us": 1e6 * moved / bandwidth,
        "us": 1e6 * search.seconds,
        "ratio": search.seconds * bandwidth / moved,
    }


def rows_read(plan: TreePlan) -> int:
    """Key and value rows one query reads: keys of all children it sees, values of all nodes it selects."""
    return plan.branch * plan.depth + plan.block + plan.tokens


def roof_table(roof: Row) -> Table:
    """The one row of `memory_roof`."""
    columns = ("n", "m", "head width", "bytes read", "copy bandwidth", "their time", "search", "ratio")
    cells = (
        f"{roof['n']:,}",
        f"{roof['m']:,}",
        roof["width"],
        readable(roof["bytes_read"], "bytes"),
        f"{roof['copy_bytes_per_second'] / 1e12:.2f} TB/s",
        readable(1e-6 * roof["roof_us"], "seconds"),
        readable(1e-6 * roof["us"], "seconds"),
        times(roof["ratio"]),
    )
    notes = ("bytes: every row each query reads, though rows near the root are shared and come from the cache",)
    return Table("One search against the bytes it must read", columns, (cells,), notes)
