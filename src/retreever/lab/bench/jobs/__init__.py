"""`retreever bench jobs`: real jobs, every method trained for the same time, beside answers without a network."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import fmean, stdev
from typing import Any

from retreever.arguments import check_choice, reject
from retreever.errors import BackendError
from retreever.lab.bench.jobs.co2 import Gaps
from retreever.lab.bench.jobs.jobs import Digits, Field, Job, Nearest, Photo
from retreever.lab.bench.jobs.tables import draw_jobs, job_tables
from retreever.lab.bench.jobs.training import measured, readings, rivals
from retreever.lab.bench.machine import describe
from retreever.lab.bench.options_models import JOBS, JobsBench
from retreever.lab.bench.report import Row, Rows, Run

MAKERS: dict[str, Callable[[], Job]] = {
    **{f"fields-{n}": partial(Field, n) for n in (512, 4096, 65536)},
    "nearest": Nearest,
    "co2": Gaps,
    "digits": Digits,
    "photo": Photo,
}


def measure(options: JobsBench) -> None:
    """Run the benchmark and write its files. Weights are float32 on every device."""
    for name in options.only:
        check_choice("only", name, JOBS)
    if not options.seeds:
        reject("seeds", "at least one seed", options.seeds)
    seconds = min(options.seconds, 1.0) if options.quick else options.seconds
    overwrite = options.overwrite or options.resume
    run = Run.start("jobs", replace(options, dtype="float32", overwrite=overwrite, seconds=seconds))
    rows = earlier(run) if options.resume else []
    left: dict[str, str] = {}
    for name in options.only or JOBS:
        try:
            add_rows(run, MAKERS[name](), options.seeds, rows)
        except BackendError as error:  # a package that the data come with is absent
            left[name] = str(error)
            print(f"{name}: left out: {error}", file=sys.stderr, flush=True)
    if not rows:
        reject("only", "a job whose data are here", left)
    rows.sort(key=lambda row: JOBS.index(row["job"]))
    found = summary(rows)
    run.publish(rows, job_tables(run, found, left), partial(draw_jobs, run, found), {"jobs": found, "left_out": left})


def earlier(run: Run) -> Rows:
    """Rows that an earlier run has left in the same folder, on the same machine and with the same time of training."""
    if not run.file("json").exists():
        return []
    saved = json.loads(run.file("json").read_text(encoding="utf-8"))
    wanted = {"machine": describe(run.machine), "seconds": run.options.seconds}
    found = {"machine": describe(saved["machine"]), "seconds": saved["options"]["seconds"]}
    if found != wanted:
        reject("resume", f"an earlier run with {wanted}", found)
    rows: Rows = saved["rows"]
    return rows


def add_rows(run: Run, job: Job, seeds: tuple[int, ...], rows: Rows) -> None:
    """Add a row for every method, reading and seed that `rows` lack; all are saved after every training."""
    tests = job.tests()
    n = tests[0].xc.shape[1]
    where: Row = {"job": job.name, "n": n, "measure": job.score, "smaller": job.smaller}
    known = {(row["job"], row["trained"], row["seed"]) for row in rows}
    for name, answer in job.usual().items():
        if (job.name, name, None) not in known:
            score = job.total([job.error(answer(batch), batch) for batch in tests])
            rows.append({**where, "method": name, "trained": name, "seed": None, "score": score})
    for method, make in rivals(job, n).items():
        for seed in seeds:
            if (job.name, method, seed) in known:
                continue
            trained = make(run.options.seconds, seed, run.device)
            for name, model, reading in readings(method, trained, job, n):
                found: dict[str, Any] = measured(model, job, tests, run.device, **reading)
                steps = {"trained": method, "seed": seed, "steps": trained.steps}
                rows.append({**where, "method": name, **steps, **found})
                note = f"{found['score']:.4g}, {found['tokens']:.0f} tokens, {trained.steps} steps"
                print(f"{job.name}, {name}, seed {seed}: {note}", file=sys.stderr, flush=True)
            run.save(rows, {})


def summary(rows: Rows) -> Rows:
    """Means over seeds, in the order of the rows."""
    groups: dict[tuple[str, str], Rows] = {}
    for row in rows:
        groups.setdefault((row["job"], row["method"]), []).append(row)
    means: Rows = []
    for group in groups.values():
        scores = [row["score"] for row in group]
        mean: Row = {name: group[0][name] for name in ("job", "n", "measure", "smaller", "method")}
        mean |= {"score": fmean(scores), "std": stdev(scores) if len(scores) > 1 else None, "seeds": len(scores)}
        mean |= {name: fmean(row[name] for row in group) for name in ("tokens", "us", "steps") if name in group[0]}
        means.append(mean)
    return means
