"""`spangrad rollout`: one rollout as the store knows it."""

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
    from commands.inspection.rollout_reader import SkipLookup
    from commands.inspection.rollout_record import Record
    from trainer.ledger.ledger import Ledger

_PIPE_WIDTH = 160
_LOG_LINES = 20
"""Shown of what an attempt printed."""

rollout = App(name="rollout", help="Look at one rollout.")


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
    """Print a rollout's tree of spans: agents, calls, tools, tokens, policy versions, rewards, and what the builder made of each call.

    Asks the store at store.url. When nobody answers there, the data of a store that has stopped (store.path, else the last
    demo's) is opened for the time of the question.

    Args:
        id_: of the rollout; of a session, conversation or trace that no runner announced.
        attempt: show this attempt alone.
        width: columns of the terminal.
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
    """What this machine's runner keeps of the attempts: how they ended, and the end of what they printed."""
    from runner.workers.attempt_files import AttemptFiles

    for one in AttemptFiles(settings.runner.directory, settings.runner.attempts_kept).kept(id_):
        if attempt in {None, one.attempt}:
            end = one.end
            told = f"{end['reason'] or 'succeeded'} {end['detail']}".strip() if end else "its worker did not say how it ended"
            yield f"attempt {one.attempt}: {told}"
            if stages := end.get("stages"):
                yield "  " + ", ".join(f"{stage} {seconds:.3g} s" for stage, seconds in stages.items())
            if one.log is not None:
                yield f"  the end of {one.log}:"
                yield from (f"  | {line}" for line in one.log.read_text(errors="replace").splitlines()[-_LOG_LINES:])


@rollout.command(name="why")
def _why(id_: Annotated[str, Parameter(name="ID")], /, *, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Explain a rollout in sentences: whether it is complete, what became of each call and why, what trained on it, what it waits for.

    Asks the store, as `spangrad rollout show` does.

    Args:
        id_: of the rollout; of a session, conversation or trace that no runner announced.
    """
    from commands.inspection.rollout_why import explain

    settings = resolve(config, set_)
    print("\n".join(explain(_ask(id_, None, settings), settings)))


def _ask(id_: str, attempt: int | None, settings: Settings) -> Record:
    """What the store holds of a rollout.

    Raises:
        StoreError: nothing.
    """
    from commands.inspection.rollout_reader import near, read
    from spangrad.store.clickhouse import connect, store_errors

    ledger, silent = _ledger(settings)
    with (
        closing(ledger) if ledger else nullcontext(),
        answering_store(settings.store) as store,
        closing(connect(store)) as client,
        store_errors(store.url),
    ):
        record = replace(read(client, id_, attempt, _skip_lookup(ledger) if ledger else None), ledger_silent=silent)
        alike = "" if record.spans else near(client, id_, attempt)
    if not record.spans:
        what = f"rollout {id_!r}" if attempt is None else f"attempt {attempt} of rollout {id_!r}"
        raise StoreError(f"the store at {store.url} holds no span of {what}. {alike}")
    return record


def _ledger(settings: Settings) -> tuple[Ledger | None, str]:
    """The trainers' ledger, and why it is silent: what the store knows of a rollout is told without it, too."""
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
