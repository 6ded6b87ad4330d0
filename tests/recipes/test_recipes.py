"""Recipes: settings that survive JSON, presets, names, and models of the paper's sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from retreever import ConfigError
from retreever.cli import main
from retreever.recipes.activity import ActivitySettings
from retreever.recipes.copy import CopySettings
from retreever.recipes.gp import GPSettings
from retreever.recipes.images import CelebASettings, EmnistSettings
from retreever.recipes.options import RECIPES, TrainActivity, TrainCelebA, TrainCopy, TrainEmnist, TrainGP
from retreever.recipes.settings import Settings

ALL = (CopySettings(), GPSettings(), EmnistSettings(), CelebASettings(), ActivitySettings())
each = pytest.mark.parametrize("settings", ALL, ids=[s.task for s in ALL])


@each
def test_settings_survive_json(settings: Settings) -> None:
    changed = replace(settings, seed=3, steps=7, betas=(0.5, 0.6))
    again = RECIPES[settings.task].from_json(json.loads(json.dumps(changed.to_json())))
    assert again == changed
    with pytest.raises(ConfigError, match=f"expected the settings of a {settings.task} run"):
        RECIPES[settings.task].from_json({**changed.to_json(), "colour": "red"})


@each
def test_presets_change_defaults_and_leave_what_was_set_by_hand(settings: Settings) -> None:
    quick = replace(settings, quick=True, lr=7e-4).resolved()
    assert quick.steps < settings.steps and quick.lr == 7e-4 and quick.name.endswith("quick-seed0")
    assert replace(settings, quick=True, steps=9).resolved().steps == 9
    paper = replace(settings, preset="paper").resolved()
    assert paper.lr == 5e-4 and paper.warmup == 0 and "paper" in paper.name
    assert quick.resolved() == quick and settings.resolved().steps == settings.steps
    quick.train_config(), paper.train_config()
    for one in (settings, paper, replace(settings, quick=True).resolved()):
        assert one.warmup < one.steps  # else a run is warned of


def test_residuals_are_those_a_model_trains_best_with_unless_said() -> None:
    ours, rival = GPSettings(), GPSettings(model="perceiver-io")
    assert ours.resolved().residual == "normalised" and rival.resolved().residual == "pre"
    assert replace(rival, preset="paper").resolved().residual == "normalised"
    assert replace(rival, residual="normalised").resolved().residual == "normalised"
    assert [s.make_model().config.residual for s in (ours, rival)] == ["normalised", "pre"]


@each
def test_names_tell_runs_apart(settings: Settings) -> None:
    changes = [{}, {"seed": 1}, {"branch": 4}, {"preset": "paper"}, {"quick": True}]
    assert len({replace(settings, **change).name for change in changes}) == len(changes)


@pytest.mark.parametrize(
    ("settings", "parameters"),
    [
        (GPSettings(), 366_786),
        (GPSettings(model="transformer-ca"), 325_186),
        (EmnistSettings(), 366_914),
        (EmnistSettings(model="transformer-ca"), 325_314),
        (CelebASettings(), 367_558),
        (CelebASettings(model="transformer-ca"), 325_958),
        (CopySettings(), 185_996),
        (CopySettings(model="ca"), 144_396),
    ],
    ids=lambda value: value.name if isinstance(value, Settings) else "",
)
def test_published_models_have_the_paper_codes_sizes(settings: Settings, parameters: int) -> None:
    """Ours have a final norm of 128 parameters more, and one for the tokens attended to."""
    count = sum(p.numel() for p in replace(settings, preset="paper").resolved().make_model().parameters())
    assert abs(count - parameters) <= 0.01 * parameters
    ours = sum(p.numel() for p in settings.make_model().parameters())
    assert abs(ours - parameters) <= 0.01 * parameters


def test_what_is_said_by_hand_holds_beside_the_preset() -> None:
    """Otherwise a run's config.json would tell what the run did not do."""

    def chosen(**more: float) -> tuple[float, str]:
        objective = CopySettings(n=16, preset="paper", **more).resolved().make_model().config.objective  # type: ignore[arg-type]
        return objective.detours, objective.gate

    assert chosen() == (0.0, "open") and chosen(detours=0.3) == (0.3, "open")


def test_tokens_are_those_of_the_paper() -> None:
    tokens = {s.task: (s.make_model().tokens(s.context), s.context) for s in ALL}
    assert tokens == {
        "copy": (8, 128), "gp": (7, 47), "emnist": (9, 197), "celeba": (9, 197), "activity": (7, 50),
    }  # fmt: skip
    perceiver = GPSettings(model="perceiver-io").make_model()
    assert perceiver.tokens(47) == 7
    assert GPSettings(model="perceiver-io", latents=32).make_model().tokens(47) == 32


def test_the_command_line_has_the_recipes_defaults() -> None:
    for launch, settings in zip((TrainCopy, TrainGP, TrainEmnist, TrainCelebA, TrainActivity), ALL, strict=True):
        assert launch().settings() == [settings.resolved()]


def test_one_settings_object_per_seed() -> None:
    launch = TrainGP(seeds=(3, 5), quick=True, model="transformer-ca")
    assert [s.seed for s in launch.settings()] == [3, 5]
    assert all(type(s) is GPSettings and s.layers == 2 for s in launch.settings())


def test_missing_data_is_one_line_that_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "emnist", "--quick", "--data", str(tmp_path), "--out", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "emnist" in error
    assert not (tmp_path / "runs").exists()


def test_the_oracle_wants_a_task_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "copy", "--model", "oracle"]) == 2
    assert "what: expected gp" in capsys.readouterr().err
