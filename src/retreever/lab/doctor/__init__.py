"""`retreever doctor`: what is installed, and whether every backend computes correct results on every device."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from retreever.lab.doctor.checks import Check, collect
from retreever.lab.doctor.installed import facts

__all__ = ["Check", "collect", "facts", "run_doctor", "to_json"]

_STYLES = {"ok": "green", "wrong": "bold red", "not available": "dim"}


def run_doctor() -> int:
    """Print versions, devices, settings and the results of all checks. Returns 1 when a check fails, else 0."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    for heading, lines in facts().items():
        console.print(heading, style="bold")
        for name, value in lines.items():
            console.print(f"  {name:<16} {value}")
    with console.status("computing on every device with every backend"):
        checks = collect()
    console.print("checks", style="bold")
    for check in checks:
        console.print(f"  {describe(check)}", style=_STYLES[check.status])
    wrong = [f"{check.name} on {check.device}" for check in checks if check.status == "wrong"]
    console.print(f"wrong: {', '.join(wrong)}" if wrong else "nothing is wrong", style="bold")
    return 1 if wrong else 0


def describe(check: Check) -> str:
    """A check in one line."""
    return f"{check.name:<16} {check.device:<7} {check.status:<13} {check.milliseconds:7,.0f} ms  {check.detail}"


def to_json(checks: list[Check]) -> dict[str, Any]:
    """Facts and checks, ready for a file."""
    return {"facts": facts(), "checks": [asdict(check) for check in checks]}
