"""`spangrad queue`: serve the queue of rollouts, and look after it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import App, Parameter

from commands.options import ConfigFile, Overrides, log_to_stderr, resolve
from spangrad.agent.reward_values import entries
from spangrad.errors import QueueError, SettingsError

if TYPE_CHECKING:
    from rich.table import Table

    from runner.queue.client import QueueClient
    from runner.queue.wire import Attempt, Cancelled, Rollout, State, Which

T = TypeVar("T")
_PIPE_WIDTH = 200
_PATIENCE_SECONDS = 5
"""People do not wait for a queue that is away."""

queue = App(name="queue", help="Serve the queue of rollouts; look at them, cancel them, retry the dead.")
RunId = Annotated[str | None, Parameter(name="--run", help="A run; by default all of them.")]
OneRun = Annotated[str | None, Parameter(name="--run", help="A run; all its rollouts, unless --group names fewer.")]


@queue.default
def _serve(*, port: int | None = None, db: str | None = None, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Serve the queue until it is told to end.

    Args:
        port: where it listens; runner.queue_port by default.
        db: sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME; runner.queue_db by default.
    """
    settings = resolve(config, set_, {"runner.queue_port": port, "runner.queue_db": db})
    log_to_stderr()
    from runner.queue.server import serve

    serve(settings.runner)


@queue.command(name="list")
def _list(
    *,
    run: RunId = None,
    state: str | None = None,
    group: str | None = None,
    limit: int = 50,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Count the rollouts of each run by state; with --run, --state or --group, list them.

    Args:
        state: queued, running, succeeded, failed, dead or cancelled.
        group: a group of the run.
        limit: rollouts at most.
    """
    from rich.table import Table

    from commands.console import plain_console
    from runner.queue.wire import State

    console = plain_console(_PIPE_WIDTH)
    if run is None and state is None and group is None:
        table = Table("run", *[one.value for one in State], box=None, pad_edge=False)
        for one in _ask(config, set_, lambda client: client.runs()):
            table.add_row(one.run_id, *[str(one.states.get(state, 0)) for state in State])
        console.print(table)
        return
    wanted = _state(state)
    found = _ask(config, set_, lambda client: client.rollouts(run_id=run, state=wanted, group_id=group, limit=limit))
    console.print(_table(found.rollouts))


@queue.command(name="dead")
def _dead(*, run: RunId = None, limit: int = 50, config: ConfigFile = None, set_: Overrides = None) -> None:
    """List the rollouts of which each attempt failed, and what the last one failed of.

    Args:
        limit: rollouts at most.
    """
    from commands.console import plain_console
    from runner.queue.wire import State

    found = _ask(config, set_, lambda client: client.rollouts(run_id=run, state=State.DEAD, limit=limit))
    plain_console(_PIPE_WIDTH).print(_table(found.rollouts))


@queue.command(name="show")
def _show(rollout: str, /, *, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Print a rollout and each of its attempts.

    Args:
        rollout: its id.
    """
    from rich.table import Table

    from commands.console import plain_console

    found = _ask(config, set_, lambda client: client.rollout(rollout))
    print(f"rollout   {found.rollout_id} of run {found.run_id} ({found.mode})")
    print(f"task      {found.task_id}, group {found.group_id} of {found.group_size}, priority {found.priority}")
    print(f"state     {found.state}, {found.attempts_left} attempts left, {found.timeout_seconds:g} s each")
    table = Table("attempt", "worker", "began", "seconds", "end", "calls", "", box=None, pad_edge=False)
    for one in found.attempts:
        calls = "-" if one.calls is None else str(one.calls)
        table.add_row(str(one.attempt), one.worker, _time(one.began_at), _seconds(one), _end(one), calls, one.detail or _rewards(one))
    if found.attempts:
        plain_console(_PIPE_WIDTH).print(table)


@queue.command(name="cancel")
def _cancel(*rollouts: str, run: OneRun = None, group: str | None = None, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Cancel rollouts, queued or running: those that are named, a group, or a whole run.

    Args:
        rollouts: their ids.
        group: a group of the run.
    """
    which = _which(rollouts, run, group)

    async def cancelled(client: QueueClient) -> Cancelled:
        await _require(client, which)
        return await client.cancel(which)

    done = _ask(config, set_, cancelled)
    print(f"cancelled: {done.queued} that were queued, {done.running} that were running")


@queue.command(name="retry")
def _retry(*rollouts: str, run: OneRun = None, group: str | None = None, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Queue the dead again, each for as many attempts as a new rollout has.

    Args:
        rollouts: their ids.
        group: a group of the run.
    """
    which = _which(rollouts, run, group)

    async def retried(client: QueueClient) -> int:
        await _require(client, which)
        return await client.retry(which)

    print(f"queued again: {_ask(config, set_, retried)}")


@queue.command(name="purge")
def _purge(*, older_than_days: float | None = None, run: RunId = None, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Forget rollouts that have ended, with their attempts; each run's newest one stays.

    Args:
        older_than_days: that they ended before; runner.queue_keep_days by default.
    """
    days = resolve(config, set_).runner.queue_keep_days if older_than_days is None else older_than_days
    if days is None:
        raise SettingsError("name --older-than-days DAYS: runner.queue_keep_days is not set.")
    if days < 0:
        raise SettingsError(f"--older-than-days {days:g} is less than 0. Name how many days ago rollouts must have ended: 0 for all.")
    print(f"forgotten: {_ask(config, set_, lambda client: client.purge(days * 86400, run))}")


def _ask(config: Path | None, set_: list[str] | None, what: Callable[[QueueClient], Coroutine[Any, Any, T]]) -> T:
    """What the queue answers."""
    from runner.queue.client import PlainQueue, QueueClient

    settings = resolve(config, set_)
    with PlainQueue(QueueClient.of(settings.runner, patience_seconds=_PATIENCE_SECONDS)) as plain:
        return plain.wait(what(plain.client))


def _which(rollouts: Sequence[str], run: str | None, group: str | None) -> Which:
    from runner.queue.wire import Which

    if bool(rollouts) == bool(run):
        raise SettingsError("name rollouts, or --run RUN (and --group GROUP).")
    if group and not run:
        raise SettingsError("--group needs the --run that it belongs to.")
    return Which(rollout_ids=list(rollouts)) if rollouts else Which(run_id=run, group_id=group)


async def _require(client: QueueClient, which: Which) -> None:
    """See that the queue knows what is named, before anything is done to any of it.

    Raises:
        QueueError: it does not.
    """
    for one in which.rollout_ids or ():
        await client.rollout(one)
    if which.run_id is not None and not (await client.rollouts(run_id=which.run_id, group_id=which.group_id, limit=1)).rollouts:
        of = f"run {which.run_id}" if which.group_id is None else f"group {which.group_id} of run {which.run_id}"
        raise QueueError(f"the queue at {client.url} has no rollout of {of}. `spangrad queue list` shows what it has.")


def _state(text: str | None) -> State | None:
    from runner.queue.wire import State

    if text is not None and text not in list(State):
        raise SettingsError(f"--state {text!r} is none. A rollout is {', '.join(State)}.")
    return State(text) if text else None


def _table(rollouts: Sequence[Rollout]) -> Table:
    from rich.table import Table

    table = Table("rollout", "run", "group", "task", "mode", "state", "attempts", "last attempt", box=None, pad_edge=False)
    for one in rollouts:
        last = one.attempts[-1] if one.attempts else None
        told = f"{_end(last)} {last.detail}".strip() if last else "-"
        count = str(last.attempt + 1 if last else 0)
        table.add_row(one.rollout_id, one.run_id, one.group_id, one.task_id, one.mode.value, one.state.value, count, told)
    return table


def _end(attempt: Attempt) -> str:
    if attempt.ended_at is None:
        return "under way"
    return attempt.reason.value if attempt.reason else "succeeded"


def _seconds(attempt: Attempt) -> str:
    return "-" if attempt.seconds is None else f"{attempt.seconds:.1f}"


def _rewards(attempt: Attempt) -> str:
    return " ".join(f"{name}{f'[{role}]' if role else ''}={value:g}" for name, role, value in entries(attempt.rewards or {}))


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
