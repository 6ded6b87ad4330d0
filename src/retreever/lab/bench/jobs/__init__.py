"""`retreever bench jobs`: real jobs, every method trained for the same time, beside answers without a network."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import fmean, stdev

from retreever.arguments import check_choice, check_int, check_number, reject
from retreever.errors import BackendError
from retreever.lab.bench.jobs.co2 import Gaps
from retreever.lab.bench.jobs.jobs import Digits, Field, Job, Nearest, Photo
from retreever.lab.bench.jobs.tables import draw_jobs, job_tables
from retreever.lab.bench.jobs.training import ALL, measured, readings, rivals
from retreever.lab.bench.machine import describe
from retreever.lab.bench.options_models import JOBS, METHODS, JobsBench
from retreever.lab.bench.report import Row, Rows, Run, check_different

MEANS = ("likelihood", "tokens", "us", "steps")
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
    for method in options.methods:
        check_choice("methods", method, METHODS)
    check_different("seeds", options.seeds)
    for seed in options.seeds:
        check_int("seeds", seed, 0)
    check_number("seconds", options.seconds)
    if options.resume and options.overwrite:
        reject("resume", "either resume or overwrite", "both")
    seconds = min(options.seconds, 1.0) if options.quick else options.seconds
    overwrite = options.overwrite or options.resume
    run = Run.start("jobs", replace(options, dtype="float32", overwrite=overwrite, seconds=seconds))
    rows = earlier(run) if options.resume else []
    left: dict[str, str] = {}
    for name in options.only or JOBS:
        try:
            add_rows(run, MAKERS[name](), options, rows)
        except BackendError as error:  # a package that the data come with is absent
            left[name] = str(error)
            print(f"{name}: left out: {error}", file=sys.stderr, flush=True)
    if not rows:
        reject("only", "a job whose data are here", left)
    order = ("", *METHODS)  # usual answers first
    rows.sort(key=lambda row: (JOBS.index(row["job"]), order.index(row["trained"] if "steps" in row else "")))
    found = summary(rows)
    run.publish(rows, job_tables(run, found, left), partial(draw_jobs, run, found), {"jobs": found, "left_out": left})


def earlier(run: Run) -> Rows:
    """Rows that an earlier run has left in the same folder, on the same machine and with the same time of training."""
    if not run.file("json").exists():
        return []
    wanted = {"machine": describe(run.machine), "seconds": run.options.seconds}
    try:
        saved = json.loads(run.file("json").read_text(encoding="utf-8"))
        found = {"machine": describe(saved["machine"]), "seconds": saved["options"]["seconds"]}
        rows: Rows = list(saved["rows"])
        if not all(row["job"] in JOBS and (row["seed"] is None or row["seed"] >= 0) for row in rows):
            raise ValueError("rows of other jobs")
        summary(rows)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reject("resume", f"results of an earlier run in {run.file('json')}", f"{type(error).__name__}: {error}")
    if found != wanted:
        reject("resume", f"an earlier run with {wanted}", found)
    return rows


def add_rows(run: Run, job: Job, options: JobsBench, rows: Rows) -> None:
    """Add a row for every method, reading and seed that `rows` lack; all are saved after every training."""
    tests = job.tests()
    n = tests[0].xc.shape[1]
    where: Row = {"job": job.name, "n": n, "measure": job.score, "smaller": job.smaller}
    known = {(row["job"], row["trained"], row["seed"]) for row in rows}
    for name, answer in job.usual().items():
        if (job.name, name, None) not in known:
            found = job.judged([answer(batch) for batch in tests], tests)
            rows.append({**where, "method": name, "trained": name, "seed": None, **found})
    for method, make in rivals(job, n).items():
        for seed in options.seeds:
            if (job.name, method, seed) in known or method not in (options.methods or METHODS):
                continue
            trained = make(run.options.seconds, seed, run.device)
            for name, model, reading in readings(method, trained, job, n):
                found = measured(model, job, tests, run.device, **reading)
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
        scores, seeds = [row["score"] for row in group], {row["seed"] for row in group}
        of_all = [row["score"] for row in groups.get((group[0]["job"], ALL), []) if {row["seed"], None} & seeds]
        mean: Row = {name: group[0][name] for name in ("job", "n", "measure", "smaller", "method")}
        mean |= {"score": fmean(scores), "std": stdev(scores) if len(scores) > 1 else None, "seeds": len(scores)}
        mean |= {name: fmean(row[name] for row in group) for name in MEANS if name in group[0]}
        if len(of_all) >= len(scores) and any(of_all):  # of the same seeds
            mean["ratio"] = mean["score"] / fmean(of_all)
        means.append(mean)
    return means
