"""Implementation of `retreever train` and `retreever eval`: from settings to run folders and printed results."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from retreever.arguments import check_int, reject
from retreever.checks import find_device
from retreever.errors import CheckpointError, ConfigError, one_line
from retreever.lab.recipes.figures import draw_run
from retreever.lab.recipes.options import Where
from retreever.lab.recipes.recipe import Recipe, recipe_from_json
from retreever.models.base import Model
from retreever.models.retreever import ReTreever
from retreever.models.series.latent_ode import LatentModel
from retreever.pretrained.card import read_card
from retreever.pretrained.load import load_weights
from retreever.tasks.activity import ActivityTask
from retreever.tasks.copy import CopyTask
from retreever.tasks.gp import GPTask, Kernel
from retreever.tasks.images import ImageTask
from retreever.tasks.seeds import derive_seed
from retreever.train.checkpoint import describe_checkpoint, latest_checkpoint, load_checkpoint
from retreever.train.distributed import Ranks, ranks_of_job
from retreever.train.engine import Trainer
from retreever.train.log import Board, counted, open_tensorboard, summary_writer
from retreever.train.run import RunFolder, read_json
from retreever.train.score import evaluate
from retreever.train.state import check_buildable, restore_model
from retreever.train.together import Run, train_together
from retreever.version import __version__

QUICK_BATCHES = 25  # batches of a test set that a quick run is scored on


Testable = CopyTask | GPTask | ImageTask | ActivityTask
Tests = dict[str, Testable]


class Plan(NamedTuple):
    """A planned run: its recipe, its folder, its task (shared by runs of the same task)."""

    recipe: Recipe
    folder: RunFolder
    task: Testable


def train(recipes: Sequence[Recipe], where: Where) -> None:
    """Train all recipes, each in its own folder, side by side on a GPU. Errors are raised before any training."""
    check_int("at_once", where.at_once, 1)
    if where.resume and where.overwrite:
        reject("resume", "one of --resume and --overwrite", "both")
    if where.tensorboard:
        summary_writer()
    _set_up_device(recipes)
    with ranks_of_job(str(find_device(where.device))) as (ranks, device):
        tasks: dict[Testable, Testable] = {}
        plans = [_plan(recipe, where, ranks, tasks) for recipe in recipes]
        for plan in plans:
            if ranks.first:
                plan.folder.start(plan.recipe.to_json(), where.resume, where.overwrite, saved_settings)
        ranks.wait()  # the others look for results and checkpoints once the first has cleared the folders
        at_once = where.at_once if device.startswith("cuda") and ranks.world == 1 else 1
        missing = [plan for plan in plans if not plan.folder.result.exists()]
        if ranks.first:
            _warn(missing)
        for start in range(0, len(missing), at_once):
            _train_group(missing[start : start + at_once], where, device, ranks)
        for plan in plans:
            if ranks.first:
                print(_line(plan))


def saved_settings(saved: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run folder as this version writes them, to compare with those of a new run."""
    return recipe_from_json(saved).to_json()


def _set_up_device(recipes: Sequence[Recipe]) -> None:
    """Set environment variables that are read when the device is first used."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # with 8, the default, runs wait for one another
    if any(recipe.train.deterministic for recipe in recipes):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _plan(recipe: Recipe, where: Where, ranks: Ranks, tasks: dict[Testable, Testable]) -> Plan:
    """The plan of a run; raises an error for impossible settings and unreadable data, before any file is written."""
    ranks.check(recipe.train.batch)
    recipe.make_model()
    task = recipe.task.make(where.data, recipe.preset)
    if task not in tasks:
        next(iter(task.validation()))
    return Plan(recipe, RunFolder(where.out / recipe.name), tasks.setdefault(task, task))


def _warn(plans: Sequence[Plan]) -> None:
    """Print a warning about the first run whose warmup is not shorter than the run."""
    for recipe, folder, _ in plans:
        steps, warmup = recipe.train.steps, recipe.train.warmup
        if warmup >= steps:
            problem = f"warmup: expected fewer than the {steps} steps, got {warmup}"
            print(f"retreever: warning: {folder.path}: {problem}; the learning rate rises to the end", file=sys.stderr)
            return


def _train_group(plans: Sequence[Plan], where: Where, device: str, ranks: Ranks) -> None:
    """Train runs side by side, new or resumed, and write their results."""
    names = [plan.folder.path.name for plan in plans]
    with Board(names, plans[0].recipe.task.metric, quiet=not ranks.first) as board:
        runs = []
        for index, (recipe, folder, task) in enumerate(plans):
            torch.manual_seed(derive_seed(recipe.task.name, "init", recipe.train.seed))
            trainer = Trainer(recipe.make_model(), task, recipe.train, device, ranks)
            watchers = [board.watcher(index)]
            if where.tensorboard and ranks.first:
                watchers.append(open_tensorboard(folder.path / "tensorboard"))
            runs.append(Run(folder, trainer, watchers))
        train_together(runs)
    if ranks.first:
        for plan, run in zip(plans, runs, strict=True):
            _finish(plan, run.trainer, plan.recipe.task.make_tests(where.data))


def _finish(plan: Plan, trainer: Trainer, tests: Tests) -> None:
    """Score the weights that did best on validation on the tests, and write the result file."""
    recipe, folder, model = plan.recipe, plan.folder, cast(Any, trainer.model)
    best = folder.checkpoints / "best"
    restore_model(model, load_checkpoint(best)[0], best)
    scores = test_scores(model, tests, str(trainer.device), QUICK_BATCHES if recipe.quick else None)
    result = {
        "test": next(iter(scores.values())),
        "scores": scores,
        "validation": max(record.metric for record in trainer.history),
        "metric": recipe.task.metric,
        "steps": trainer.step,
        "seconds": round(trainer.seconds, 2),
        "tokens": model.tokens(recipe.task.context),
        "context": recipe.task.context,
        "parameters": sum(p.numel() for p in model.parameters()),
        "hardware": torch.cuda.get_device_name(trainer.device) if trainer.device.type == "cuda" else "CPU",
        "versions": {"retreever": __version__, "torch": torch.__version__},
    }
    if isinstance(model, LatentModel):
        result["evaluations"] = model.evaluations  # of the ODE's net, in the last batch
    folder.finish(result)
    draw_run(folder.path, recipe, model, plan.task, trainer.history)


def _line(plan: Plan) -> str:
    """One line on a finished run: its folder, scores and tokens."""
    result = read_json(plan.folder.result)
    try:
        tokens = f", with {result['tokens']} of {result['context']} tokens" if result["tokens"] else ""
        scores = _scores_text(result["scores"])
        return one_line(f"{plan.folder.path}: test {result['metric']}: {scores}{tokens}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{plan.folder.result}: expected the result of a run, got {error!r}") from None


def test_scores(model: Model, tests: Tests, device: str, batches: int | None = None) -> dict[str, float]:
    """The score on every test; for ReTreever also with the same weights read over all leaves ("full").

    `batches` limits every test to its first batches.
    """

    def score(name: str, task: Testable) -> float:
        total = task.test_batches if batches is None else min(batches, task.test_batches)
        return evaluate(model, task, counted(islice(task.test(), batches), name, total), device)

    scores = {name: score(name, task) for name, task in tests.items()}
    if isinstance(model, ReTreever) and model.attention.retrieval == "policy":
        model.attention.retrieval = "full"
        scores |= {(full := f"{name}, full"): score(full, task) for name, task in tests.items()}
        model.attention.retrieval = "policy"
    return scores


def scores_of(
    recipe: Recipe, model: Model, data: Path | None, device: str, budget: int | None = None
) -> dict[str, float]:
    """Test scores of `model` as at the end of a run of `recipe`, on the device called `device`.

    `budget` is the number of tokens a query may read; None takes that of the model.
    """
    target = str(find_device(device))
    if budget is not None:
        if not isinstance(model, ReTreever):
            reject("budget", "a model that searches a tree", type(model).__name__)
        model.set_reading(budget=budget)
    model.to(target)
    return test_scores(model, recipe.task.make_tests(data), target, QUICK_BATCHES if recipe.quick else None)


def find_run(path: Path) -> RunFolder:
    """The folder of a run, which must exist."""
    if not path.is_dir():
        got = "a file" if path.exists() else "a path that does not exist"
        raise ConfigError(f"{path}: expected the folder of a run, got {got}")
    return RunFolder(path)


def load_run(path: Path, checkpoint: str = "best") -> tuple[Recipe, Model, int]:
    """Recipe, trained model and number of steps of a run folder."""
    folder = find_run(path)
    settings = folder.config()
    try:
        recipe = recipe_from_json(settings)
    except ConfigError as error:
        raise ConfigError(f"{path}/{error}") from None
    found = folder.checkpoints / "best" if checkpoint == "best" else latest_checkpoint(folder.checkpoints)
    if found is None:
        raise CheckpointError(f"{folder.checkpoints}: expected a checkpoint, got none")
    saved = describe_checkpoint(found).items()
    described = {name.removeprefix("model."): text for name, text in saved if name.startswith("model.")}
    check_buildable(recipe.make_model, recipe.model.layers, described, found)
    tensors, state = load_checkpoint(found)
    model = recipe.make_model()
    restore_model(model, tensors, found)
    step = state.get("step")
    if type(step) is not int:
        raise CheckpointError(f"{found / 'state.json'}: step: expected an int, got {step!r}")
    return recipe, model, step


def names_of(runs: Sequence[Path]) -> dict[str, Path]:
    """Run folders by name; two of one name could not be told apart in a table."""
    names = {path.resolve().name: path for path in runs}
    if len(names) < len(runs):
        reject("runs", "folders of different names", " ".join(map(str, runs)))
    return names


def evaluate_run(run: Path, checkpoint: str, data: Path | None, device: str, budget: int | None = None) -> None:
    """Print the test scores of a run's best or newest weights."""
    recipe, model, steps = load_run(run, checkpoint)
    scores = scores_of(recipe, model, data, device, budget)
    print(f"{run}: test {recipe.task.metric} after {steps} steps{_under(budget)}: {_scores_text(scores, 4)}")


def evaluate_pretrained(
    name: str, folder: Path | None, data: Path | None, device: str, budget: int | None = None
) -> int:
    """Print every score and the card's; returns 1 when a score was not reproduced, else 0.

    The scores of a card are those of one path, so with a `budget` no verdict is given.
    """
    card = read_card(name, folder)
    scores = scores_of(recipe_from_json(card.settings), load_weights(card, folder), data, device, budget)
    if budget is not None:
        print(one_line(f"{name}: test {card.metric}{_under(budget)}: {_scores_text(scores, 4)}"))
        return 0
    for key, expected in card.scores.items():
        if key in scores:
            line = f"{key}: {card.metric} {scores[key]:.4f}, card {expected:.4f}, {scores[key] - expected:+.1e}"
            print(one_line(f"{name}: {line}"))
    if wrong := card.differs(scores):
        names = ", ".join(wrong)
        print(one_line(f"{name}: NOT reproduced to {card.tolerance:g}: {names}; the card's data: {card.data}"))
        return 1
    print(f"{name}: reproduced to {card.tolerance:g}")
    return 0


def evaluate_oracle(kernel: Kernel) -> None:
    """Print the score of the exact posterior on the fixed test set of `kernel`."""
    task = GPTask(kernel)
    scores = task.oracle_scores()
    error = float(scores.std()) / math.sqrt(len(scores))
    print(f"exact posterior, {kernel}: test log-likelihood {float(scores.mean()):.4f} +- {error:.4f} (standard error)")


def _under(budget: int | None) -> str:
    return "" if budget is None else f" with a budget of {budget} tokens"


def _scores_text(scores: dict[str, float], digits: int = 2) -> str:
    if list(scores) == ["test"]:
        return f"{scores['test']:.{digits}f}"
    return ", ".join(f"{name} {value:.{digits}f}" for name, value in scores.items())
