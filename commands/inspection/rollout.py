"""`spangrad rollout`: one rollout, as the span store and the ledger show it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from commands.options import ConfigFile, Overrides, resolve
from commands.stopped_store import answering_client
from spangrad import semconv
from spangrad.errors import SettingsError
from spangrad.settings import Settings

if TYPE_CHECKING:
    from spangrad.store.rollout.record import Record

_LOG_LINES = 20
"""Lines that are shown of an attempt's log, from its end."""

rollout = App(name="rollout", help="Show a rollout's spans, and explain why it was trained or not.")


@rollout.command(name="show")
def _show(
    id_: Annotated[str, Parameter(name="ID")],
    /,
    *,
    attempt: int | None = None,
    width: int | None = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Print a rollout's tree of spans: agents, calls, tools, tokens, policy versions, rewards, and the transition or drop of each call.

    Queries the store at store.url. If no store answers there, the data of a stopped store (store.path, else the last demo's) is opened
    for the time of the query.

    Args:
        id_: id of the rollout; for spans without a runner, id of the session, conversation or trace.
        attempt: show only the attempt of this number, from 0.
        width: width of the output in columns; default: that of the terminal; 10000 where there is none.
    """
    from commands.console import plain_console
    from commands.inspection.rollout_tree import draw

    if width is not None and width < 1:
        raise SettingsError(f"--width {width} is no width. Give a number of columns, 1 or more.")
    settings = resolve(config, set_)
    record = _ask(id_, attempt, settings)
    console = plain_console(width=width)
    console.print(draw(record))
    for line in _attempts(record, settings):
        console.print(line, highlight=False)


def _attempts(record: Record, settings: Settings) -> Iterator[str]:
    """Yield lines about attempts that failed or printed: their ends, the ends of their logs, and the whole logs on this machine."""
    from runner.workers.attempt_files import AttemptFiles

    logs = AttemptFiles(settings.runner.directory, settings.runner.attempts_kept).logs(record.rollout)
    for root in sorted((span for span in record.spans if span.is_root), key=lambda span: span.attempt):
        failure, partial = (root.attributes.get(name, "") for name in (semconv.ROLLOUT_FAILURE, semconv.ROLLOUT_PARTIAL))
        printed = root.attributes.get(semconv.ROLLOUT_LOG, "").splitlines()
        if not (failure or partial or printed):
            continue  # the tree says all
        outcome = f"{failure} {root.message}".strip() if failure else "succeeded"
        yield f"attempt {root.attempt}: {outcome}" + (f", with a partial result after {partial}" if partial else "")
        if printed:
            yield "  the end of its log:"
            yield from (f"  | {line}" for line in printed[-_LOG_LINES:])
        if root.attempt in logs:
            yield f"  the whole log: {logs[root.attempt]}"


@rollout.command(name="why")
def _why(id_: Annotated[str, Parameter(name="ID")], /, *, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Explain in sentences whether a rollout is complete, how each call was built and why, which versions trained on it, what it waits for.

    Queries the store in the same way as `spangrad rollout show`.

    Args:
        id_: id of the rollout; for spans without a runner, id of the session, conversation or trace.
    """
    from spangrad.store.rollout.why import explain

    settings = resolve(config, set_)
    print("\n".join(explain(_ask(id_, None, settings), settings)))


def _ask(id_: str, attempt: int | None, settings: Settings) -> Record:
    """Read a rollout's record from the store that answers."""
    from commands.inspection.records import read_record

    with answering_client(settings.store) as (client, store):
        return read_record(client, settings.model_copy(update={"store": store}), id_, attempt)
