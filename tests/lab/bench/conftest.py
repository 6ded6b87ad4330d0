"""Benchmarks look for garbage before they measure, which takes long among all that other tests have imported."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def little_to_look_through() -> None:
    gc.freeze()
