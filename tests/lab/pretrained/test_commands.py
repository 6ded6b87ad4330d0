"""`retreever eval --pretrained`, `retreever pretrained list` and `page`."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from retreever.cli import main
from retreever.errors import InputError
from retreever.lab.pretrained.page import make_page
from retreever.lab.recipes import command
from retreever.lab.recipes.command import scores_of
from retreever.lab.recipes.recipe import make_recipe
from retreever.pretrained.card import Card, read_card


def with_card(folder: Path, card: Card) -> None:
    (folder / "tiny.json").write_text(card.to_text())


def test_scores_are_reproduced(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--pretrained", "tiny", "--weights", str(exported), "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    card = read_card("tiny", exported)
    assert len(lines) == len(card.scores) + 1 and lines[-1] == "tiny: reproduced to 0.001"
    assert lines[0] == f"tiny: test: accuracy in % {card.scores['test']:.4f}, card {card.scores['test']:.4f}, +0.0e+00"


@pytest.mark.parametrize(("times", "code"), [(1.0005, 0), (0.9995, 0), (1.002, 1), (0.998, 1)])
def test_other_scores_end_with_1(folder: Path, capsys: pytest.CaptureFixture[str], times: float, code: int) -> None:
    card = read_card("tiny", folder)
    with_card(folder, replace(card, scores=card.scores | {"test": card.scores["test"] * times}))
    assert main(["eval", "--pretrained", "tiny", "--weights", str(folder), "--device", "cpu"]) == code
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("tiny: NOT reproduced to 0.001: test; the card's data: generated" if code else "tiny: repro")


def test_differences_are_relative_above_one_and_absolute_below(exported: Path) -> None:
    card = replace(read_card("tiny", exported), scores={"a": 0.01, "b": -50.0})
    assert card.differs({"a": 0.0109, "b": -50.04}) == []
    assert card.differs({"a": 0.0111, "b": -50.06}) == ["a", "b"]
    assert card.differs({"a": float("nan")}) == ["a", "b"]  # not scored is not reproduced


def test_runs_are_scored_as_ever(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(trained), "--device", "cpu"]) == 0
    assert f"{trained}: test accuracy in % after" in capsys.readouterr().out


def scores_in(printed: str) -> list[float]:
    """The score of the search, and over all leaves."""
    return [float(score) for score in re.findall(r"(?:test|full) (\d+\.\d+)", printed)]


def test_a_budget_is_read_in_place_of_the_runs_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained with a budget of 6 of 8 tokens, scored again with that, with one path and with all."""
    monkeypatch.setattr(command, "QUICK_BATCHES", 5)
    few = ["--quick", "--steps", "4", "--batch", "8", "--warmup", "1", "--evaluate-every", "4", "--save-every", "4"]
    assert main(["train", "copy", "--n", "16", "--budget", "6", *few, "--device", "cpu", "--out", str(tmp_path)]) == 0
    run = tmp_path / "copy-16-tca-budget6-quick-seed0"
    own = json.loads((run / "result.json").read_text())
    assert own["tokens"] == 6
    scores = {}
    for budget in ((), ("--budget", "1"), ("--budget", "6"), ("--budget", "8")):
        capsys.readouterr()
        assert main(["eval", str(run), *budget, "--device", "cpu"]) == 0
        printed = capsys.readouterr().out
        assert ("with a budget of" in printed) is bool(budget)
        scores[budget] = scores_in(printed)
    assert scores[()] == scores["--budget", "6"] != scores["--budget", "1"]
    assert scores[()][0] == pytest.approx(own["scores"]["test"], abs=1e-4)
    assert len({full for _, full in scores.values()}) == 1  # all leaves are all leaves, whatever the budget
    assert scores["--budget", "8"][0] == pytest.approx(scores["--budget", "8"][1], abs=0.01)


def test_pretrained_weights_are_scored_with_a_budget(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The card has the scores of one path, so nothing is said of reproduction."""
    arguments = ["eval", "--pretrained", "tiny", "--weights", str(exported), "--device", "cpu", "--budget"]
    assert main([*arguments, "1"]) == 0
    printed = capsys.readouterr().out
    assert scores_in(printed)[0] == pytest.approx(read_card("tiny", exported).scores["test"], abs=1e-4)
    assert printed.startswith("tiny: test accuracy in % with a budget of 1 tokens: ") and "reproduced" not in printed


def test_only_trees_have_a_budget() -> None:
    recipe = make_recipe("copy", n=8, model="ca")
    with pytest.raises(InputError, match=r"^budget: expected a model that searches a tree, got TransformerCA$"):
        scores_of(recipe, recipe.make_model(), None, "cpu", budget=3)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "what: expected the folder of a run, or --pretrained NAME, got none"),
        (["run", "--pretrained", "tiny"], "pretrained: expected either"),
        (["--model", "oracle", "--pretrained", "tiny"], "pretrained: expected either"),
        (["run", "--weights", "."], "weights: expected --pretrained NAME with it"),
        (["--pretrained", "no-such-name"], "name: expected"),
        (["--pretrained", "tiny", "--weights", "FOLDER", "--device", "teapot"], "device: expected"),
        (["--pretrained", "tiny", "--weights", "FOLDER", "--budget", "0"], "budget: expected an int >= 1, got 0"),
        (["gp", "--model", "oracle", "--budget", "4"], "budget: expected a trained model that searches a tree"),
    ],
)
def test_bad_requests_get_one_line(
    arguments: list[str], expected: str, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *(word.replace("FOLDER", str(exported)) for word in arguments)]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1


def test_missing_data_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from retreever.lab.recipes.tasks import CopySettings, EmnistSettings

    monkeypatch.setattr(CopySettings, "make_tests", EmnistSettings.make_tests)
    assert main(["eval", "--pretrained", "tiny", "--weights", str(folder), "--data", str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err
    assert "emnist: expected" in error and "retreever data fetch emnist" in error and error.count("\n") == 1


def test_weights_are_listed(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrained", "list", "--weights", str(exported)]) == 0
    assert "| tiny | copy | tca   | 3 of 4 |" in capsys.readouterr().out
    assert main(["pretrained", "list", "--weights", str(exported), "--json"]) == 0
    (card,) = json.loads(capsys.readouterr().out)
    assert Card(**card) == read_card("tiny", exported)
    assert main(["pretrained", "list", "--weights", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no weights in {tmp_path}\n"


def test_the_page_tells_all_of_the_card(exported: Path, tmp_path: Path) -> None:
    assert main(["pretrained", "page", "--weights", str(exported), "--out", str(tmp_path / "page.md")]) == 0
    page, card = (tmp_path / "page.md").read_text(), read_card("tiny", exported)
    told = (
        card.data,
        card.terms,
        card.limits,
        card.use,
        card.sha256,
        card.hardware,
        card.license,
        'load_pretrained("tiny")',
    )
    assert all(text in page for text in told) and f"test {card.scores['test']:.4f}" in page
    assert make_page([]).endswith("There are none in this version.\n")
