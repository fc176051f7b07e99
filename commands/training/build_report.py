"""The table at the end of `spangrad build --all`: what became of every call, what to do about the dropped ones, and that the sum is right.

In: a `ReconcileReport`. Out: a table on the terminal, and an exit code. Invariant: a sum that is wrong is said last and loudly, with the
rollouts that it is wrong for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from commands.console import plain_console
from spangrad.types import DropReason

if TYPE_CHECKING:
    from rich.console import RenderableType

    from transition_builder.report import ReconcileReport

_PIPE_WIDTH = 160


def show(report: ReconcileReport, console: Console | None = None) -> int:
    """Print a report, and give the exit code: 1 where calls are unaccounted for."""
    out = console or plain_console(_PIPE_WIDTH)
    out.print(render(report))
    return 0 if report.is_right else 1


def render(report: ReconcileReport) -> RenderableType:
    """The table, and the sentence below it."""
    head = Text(f"What became of the calls of {_counted(report.rollouts, 'rollout')}", "bold")
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("calls", justify="right")
    table.add_column("remedy", overflow="fold")
    table.add_row("transitions", str(report.transitions), "", style="green" if report.transitions else "")
    for reason, count in report.drops.items():
        table.add_row(f"dropped as {reason}", str(count), remedy(reason))
    table.add_row("calls", str(report.calls), "", style="bold")
    for reason, count in report.empty.items():
        table.add_row(f"rollouts without calls, {reason}", str(count), remedy(reason))
    return Group(head, table, _verdict(report))


def _verdict(report: ReconcileReport) -> Text:
    summed = f"{report.transitions} transitions + {report.dropped} drops"
    if report.is_right:
        return Text(f"The sum is right: {report.calls} calls = {summed}, and the gateway recorded no other.", "green")
    unaccounted, missing = sum(one.unaccounted for one in report.wrong), sum(one.missing for one in report.wrong)
    text = Text(
        f"THE SUM IS WRONG: {report.calls} calls, {summed}; {unaccounted} unaccounted for, {missing} recorded and not built.", "bold red"
    )
    if report.wrong:
        text.append(f"\n{_named(report)}")
        text.append(
            "\nCalls that arrived while this was built are taken up by the next build; a sum that stays wrong is a fault of the builder."
        )
    return text


def _named(report: ReconcileReport) -> str:
    from transition_builder.report import MOST_WRONG

    names = [f"{one.rollout_id} of run {one.run_id or '(none)'}" for one in report.wrong]
    more = f" and {len(names) - MOST_WRONG} more" if len(names) > MOST_WRONG else ""
    return f"Rollouts: {', '.join(names[:MOST_WRONG])}{more}."


def remedy(reason: str) -> str:
    """Of a reason, as far as this version knows it: a newer builder may have written others."""
    return DropReason(reason).remedy if reason in set(DropReason) else ""


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"
