"""The page and the table on the weights in the package, made from their cards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from retreever.errors import ConfigError
from retreever.files import write_text
from retreever.lab.tables import Table
from retreever.pretrained.card import Card, pretrained_names, read_card

HEAD = """# Pretrained weights

This page is made by `retreever pretrained page` from the cards beside the weights; changes by hand are lost.
Weights come with the package: loading needs no network, and every byte is checked against the card's sha256 first.
`retreever pretrained list` prints the table, `load_pretrained(NAME)` gives the model. Nothing trained on CelebA is
among them, because its makers allow no redistribution.
"""
NONE = """
There are none in this version.
"""
EXAMPLE = """
```python
from retreever import load_pretrained

model = load_pretrained("{name}")
print(sum(p.numel() for p in model.parameters()))
# {parameters}
```
"""
AGAIN = """
"Full" reads all leaves with the same weights. `retreever eval --pretrained {name}` scores again on the test sets and
exits with 1 where a score differs from the card's by more than its tolerance (relative where a score is larger than
one). Weights of your own runs are made by `retreever pretrained export RUN NAME` and loaded by
`load_pretrained(NAME, folder)`; `retreever eval --pretrained NAME --weights FOLDER` scores them.
"""


def read_cards(folder: str | Path | None = None) -> list[Card]:
    """All cards in the package, or in `folder`."""
    return [read_card(name, folder) for name in pretrained_names(folder)]


def cards_table(cards: Sequence[Card]) -> Table:
    """Table of the cards, one row each."""
    columns = ("Name", "Task", "Model", "Tokens", "Metric", "Test scores", "Steps", "Batch", "Seed", "kB")
    return Table("Pretrained weights", columns, tuple(_row(card) for card in cards))


def make_page(cards: Sequence[Card]) -> str:
    """The page's text."""
    if not cards:
        return HEAD + NONE
    first = cards[0]
    example = EXAMPLE.format(name=first.name, parameters=first.parameters)
    parts = [HEAD, example, "\n" + cards_table(cards).to_markdown(), AGAIN.format(name=first.name)]
    return "".join([*parts, *(_section(card) for card in cards)])


def write_page(folder: str | Path | None, out: Path) -> Path:
    """Write the page to `out`."""
    return write_text(out, make_page(read_cards(folder)), ConfigError)


def _row(card: Card) -> tuple[str | int, ...]:
    settings = card.settings
    tokens = f"{card.tokens} of {card.context}"
    scores = _scores(card, 3)
    return (
        card.name, settings["task"], settings["model"], tokens, card.metric, scores, card.steps, settings["batch"],
        settings["seed"], round(card.size / 1000),
    )  # fmt: skip


def _scores(card: Card, digits: int) -> str:
    return "; ".join(f"{name} {value:.{digits}f}" for name, value in card.scores.items())


def _section(card: Card) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in card.versions.items())
    trained = f"{card.steps:,} steps of batch {card.settings['batch']}, seed {card.settings['seed']}"
    lines = {
        "Use": card.use,
        "Limits": card.limits,
        "Data": f"{card.data}. Terms: {card.terms}.",
        "Training": f"{trained}, {card.seconds:,.0f} s on {card.hardware} ({versions}); weights of step "
        f"{card.best_step:,}, which did best on validation ({card.validation:.4f}).",
        "Scores": f"{card.metric}: {_scores(card, 4)}. Tolerance {card.tolerance:g}.",
        "File": f"`{card.name}.safetensors`, {card.size:,} bytes, {card.parameters:,} parameters, license "
        f"{card.license}, sha256 `{card.sha256}`.",
    }  # fmt: skip
    return f"\n## {card.name}\n\n{card.title}.\n\n" + "".join(f"- {key}: {text}\n" for key, text in lines.items())
