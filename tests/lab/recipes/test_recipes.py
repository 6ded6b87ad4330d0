"""Recipes: settings that survive JSON, what wins over what, names, and models of the paper's sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from retreever import ConfigError, InputError
from retreever.cli import commands_for, main, parse
from retreever.lab.recipes.defaults import DEFAULTS, MODELS, PUBLISHED, QUICK
from retreever.lab.recipes.models import NEURAL_PROCESSES, SERIES
from retreever.lab.recipes.options import asked
from retreever.lab.recipes.recipe import PRESETS, Recipe, make_recipe, recipe_from_json, setting_names
from retreever.lab.recipes.tasks import TASKS
from retreever.models.series.kinds import SERIES as kinds

each = pytest.mark.parametrize("task", TASKS)


@each
def test_settings_survive_json(task: str) -> None:
    recipe = make_recipe(task, seed=3, steps=7, betas=(0.5, 0.6))
    saved = json.loads(json.dumps(recipe.to_json()))
    assert recipe_from_json(saved) == recipe
    with pytest.raises(ConfigError, match=f"expected the settings of a {task} run, got colour"):
        recipe_from_json({**saved, "colour": "red"})
    with pytest.raises(ConfigError, match=r"config.json: lr: expected a setting, got none"):
        recipe_from_json({name: value for name, value in saved.items() if name != "lr"})
    with pytest.raises(ConfigError, match="format: expected 2, got 3"):
        recipe_from_json({**saved, "format": 3})


def test_settings_of_version_0_1_are_read() -> None:
    """They had no format, and none of the settings that the copy task has gained."""
    gained = ("format", "layers", "dim", "hidden", "residual", "order", "axis")
    now = make_recipe("copy", n=512, reward="cross-entropy")
    old = {name: value for name, value in now.to_json().items() if name not in gained}
    assert recipe_from_json(old) == now


@each
def test_what_is_given_wins_over_quick_and_quick_over_the_preset(task: str) -> None:
    usual, quick = make_recipe(task), make_recipe(task, quick=True)
    paper = make_recipe(task, preset="paper")
    assert quick.train.steps == QUICK[task]["steps"] < usual.train.steps and quick.name.endswith("quick-seed0")
    assert paper.train.lr == 5e-4 and paper.train.warmup == 0 and "paper" in paper.name
    assert make_recipe(task, preset="paper", quick=True).train.steps == QUICK[task]["steps"]
    for name in {*QUICK[task], *PUBLISHED[task]}:  # also where what is given equals a default
        value = usual.to_json()[name]
        given: Any = tuple(value) if name == "betas" else value
        both = make_recipe(task, preset="paper", quick=True, **{name: given})
        assert both.to_json()[name] == value, name
    for recipe in (usual, paper, quick):
        assert recipe.train.warmup < recipe.train.steps  # else a run is warned of


def test_a_length_given_beside_quick_is_kept() -> None:
    assert make_recipe("copy", n=256, quick=True).task.context == 128
    assert make_recipe("copy", quick=True).task.context == 16


def parsed(*words: str) -> Recipe:
    command = ["train", *words]
    (recipe,) = parse(commands_for(command), command).what.recipes()
    return recipe


@each
def test_the_command_line_has_the_recipes_defaults(task: str) -> None:
    assert parsed(task) == make_recipe(task)
    assert parsed(task, "--quick") == make_recipe(task, quick=True)
    assert parsed(task, "--preset", "paper") == parsed(task, "--preset=paper") == make_recipe(task, preset="paper")


def test_the_command_line_knows_what_was_given_by_hand() -> None:
    assert parsed("copy", "--quick", "--n", "256").task.context == 128
    assert parsed("copy", "--n", "256", "--preset", "paper", "--lr", "1e-3").train.lr == 1e-3
    assert parsed("gp", "--model", "perceiver-io").model.residual == "pre"
    assert parsed("gp", "--seeds", "4").train.seed == parsed("gp", "--seed", "4").train.seed == 4
    assert asked(["copy", "--preset"], "--preset", PRESETS) is asked(["--preset", "other"], "--preset", PRESETS) is None


def test_residuals_are_those_a_model_trains_best_with_unless_given() -> None:
    ours, rival = make_recipe("gp"), make_recipe("gp", model="perceiver-io")
    assert ours.model.residual == "normalised" and rival.model.residual == "pre"
    assert make_recipe("gp", model="lbanp").make_model().config.residual == "pre"
    assert make_recipe("gp", model="perceiver-io", preset="paper").model.residual == "normalised"
    assert make_recipe("gp", model="perceiver-io", residual="normalised").model.residual == "normalised"
    assert [recipe.make_model().config.residual for recipe in (ours, rival)] == ["normalised", "pre"]
    paper, by_hand = make_recipe("gp", preset="paper"), make_recipe("gp", preset="paper", residual="pre")
    assert [recipe.make_model().config.residual for recipe in (paper, by_hand)] == ["doubled", "pre"]


@pytest.mark.parametrize(
    ("task", "words", "message"),
    [
        ("gp", "--model tnpd --latents 64", "latents: expected 0, as tnpd has no use for it, got 64"),
        ("gp", "--model cnp --branch 4", "branch: expected 2, as cnp has no use for it, got 4"),
        ("gp", "--model banp --residual pre", "residual: expected auto, as banp has no use for it, got 'pre'"),
        ("gp", "--model lbanp --budget 5", "budget: expected None, as lbanp has no use for it, got 5"),
        ("gp", "--state 5", "state: expected 0, as retreever has no use for it, got 5"),
        ("activity", "--model grud --dim 8", "dim: expected 64, as grud has no use for it, got 8"),
        ("copy", "--model ca --detours 0.5", "detours: expected 0.1, as ca has no use for it, got 0.5"),
    ],
)
def test_settings_that_a_model_has_no_use_for_are_refused(
    task: str, words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", task, *words.split(), "--quick", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.strip().endswith(message) and not (tmp_path / "out").exists()


@each
def test_names_tell_runs_apart(task: str) -> None:
    changes: list[dict[str, Any]] = [{}, {"seed": 1}, {"branch": 4}, {"preset": "paper"}, {"quick": True}]
    assert len({make_recipe(task, **change).name for change in changes}) == len(changes)


def test_models_of_time_series_have_published_sizes_or_those_chosen_on_validation() -> None:
    """They are models of the activity task alone, named as in the library."""
    assert tuple(kinds) == SERIES
    for name in SERIES:
        made = make_recipe("activity", model=name, state=0).make_model()
        assert type(made) is kinds[name] and made.config.hidden == kinds[name].settings().hidden
        assert made.config.dropout == (0.0 if name == "ip-nets" else 0.1) and made.config.channels == 12
        assert make_recipe("activity", model=name, state=20).make_model().config.hidden == 20
        chosen = name in ("rnn-impute", "rnn-decay", "grud", "ip-nets", "seft", "ode-rnn")
        assert make_recipe("activity", model=name).model.state == (128 if chosen else 0)
    sizes = make_recipe("activity", model="ode-rnn", state=20).make_model().config
    assert (sizes.units, sizes.gru_units, sizes.layers) == (20, 20, 1)
    assert make_recipe("activity", model="grud", preset="paper").task.crop == 0
    assert parsed("activity", "--model", "rnn-impute").train.lr == 3e-3
    assert parsed("activity", "--model", "grud", "--state", "64").name == "activity-paper-crop40-grud-64-seed0"
    adaptive = make_recipe("activity", model="latent-ode", solver="adaptive")
    assert adaptive.name == "activity-paper-latent-ode-adaptive-seed0" and not adaptive.make_model().capturable
    with pytest.raises(InputError, match=r"^model: expected a model of the gp task"):
        make_recipe("gp", model="grud")


def test_runs_from_before_time_series_are_read() -> None:
    now = make_recipe("activity")
    old = {name: value for name, value in now.to_json().items() if name not in ("state", "solver", "budget")}
    assert recipe_from_json(old) == now


def test_names_are_those_of_collected_results() -> None:
    assert make_recipe("copy", n=512, model="perceiver-io", latents=9).name == "copy-512-perceiver-io-9-seed0"
    assert make_recipe("copy", reward="cross-entropy", lambda_rl=0.1).name == "copy-256-tca-ce-rl0.1-seed0"
    assert make_recipe("gp", seed=2).name == "gp-rbf-retreever-seed2"
    assert make_recipe("emnist", order="axis", axis=1).name == "emnist-retreever-axis1-seed0"
    assert make_recipe("activity", split="recording").name == "activity-recording-retreever-seed0"


@pytest.mark.parametrize(
    ("task", "model", "parameters"),
    [
        ("gp", "retreever", 366_786),
        ("gp", "transformer-ca", 325_186),
        ("emnist", "retreever", 366_914),
        ("emnist", "transformer-ca", 325_314),
        ("celeba", "retreever", 367_558),
        ("celeba", "transformer-ca", 325_958),
        ("copy", "tca", 185_996),
        ("copy", "ca", 144_396),
    ],
)
def test_published_models_have_the_paper_codes_sizes(task: str, model: str, parameters: int) -> None:
    """Ours have a final norm of 128 parameters more, and one for the tokens attended to."""
    for preset in ("paper", "default"):
        made = make_recipe(task, preset=preset, model=model).make_model()  # type: ignore[arg-type]
        assert abs(sum(p.numel() for p in made.parameters()) - parameters) <= 0.01 * parameters


COUNTS = {  # of section 3 of the sheet of published systems: gp, celeba, emnist
    "cnp": (215_682, 349_190, 298_626),
    "canp": (331_906, 465_542, 414_978),
    "np": (232_194, 365_702, 315_138),
    "anp": (348_418, 482_054, 431_490),
    "bnp": (248_450, 381_958, 331_394),
    "banp": (364_674, 498_310, 447_746),
    "tnpd": (222_082, 222_790, 222_146),
}


@pytest.mark.parametrize("model", COUNTS)
def test_neural_processes_have_the_published_sizes(model: str) -> None:
    for task, parameters in zip(("gp", "celeba", "emnist"), COUNTS[model], strict=True):
        for preset in PRESETS:
            made = make_recipe(task, preset=preset, model=model).make_model()
            assert sum(p.numel() for p in made.parameters()) == parameters


def test_heads_of_neural_processes_are_those_published() -> None:
    """A floor of 0.1 for the older ones on every task, else that of the task."""
    heads = {model: make_recipe("emnist", model=model).make_model().config.head for model in NEURAL_PROCESSES}
    assert heads == dict.fromkeys(NEURAL_PROCESSES[:6], "floored") | dict.fromkeys(NEURAL_PROCESSES[6:], "bounded")
    assert make_recipe("gp", model="tnpd").make_model().config.head == "gaussian"


def test_neural_processes_have_settings_of_their_own() -> None:
    assert make_recipe("gp", model="lbanp").make_model().tokens(47) == 8
    small = make_recipe("gp", model="cmanp", latents=4).make_model().config
    assert (small.latents, small.block_latents) == (4, 4)
    assert make_recipe("gp", model="lbanp", latents=128).name == "gp-rbf-lbanp-128-seed0"
    assert parsed("gp", "--model", "cnp") == make_recipe("gp", model="cnp") and MODELS["cnp"]["dim"] == 128
    published = make_recipe("gp", model="tnpd", preset="paper").train
    assert (published.clip, published.lr, published.batch, published.steps) == (0.0, 5e-4, 16, 100_000)
    with pytest.raises(InputError, match=r"^dropout: expected 0, as cnp has none, got 0.1$"):
        make_recipe("gp", model="cnp", dropout=0.1).make_model()
    with pytest.raises(InputError, match=r"^model: expected a model of the activity task"):
        make_recipe("activity", model="cnp")


@pytest.mark.parametrize("model", NEURAL_PROCESSES)
def test_neural_processes_survive_json(model: str) -> None:
    recipe = make_recipe("gp", model=model, seed=3)
    assert recipe_from_json(json.loads(json.dumps(recipe.to_json()))) == recipe


def test_what_is_given_holds_beside_the_preset() -> None:
    """Otherwise a run's config.json would tell what the run did not do."""

    def chosen(**more: float) -> tuple[float, str]:
        objective: Any = make_recipe("copy", n=16, preset="paper", **more).make_model().config
        return objective.objective.detours, objective.objective.gate

    assert chosen() == (0.0, "open") and chosen(detours=0.3) == (0.3, "open")


def test_tokens_are_those_of_the_paper() -> None:
    recipes = [make_recipe(task) for task in TASKS]
    tokens = {r.task.name: (r.make_model().tokens(r.task.context), r.task.context) for r in recipes}
    assert tokens == {
        "copy": (8, 128), "gp": (7, 47), "emnist": (9, 197), "celeba": (9, 197), "activity": (7, 50),
        "wheel": (10, 512),
    }  # fmt: skip
    assert make_recipe("gp", model="perceiver-io").make_model().tokens(47) == 7
    assert make_recipe("gp", model="perceiver-io", latents=32).make_model().tokens(47) == 32


def test_every_default_is_a_setting() -> None:
    for table in (DEFAULTS, PUBLISHED, QUICK):
        for task, values in table.items():
            assert {*values} <= {*setting_names(task)}


def test_mistakes_are_named() -> None:
    with pytest.raises(InputError, match=r"^colour: expected a setting of gp \(kernel, ranges, sizes, model, "):
        make_recipe("gp", colour="red")
    with pytest.raises(InputError, match=r"^model: expected a model of the copy task, one of tca, ca, perceiver-io"):
        make_recipe("copy", model="retreever")
    with pytest.raises(InputError, match=r"^task: expected one of copy, gp, .*, wheel, got 'mnist'"):
        make_recipe("mnist")
    with pytest.raises(InputError, match=r"^steps: expected an int >= 1, got -3"):
        make_recipe("gp").changed(steps=-3)
    with pytest.raises(InputError, match=r"^n: expected an int >= 1, got str '8'"):
        make_recipe("copy", n="8")
    for large in (10**400, 10**5_000):
        with pytest.raises(InputError, match=r"^stop_at: expected a number >= -inf, got one of more than 300 digits"):
            make_recipe("gp", stop_at=large)


def test_missing_data_is_one_line_that_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "emnist", "--quick", "--data", str(tmp_path), "--out", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "emnist" in error
    assert not (tmp_path / "runs").exists()


def test_the_oracle_wants_a_task_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "copy", "--model", "oracle"]) == 2
    assert "what: expected gp" in capsys.readouterr().err
