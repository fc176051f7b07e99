"""`spangrad rollout`: one rollout, as the span store, the ledger and the runner's attempt logs show it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from commands.options import ConfigFile, Overrides, resolve
from commands.stopped_store import answering_store
from spangrad.errors import LedgerError, StoreError
from spangrad.settings import Settings

if TYPE_CHECKING:
    from spangrad.store.rollout.reader import SkipLookup
    from spangrad.store.rollout.record import Record
    from trainer.ledger.ledger import Ledger

_PIPE_WIDTH = 160
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
        width: width of the output in columns; default: that of the terminal, or 160.
    """
    from commands.console import plain_console
    from commands.inspection.rollout_tree import draw

    settings = resolve(config, set_)
    record = _ask(id_, attempt, settings)
    console = plain_console(_PIPE_WIDTH, width=width)
    console.print(draw(record))
    for line in _kept(settings, id_, attempt):
        console.print(line, highlight=False)


def _kept(settings: Settings, id_: str, attempt: int | None) -> Iterator[str]:
    """Yield lines from the runner's files on this machine: how each attempt ended, and the last lines of its logs."""
    from runner.workers.attempt_files import AttemptFiles

    for attempt_files in AttemptFiles(settings.runner.directory, settings.runner.attempts_kept).kept(id_):
        if attempt in {None, attempt_files.attempt}:
            end = attempt_files.end
            outcome = f"{end['reason'] or 'succeeded'} {end['detail']}".strip() if end else "its worker did not say how it ended"
            yield f"attempt {attempt_files.attempt}: {outcome}"
            if stages := end.get("stages"):
                yield "  " + ", ".join(f"{stage} {seconds:.3g} s" for stage, seconds in stages.items())
            if attempt_files.log is not None:
                yield f"  the end of {attempt_files.log}:"
                yield from (f"  | {line}" for line in attempt_files.log.read_text(errors="replace").splitlines()[-_LOG_LINES:])


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
    """Read everything that the store and the ledger hold of a rollout.

    Raises:
        StoreError: the store holds no span of it.
    """
    from commands.inspection.span_kinds import describe
    from spangrad.store.clickhouse import connect, store_errors
    from spangrad.store.rollout.reader import read, similar_ids

    ledger, error = _ledger(settings)
    with (
        closing(ledger) if ledger else nullcontext(),
        answering_store(settings.store) as store,
        closing(connect(store)) as client,
        store_errors(store.url),
    ):
        record = replace(read(client, id_, describe, attempt, _skip_lookup(ledger) if ledger else None), ledger_silent=error)
        similar = "" if record.spans else similar_ids(client, id_, attempt)
    if not record.spans:
        what = f"rollout {id_!r}" if attempt is None else f"attempt {attempt} of rollout {id_!r}"
        raise StoreError(f"the store at {store.url} holds no span of {what}. {similar}")
    return record


def _ledger(settings: Settings) -> tuple[Ledger | None, str]:
    """Return the trainers' ledger, or None and the reason if it cannot be read: the store's part is then shown without it."""
    from trainer.ledger.recovery import existing_ledger

    try:
        return existing_ledger(settings), ""
    except LedgerError as error:
        return None, str(error)


def _skip_lookup(ledger: Ledger) -> SkipLookup:
    from trainer.data.source import Group
    from trainer.ledger.policies import skipped_by

    def of(run: str, mode: str, spec: str, group: str) -> list[tuple[str, str, str, str]]:
        return skipped_by(ledger.database, Group(run, mode, spec, group))

    return of
