"""Display of a supervisor's status: a table for a terminal, lines for a log.

In: the status of the services, and what the store says of the training. Out: text. Invariant: pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

_COLOURS = {"ready": "green", "done": "green", "failed": "red", "restarting": "yellow", "no answer": "yellow"}
REASON_CHARACTERS = 200
"""Longest cause or obstacle that is shown, in characters."""


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Progress of the training, as far as it is known."""

    untrained: int | None = None
    """Rollouts of a day that were built and are not trained: they wait, or their groups are skipped."""
    step: int | None = None
    mean_return: float | None = None
    """Mean return of the last step's rollouts."""
    idle_share: float | None = None
    """Share of the last step's time in which the trainer waited for rollouts, from 0 to 1."""

    def __str__(self) -> str:
        """Return one line; a dash stands for what is unknown."""
        step = "-" if self.step is None else str(self.step)
        untrained = "-" if self.untrained is None else str(self.untrained)
        mean_return = "-" if self.mean_return is None else f"{self.mean_return:+.3f}"
        idle = "-" if self.idle_share is None else f"{self.idle_share:.0%}"
        return f"step {step}   return {mean_return}   untrained rollouts {untrained}   trainer idle {idle}"


def status_table(services: Sequence[Mapping[str, Any]], progress: TrainingProgress | None, hint: str = "") -> RenderableType:
    """Return the status as a table, with a line about the training below it."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    nodes = any(service["node"] for service in services)
    table = Table("service", "state", "for", "restarts", *(["node"] if nodes else []), "pid", "log", box=None, pad_edge=False)
    for service in services:
        table.add_row(
            service["name"],
            Text(_state(service), _COLOURS.get(service["state"], "dim")),
            _duration(service["seconds"]),
            str(service["restarts"]),
            *([service["node"] or "-"] if nodes else []),
            str(service["pid"] or "-"),
            service["log"],
        )
    causes = [
        Text(f"{service['name']}: {reason[:REASON_CHARACTERS]}", "yellow")
        for service in services
        if service["state"] not in {"ready", "done"}
        for reason in (service["cause"], service["obstacle"])
        if reason
    ]
    if any(service["state"] == "failed" for service in services):
        causes.append(Text("What has failed is not started again: fix the cause, then call `spangrad down` and `spangrad up`.", "red"))
    return Group(table, *causes, *([Text(f"\n{progress}")] if progress else []), *([Text(hint, "dim")] if hint else []))


def _state(service: Mapping[str, Any]) -> str:
    waits_for = ", ".join(service["waits_for"])
    return f"{service['state']} for {waits_for}" if waits_for else str(service["state"])


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
