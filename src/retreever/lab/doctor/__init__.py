"""`retreever doctor`: what is installed, and whether every backend computes correct results on every device."""

from __future__ import annotations

from retreever.lab.doctor.checks import Check, collect
from retreever.lab.doctor.installed import facts

__all__ = ["Check", "collect", "facts", "run_doctor"]

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
        line = f"{check.name:<16} {check.device:<7} {check.status:<13} {check.milliseconds:7,.0f} ms  {check.detail}"
        console.print(f"  {line}", style=_STYLES[check.status])
    wrong = [f"{check.name} on {check.device}" for check in checks if check.status == "wrong"]
    console.print(f"wrong: {', '.join(wrong)}" if wrong else "nothing is wrong", style="bold")
    return 1 if wrong else 0
