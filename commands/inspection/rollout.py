"""`spangrad rollout`: one rollout, as the span store, the ledger and the runner's attempt logs show it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from commands.options import ConfigFile, Overrides, resolve
from commands.stopped_store import answering_store
from spangrad.settings import Settings

if TYPE_CHECKING:
    from spangrad.store.rollout.record import Record

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
    """Read a rollout's record from the store that answers.

    Raises:
        StoreError: the store holds no span of it.
    """
    from commands.inspection.records import read_record
    from spangrad.store.clickhouse import connect, store_errors

    with answering_store(settings.store) as store, closing(connect(store)) as client, store_errors(store.url):
        return read_record(client, settings.model_copy(update={"store": store}), id_, attempt)
