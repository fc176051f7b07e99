"""`spangrad queue`: the service that hands rollouts to workers, and commands to list, cancel, retry and delete rollouts in it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import App, Parameter

from commands.options import ConfigFile, Overrides, log_to_stderr, resolve
from spangrad.agent.reward_values import entries
from spangrad.errors import QueueError, SettingsError
from spangrad.store.rollout.record import counted

if TYPE_CHECKING:
    from runner.queue.client import QueueClient
    from runner.queue.wire import AttemptRecord, QueuedRollout, RolloutSelector, RolloutState

T = TypeVar("T")
_CONNECT_SECONDS = 5
"""Longest time that a command retries while the queue does not answer, in seconds."""

queue = App(name="queue", help="Serve the queue of rollouts; show, cancel, retry them.")
RunId = Annotated[str | None, Parameter(name="--run", help="id of a run; default: all runs.")]
OneRun = Annotated[str | None, Parameter(name="--run", help="id of a run: all its rollouts, or those of --group only.")]


@queue.default
def _serve(*, port: int | None = None, db: str | None = None, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Serve the queue of rollouts to workers until SIGTERM or Ctrl-C.

    Args:
        port: TCP port to listen on; default: queue.port.
        db: URL of the queue's database, sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME; default: queue.db.
    """
    settings = resolve(config, set_, {"queue.port": port, "queue.db": db})
    log_to_stderr()
    from runner.queue.server import serve

    serve(settings)


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
    """Print the number of rollouts by run and state; with --run, --state or --group, list the rollouts themselves.

    Args:
        state: list only rollouts in this state: queued, running, succeeded, failed, dead or cancelled.
        group: list only rollouts of the group with this id.
        limit: maximum number of rollouts to list.
    """
    from commands.console import print_table
    from runner.queue.wire import RolloutState

    _require_limit(limit)
    if run is None and state is None and group is None:
        runs = _ask(config, set_, lambda client: client.runs())
        rows = ([row.run_id, *(row.states.get(state, 0) for state in RolloutState)] for row in runs)
        print_table(("run", *RolloutState), rows)
        return
    _print_listed(config, set_, limit, run_id=run, state=_state(state), group_id=group)


@queue.command(name="dead")
def _dead(*, run: RunId = None, limit: int = 50, config: ConfigFile = None, set_: Overrides = None) -> None:
    """List the dead rollouts, those whose attempts all failed, with the failure of the last attempt.

    Args:
        limit: maximum number of rollouts to list.
    """
    from runner.queue.wire import RolloutState

    _require_limit(limit)
    _print_listed(config, set_, limit, run_id=run, state=RolloutState.DEAD)


@queue.command(name="show")
def _show(rollout: str, /, *, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Print a rollout and all its attempts.

    Args:
        rollout: id of the rollout.
    """
    from commands.console import print_table

    shown = _ask(config, set_, lambda client: client.rollout(rollout))
    print(f"rollout   {shown.rollout_id} of run {shown.run_id} ({shown.mode})")
    print(f"task      {shown.task_id}, group {shown.group_id} of {shown.group_size}, priority {shown.priority}")
    print(f"state     {shown.state}, {counted(shown.attempts_left, 'attempt')} left, {shown.timeout_seconds:g} s each")
    rows = [
        (
            *(attempt.attempt, attempt.worker, f"{datetime.fromtimestamp(attempt.began_at, UTC):%Y-%m-%d %H:%M:%S UTC}"),
            *("-" if attempt.seconds is None else f"{attempt.seconds:.1f}", _end(attempt)),
            *("-" if attempt.calls is None else attempt.calls, attempt.detail or _rewards(attempt)),
        )
        for attempt in shown.attempts
    ]
    if rows:
        print_table(("attempt", "worker", "began", "seconds", "end", "calls", ""), rows)


@queue.command(name="cancel")
def _cancel(*rollouts: str, run: OneRun = None, group: str | None = None, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Cancel queued and running rollouts: those with the given ids, those of a group, or those of a whole run.

    Args:
        rollouts: ids of the rollouts.
        group: id of a group; requires --run.
    """
    which = _which(rollouts, run, group)
    done = _change(config, set_, which, lambda client: client.cancel(which))
    print(f"cancelled: {done.queued} that were queued, {done.running} that were running")


@queue.command(name="retry")
def _retry(*rollouts: str, run: OneRun = None, group: str | None = None, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Queue dead rollouts again, each with as many attempts as a new rollout.

    Args:
        rollouts: ids of the rollouts.
        group: id of a group; requires --run.
    """
    which = _which(rollouts, run, group)
    print(f"queued again: {_change(config, set_, which, lambda client: client.retry(which))}")


@queue.command(name="purge")
def _purge(*, older_than_days: float | None = None, run: RunId = None, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Delete ended rollouts, with their attempts, from the queue. The newest rollout of each run stays.

    Args:
        older_than_days: delete only rollouts that ended at least this many days ago; default: queue.keep_days.
    """
    days = resolve(config, set_).queue.keep_days if older_than_days is None else older_than_days
    if days is None:
        raise SettingsError("name --older-than-days DAYS: queue.keep_days is not set.")
    if not 0 <= days < float("inf"):
        raise SettingsError(f"--older-than-days {days:g} is no age. Name how many days ago rollouts must have ended: 0 for all.")
    print(f"deleted: {_ask(config, set_, lambda client: client.purge(days * 86400, run))}")


def _print_listed(config: Path | None, set_: list[str] | None, limit: int, **which: Any) -> None:
    """Print rollouts of a selection, and whether there are more than the limit."""
    from runner.queue.wire import LIST_MOST

    async def listed(client: QueueClient) -> list[QueuedRollout]:
        rollouts: list[QueuedRollout] = []
        after = 0
        while len(rollouts) <= limit:
            page = await client.rollouts(**which, after=after, limit=min(limit + 1 - len(rollouts), LIST_MOST))
            if not page.rollouts:
                break
            rollouts += page.rollouts
            after = page.cursor
        return rollouts

    rollouts = _ask(config, set_, listed)
    _print(rollouts[:limit])
    if len(rollouts) > limit:
        print(f"there are more than {limit}: raise --limit to list more", file=sys.stderr)


def _require_limit(limit: int) -> None:
    if limit < 1:
        raise SettingsError(f"--limit {limit} lists nothing. Give 1 or more.")


def _ask(config: Path | None, set_: list[str] | None, request: Callable[[QueueClient], Coroutine[Any, Any, T]]) -> T:
    """Connect to the queue, run a request on it, and return its response."""
    from runner.queue.client import QueueClient

    settings = resolve(config, set_)

    async def response() -> T:
        async with QueueClient.of(settings.queue, retry_seconds=_CONNECT_SECONDS) as client:
            return await request(client)

    return asyncio.run(response())


def _change(
    config: Path | None, set_: list[str] | None, which: RolloutSelector, request: Callable[[QueueClient], Coroutine[Any, Any, T]]
) -> T:
    """Run a request that changes the selected rollouts, and return its response.

    Raises:
        QueueError: the queue has no such rollout; none of them is changed then.
    """

    async def changed(client: QueueClient) -> T:
        for rollout_id in which.rollout_ids or ():
            await client.rollout(rollout_id)
        if which.run_id is not None and not (await client.rollouts(run_id=which.run_id, group_id=which.group_id, limit=1)).rollouts:
            of = f"run {which.run_id}" if which.group_id is None else f"group {which.group_id} of run {which.run_id}"
            raise QueueError(f"the queue at {client.url} has no rollout of {of}. `spangrad queue list` shows what it has.")
        return await request(client)

    return _ask(config, set_, changed)


def _which(rollouts: Sequence[str], run: str | None, group: str | None) -> RolloutSelector:
    from runner.queue.wire import RolloutSelector

    if bool(rollouts) == bool(run):
        raise SettingsError("name rollouts, or --run RUN (and --group GROUP).")
    if group and not run:
        raise SettingsError("--group needs the --run that it belongs to.")
    return RolloutSelector(rollout_ids=list(rollouts)) if rollouts else RolloutSelector(run_id=run, group_id=group)


def _state(text: str | None) -> RolloutState | None:
    from runner.queue.wire import RolloutState

    if text is not None and text not in list(RolloutState):
        raise SettingsError(f"--state {text!r} is none. A rollout is {', '.join(RolloutState)}.")
    return RolloutState(text) if text else None


def _print(rollouts: Sequence[QueuedRollout]) -> None:
    from commands.console import print_table

    rows: list[tuple[object, ...]] = []
    for rollout in rollouts:
        last = rollout.attempts[-1] if rollout.attempts else None
        outcome = f"{_end(last)} {last.detail}".strip() if last else "-"
        names = (rollout.rollout_id, rollout.run_id, rollout.group_id, rollout.task_id, rollout.mode, rollout.state)
        rows.append((*names, last.attempt + 1 if last else 0, outcome))
    print_table(("rollout", "run", "group", "task", "mode", "state", "attempts", "last attempt"), rows)


def _end(attempt: AttemptRecord) -> str:
    if attempt.ended_at is None:
        return "under way"
    return attempt.reason.value if attempt.reason else "succeeded"


def _rewards(attempt: AttemptRecord) -> str:
    return " ".join(f"{name}{f'[{role}]' if role else ''}={value:g}" for name, role, value in entries(attempt.rewards or {}))
