"""`retreever eval --pretrained NAME`: computes the scores again and compares them with the card."""

from __future__ import annotations

from pathlib import Path

from retreever.lab.recipes.command import scores_of
from retreever.lab.recipes.recipe import recipe_from_json
from retreever.pretrained.card import read_card
from retreever.pretrained.load import load_weights


def evaluate_pretrained(name: str, folder: Path | None, data: Path | None, device: str) -> int:
    """Print every score and the card's; returns 1 when a score was not reproduced, else 0."""
    card = read_card(name, folder)
    scores = scores_of(recipe_from_json(card.settings), load_weights(card, folder), data, device)
    for key, expected in card.scores.items():
        if key in scores:
            print(f"{name}: {key}: {card.metric} {scores[key]:.4f}, card {expected:.4f}, {scores[key] - expected:+.1e}")
    if wrong := card.differs(scores):
        print(f"{name}: NOT reproduced to {card.tolerance:g}: {', '.join(wrong)}; the card's data: {card.data}")
        return 1
    print(f"{name}: reproduced to {card.tolerance:g}")
    return 0
