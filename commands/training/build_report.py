"""The report at the end of `spangrad build --all`: numbers of transitions and of drops by reason, remedies, and the check of their sum.

Invariant: a wrong sum is printed last, in red, with the rollouts whose calls are unaccounted for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.text import Text

from commands.console import plain_console, plain_table
from spangrad.store.rollout.record import counted
from spangrad.types import remedy

if TYPE_CHECKING:
    from rich.console import RenderableType

    from transition_builder.report import ReconcileReport


def show(report: ReconcileReport, console: Console | None = None) -> int:
    """Print a report, and return the exit code: 1 if calls are unaccounted for, else 0."""
    out = console or plain_console()
    out.print(render(report))
    return 0 if report.is_right else 1


def render(report: ReconcileReport) -> RenderableType:
    """Return the report's heading, its table, and the sentence on the sum."""
    head = Text(f"What became of the calls of {counted(report.rollouts, 'rollout')}", "bold")
    table = plain_table("", "calls", "remedy", right=[1])
    table.add_row("transitions", str(report.transitions), "", style="green" if report.transitions else "")
    for reason, count in report.drops.items():
        table.add_row(f"dropped as {reason}", str(count), remedy(reason))
    table.add_row("calls", str(report.calls), "", style="bold")
    for reason, count in report.empty.items():
        table.add_row(f"rollouts without calls, {reason}", str(count), remedy(reason))
    return Group(head, table, _verdict(report))


def _verdict(report: ReconcileReport) -> Text:
    calls = counted(report.calls, "call")
    summed = f"{counted(report.transitions, 'transition')} + {counted(report.dropped, 'drop')}"
    if report.is_right:
        return Text(f"The sum is right: {calls} = {summed}, and the gateway recorded no other.", "green")
    unaccounted, missing = sum(rollout.unaccounted for rollout in report.wrong), sum(rollout.missing for rollout in report.wrong)
    text = Text(f"THE SUM IS WRONG: {calls}, {summed}; {unaccounted} unaccounted for, {missing} recorded and not built.", "bold red")
    if report.wrong:
        text.append(f"\n{_named(report)}")
        text.append(
            "\nCalls that arrived while this was built are taken up by the next build; a sum that stays wrong is a bug of the builder."
        )
    return text


def _named(report: ReconcileReport) -> str:
    from transition_builder.report import MOST_WRONG

    names = [f"{rollout.rollout_id} of run {rollout.run_id or '(none)'}" for rollout in report.wrong]
    more = f" and {len(names) - MOST_WRONG} more" if len(names) > MOST_WRONG else ""
    return f"Rollouts: {', '.join(names[:MOST_WRONG])}{more}."
