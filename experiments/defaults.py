"""Which defaults train best? Copy task, validation sequences only, several seeds side by side; writes one JSON.

    python experiments/defaults.py --n 128 --steps 3000 --seeds 0 1 --device cuda --out runs/defaults

Each variant changes one choice of the library's defaults. The test set is never looked at.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import torch

from retreever import ReTreever
from retreever.models.retreever_config import ReTreeverConfig
from retreever.objective import ObjectiveConfig
from retreever.tasks.copy import VOCABULARY, CopyTask
from retreever.train.config import TrainConfig
from retreever.train.engine import fit
from retreever.train.protocols import as_rows

MODEL = ReTreeverConfig(
    dim_y=VOCABULARY, inputs="sequence", head="categorical", encoder="identity", order="given", dropout=0.1
)
CROSS_ENTROPY = replace(MODEL, objective=ObjectiveConfig(reward="cross-entropy"))


def variants(train: TrainConfig) -> dict[str, tuple[ReTreeverConfig, TrainConfig]]:
    """Name -> settings; each one change away from the default."""

    def objective(**changes: object) -> ReTreeverConfig:
        return replace(MODEL, objective=replace(MODEL.objective, **changes))

    return {
        "default": (MODEL, train),
        "tree levels detached": (replace(MODEL, detach=True), train),
        "residual of the public code": (replace(MODEL, residual="doubled"), train),
        "no baseline": (objective(baseline="none"), train),
        "baseline: batch mean": (objective(baseline="batch-mean"), train),
        "Adam betas (0.1, 0.999)": (MODEL, replace(train, betas=(0.1, 0.999))),
        "no warm-up": (MODEL, replace(train, warmup=0)),
        "lr 5e-4": (MODEL, replace(train, lr=5e-4)),
        "no dropout": (replace(MODEL, dropout=0.0), train),
        "all as published": (MODEL.as_published(), train.as_published()),
        "-CE reward, default": (CROSS_ENTROPY, train),
        "-CE reward, baseline: batch mean": (
            replace(CROSS_ENTROPY, objective=replace(CROSS_ENTROPY.objective, baseline="batch-mean")),
            train,
        ),
        "-CE reward, as published": (CROSS_ENTROPY.as_published(), train.as_published()),
    }


def run(name: str, model: ReTreeverConfig, train: TrainConfig, n: int, device: str) -> dict[str, object]:
    """Train one variant with one seed."""
    torch.set_num_threads(1)
    torch.manual_seed(train.seed)
    started = time.perf_counter()
    history = fit(ReTreever(model), CopyTask(n), train, device=device)
    seconds = time.perf_counter() - started
    return {"variant": name, "seed": train.seed, "seconds": seconds, "history": as_rows(history)}


def main() -> None:
    """Run all variants and seeds and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=128)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/defaults"))
    args = parser.parse_args()
    base = TrainConfig(steps=args.steps, batch=args.batch, evaluate_every=max(1, args.steps // 20))
    chosen = {k: v for k, v in variants(base).items() if not args.only or k in args.only}
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        jobs = [
            pool.submit(run, name, model, replace(train, seed=seed), args.n, args.device)
            for name, (model, train) in chosen.items()
            for seed in args.seeds
        ]
        rows = [job.result() for job in jobs]
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    settings = {"task": "copy", "n": args.n, "steps": args.steps, "batch": args.batch, "hardware": device}
    (args.out / f"copy-{args.n}.json").write_text(json.dumps({**settings, "rows": rows}, indent=1) + "\n")
    for row in rows:
        curve = "  ".join(f"{r['metric']:.1f}" for r in row["history"])
        print(f"{row['variant']:<40} seed {row['seed']}  {row['seconds']:.0f} s  {curve}")


if __name__ == "__main__":
    main()
