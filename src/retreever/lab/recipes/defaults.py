"""Settings of the recipes: this library's defaults, and the changes of `--preset paper` and `--quick`.

docs/defaults.md gives the reasons.
"""

from __future__ import annotations

from typing import Any

from retreever.lab.recipes.models import NEURAL_PROCESSES

Values = dict[str, Any]

DEFAULTS: dict[str, Values] = {
    "copy": {
        "model": "tca", "order": "given", "reward": "accuracy", "dropout": 0.1, "detours": 0.1, "residual": "pre",
        "steps": 4_000, "batch": 64, "evaluate_every": 500, "save_every": 1_000,
    },
    "gp": {
        "steps": 50_000, "batch": 64, "lr": 2e-3, "warmup": 1_000, "evaluate_every": 2_500, "save_every": 2_500,
    },
    "emnist": {
        "steps": 48_000, "batch": 100, "lr": 1e-3, "warmup": 1_000, "evaluate_every": 2_000, "save_every": 2_000,
    },
    "celeba": {
        "steps": 100_000, "batch": 100, "lr": 1e-3, "warmup": 1_000, "evaluate_every": 5_000, "save_every": 5_000,
    },
    "activity": {
        "order": "given", "reward": "accuracy", "dropout": 0.1,
        "steps": 6_000, "batch": 64, "lr": 1e-3, "warmup": 500, "evaluate_every": 500, "save_every": 500,
    },
    "wheel": {
        "dim": 16, "layers": 4, "hidden": 64, "steps": 100_000, "batch": 8, "lr": 2e-3, "warmup": 1_000,
        "evaluate_every": 5_000, "save_every": 5_000,
    },
}  # fmt: skip

_PUBLISHED: Values = {"gate": "open", "detours": 0.0, "residual": "normalised", "warmup": 0, "lr": 5e-4}
_PUBLISHED |= {"precision": "fp32"}
_IMAGES: Values = _PUBLISHED | {"batch": 100, "clip": 0.0, "sizes": "batch"}
PUBLISHED: dict[str, Values] = {
    "copy": _PUBLISHED | {"betas": (0.1, 0.999), "steps": 100_000},
    "gp": _PUBLISHED | {"steps": 100_000, "batch": 16, "sizes": "batch"},
    "emnist": _IMAGES | {"steps": 48_000, "order": "axis", "axis": 0},
    "celeba": _IMAGES | {"steps": 365_400, "order": "axis", "axis": 1},
    "activity": _PUBLISHED | {"steps": 17_000, "batch": 256, "clip": 0.0, "dropout": 0.0, "crop": 0},
    "wheel": _PUBLISHED,
}

_QUICK_IMAGES: Values = {
    "steps": 300, "batch": 8, "warmup": 30, "layers": 2, "evaluate_every": 100, "save_every": 300, "sizes": "batch",
}  # fmt: skip
QUICK: dict[str, Values] = {
    "copy": {"n": 32, "steps": 600, "batch": 64, "warmup": 50, "evaluate_every": 100},
    "gp": {
        "steps": 600, "batch": 16, "warmup": 50, "layers": 2, "evaluate_every": 200, "save_every": 600,
        "sizes": "batch",
    },
    "emnist": _QUICK_IMAGES,
    "celeba": _QUICK_IMAGES,
    "activity": {
        "steps": 400, "batch": 32, "warmup": 40, "layers": 2, "evaluate_every": 100, "save_every": 400,
        "dropout": 0.0,
    },
    "wheel": {"steps": 300, "warmup": 30, "layers": 2, "evaluate_every": 100, "save_every": 300},
}  # fmt: skip


_CAUSAL: Values = {"state": 128, "crop": 40, "lr": 3e-3}
_WIDE: Values = {"dim": 128, "lr": 1e-3}  # cnp to banp
MODELS: dict[str, Values] = {  # what some models change in the defaults of their tasks
    **dict.fromkeys(("cnp", "canp", "np", "anp", "bnp", "banp"), _WIDE),
    "tnpd": {"lr": 1e-3},
    "lbanp": {"lr": 1e-3, "latents": 8},
    "cmanp": {"lr": 1e-3, "latents": 128},
    **dict.fromkeys(("rnn-impute", "rnn-decay", "grud"), _CAUSAL | {"steps": 12_000}),
    "ode-rnn": _CAUSAL,
    "ip-nets": _CAUSAL | {"dropout": 0.0},
    "seft": {"state": 128},
}


def defaults(task: str, preset: str = "default", quick: bool = False, model: str = "") -> Values:
    """All settings of the recipe of `task` for `model`; others have the default of their field.

    The code behind the published neural processes does not clip gradients.
    """
    published = PUBLISHED[task] | ({"clip": 0.0} if model in NEURAL_PROCESSES else {})
    own = DEFAULTS[task] | MODELS.get(model, {})
    return own | (published if preset == "paper" else {}) | (QUICK[task] if quick else {})
