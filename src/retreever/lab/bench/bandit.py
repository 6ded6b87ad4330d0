"""The wheel bandit: regret of trained models as players, in % of uniform play."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from retreever.arguments import check_int, reject
from retreever.attention_inputs import check_budget
from retreever.lab.bench import figures
from retreever.lab.bench.machine import describe
from retreever.lab.bench.options_models import BanditBench
from retreever.lab.bench.report import Row, Rows, Run, check_different
from retreever.lab.recipes.command import load_run, names_of
from retreever.lab.tables import Table
from retreever.models.base import Model
from retreever.models.retreever import ReTreever
from retreever.models.transformer_ca import TransformerCA
from retreever.tasks.wheel import ARMS, Game, Regret


def measure(options: BanditBench) -> None:
    """Run the benchmark and write its files. Weights are float32 on every device."""
    for name in ("steps", "players"):
        check_int(name, getattr(options, name), 1)
    check_int("window", options.window, 0)
    check_budget(options.budget)
    if not options.runs:
        reject("runs", "folders of runs of the wheel task (retreever train wheel)", "none")
    check_different("deltas", options.deltas)
    names = names_of(options.runs)
    run = Run.start("bandit", replace(options, dtype="float32", runs=()))
    rows = [row_of("uniform", None, delta, play_uniform(run, options, delta)) for delta in options.deltas]
    players: dict[str, tuple[int, Model]] = {}
    for name, path in names.items():
        recipe, model, _ = load_run(path)
        if recipe.task.name != "wheel":
            reject("runs", "runs of the wheel task", f"{path}, one of {recipe.task.name}")
        players[name] = recipe.train.steps, model.eval().to(run.device)
        if options.budget is not None and isinstance(model, ReTreever | TransformerCA):
            tree = with_budget(model, options.budget).to(run.device)
            players[f"{name}, tree, {options.budget} read"] = recipe.train.steps, tree
    for name, (steps, model) in players.items():
        found = play(run, options, model)
        rows += [row_of(name, steps, delta, regret) for delta, regret in found.items()]
        totals = ", ".join(f"{row['cumulative']:.2f} (delta {row['delta']:g})" for row in rows[-len(found) :])
        print(f"{name}: {totals} % of uniform", flush=True)
        run.save(rows, {})  # games of large models take minutes
    run.publish(rows, [bandit_table(run, options, rows)], partial(draw_bandit, rows), {})


def with_budget(model: ReTreever | TransformerCA, budget: int) -> ReTreever:
    """A copy that reads so many tokens per query; attention over all tokens becomes a tree of means."""
    if isinstance(model, TransformerCA):
        return ReTreever.from_transformer_ca(model, aggregator="mean", correct=False, budget=budget)
    return deepcopy(model).set_reading(budget=budget)


@torch.inference_mode()
def play(run: Run, options: BanditBench, model: Model) -> dict[float, Regret]:
    """First a random arm, then that with the largest mean plus standard deviation, given all plays so far.

    Games of all deltas are one batch of the model.
    """
    games = [Game(delta, options.players, options.steps, run.device) for delta in options.deltas]
    x = torch.cat([game.x for game in games])
    for game in games:
        game.play(0, game.first)
    for step in range(1, options.steps):
        window = slice(max(0, step - options.window) if options.window else 0, step)
        history = torch.cat([game.history[:, window] for game in games])
        dist = model.predict(x[:, window], history, x[:, step : step + 1])
        optimistic: Tensor = (dist.mean + dist.stddev)[:, 0].argmax(dim=1)
        for game, arms in zip(games, optimistic.view(len(games), -1), strict=True):
            game.play(step, arms)
    return {delta: game.regret() for delta, game in zip(options.deltas, games, strict=True)}


def play_uniform(run: Run, options: BanditBench, delta: float) -> Regret:
    """Arms at random, as a check of the scale: about 100%."""
    game = Game(delta, options.players, options.steps, run.device)
    generator = torch.Generator().manual_seed(0)
    for step in range(options.steps):
        game.play(step, torch.randint(ARMS, (options.players,), generator=generator).to(run.device))
    return game.regret()


def row_of(name: str, steps: int | None, delta: float, regret: Regret) -> Row:
    """Means and standard deviations over players, of a model trained for `steps`."""
    values = {"cumulative": regret.cumulative, "late": regret.late}
    means = {key: float(value.mean()) for key, value in values.items()}
    spreads = {f"{key}_std": float(value.std(correction=0)) for key, value in values.items()}
    return {"method": name, "steps": steps, "delta": delta, **means, **spreads}


def bandit_table(run: Run, options: BanditBench, rows: Rows) -> Table:
    """One row per player, one column per delta."""
    names = list(dict.fromkeys(row["method"] for row in rows))
    found = {(row["method"], row["delta"]): row for row in rows}
    lines = []
    for name in names:
        cells = [found[name, delta] for delta in options.deltas]
        totals = (f"{cell['cumulative']:.2f} ± {cell['cumulative_std']:.2f}" for cell in cells)
        lates = (f"{cell['late']:.2f}" for cell in cells)
        steps = f"{cells[0]['steps']:,}" if cells[0]["steps"] else ""
        lines.append((name, steps, *totals, *lates))
    columns = ("player", "trained", *(f"δ = {d:g}" for d in options.deltas), *(f"late, {d:g}" for d in options.deltas))
    window = f"the last {options.window}" if options.window else "all"
    about = (
        f"cumulative regret in % of uniform play over {options.steps:,} steps, mean ± standard deviation over "
        f"{options.players} players; late: over the last quarter of the steps",
        f"first arm at random, then the largest mean plus standard deviation, given {window} plays before",
        "trained: steps of training; the weights are those that did best on validation",
        describe(run.machine),
    )
    return Table("Wheel bandit", columns, tuple(lines), about)


def draw_bandit(rows: Rows, file: Path) -> Path:
    """Draw bars of cumulative regret."""
    groups: dict[str, dict[str, tuple[float, str]]] = {}
    for row in rows:
        colour = figures.TREE if "tree" in row["method"] else figures.FULL
        groups.setdefault(f"δ = {row['delta']:g}", {})[row["method"]] = (row["cumulative"], colour)
    return figures.draw_bars(groups, file, "Wheel bandit", "regret in % of uniform play (less is better)")
