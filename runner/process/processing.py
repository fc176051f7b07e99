"""Requests for trajectories: rollouts are enqueued, their ends and their builds waited for.

In: a `ProcessRequest`. Out: trajectories as the rollouts end and are built. Invariant: a request that is sent again, after a lost
connection or a restart of the server, enqueues nothing and gets the same trajectories; rollouts go on whether or not a client waits.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

from runner.process.callbacks import Callbacks, require_allowed
from runner.process.task_demands import TaskDemands
from runner.process.trajectories import BuiltTrajectory, read_trajectories
from runner.process.wire import ProcessRequest, Trajectory
from runner.queue import rows
from runner.queue.notifier import wait_for_event
from runner.queue.service import Service
from runner.queue.wire import Enqueue, QueuedRollout
from spangrad.errors import StoreError
from spangrad.http.announcements import NO_LIMITS, OWN_SAMPLING, CallLimits, SamplingParameters
from spangrad.settings import Settings
from spangrad.store.arrivals import Arrivals, Topic
from spangrad.store.clickhouse import connect

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

NO_GATEWAY = "sampling and limits need a gateway, and the setting runner.gateway is false. Leave them out."
"""Refusal of a request that sets them."""
BUILD_SECONDS = 120.0
"""Time since a rollout was first seen to have ended within which its build is waited for, in seconds; then it is answered without turns."""
_FORGET_SECONDS = 3600.0
"""Time since a rollout was first seen to have ended after which that is forgotten, in seconds; when asked for, it is waited for anew."""
_RETRY_SECONDS = 1.0
_LOOK_SECONDS = 5.0
"""Longest time between two looks at rollouts that are waited for, in seconds: for a build whose arrival was not noticed."""
_READ_MOST = 64
"""Largest number of rollouts in one read of the store: a trajectory may have millions of tokens."""
_READS_AT_ONCE = 8
"""Number of reads of the store that run at the same time."""
_GATHER_SECONDS = 0.02
"""Time for which a look that waited for an event waits for others, in seconds: they come in bursts."""


class BuildNotifier:
    """Wakes tasks when builds arrive in the store, by one thread for all of them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._thread: threading.Thread | None = None
        self._requested = threading.Event()
        self._closed = False

    def next(self) -> asyncio.Event:
        """Return what is set when builds arrive from now on, or the store does not answer."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="builds in the store", daemon=True)
            self._thread.start()
        self._requested.set()
        return self._arrived

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._requested.set()

    def _watch(self) -> None:
        arrivals: Arrivals | None = None
        while not self._closed:
            self._requested.wait()
            self._requested.clear()
            try:
                arrivals = arrivals or Arrivals(connect(self._settings.store), self._settings.store, [Topic.BUILDS])
                arrivals.wait(_LOOK_SECONDS)
            except StoreError:  # the request that reads the store reports it
                arrivals = None
                time.sleep(_RETRY_SECONDS)
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self.notify)

    def notify(self) -> None:
        """Wake all tasks that wait now."""
        self._arrived.set()
        self._arrived = asyncio.Event()


class ObservedEnds:
    """Times at which rollouts were first seen to have ended, of the last hour."""

    def __init__(self) -> None:
        self._times = OrderedDict[str, float]()  # a dict finds its first entry slowly once many before it were deleted
        """Monotonic time by rollout, oldest first."""

    def seconds_since(self, rollout_id: str, now: float) -> float:
        """Return the seconds since a rollout was first seen, which may be now, and forget those of more than an hour ago."""
        seconds = now - self._times.setdefault(rollout_id, now)
        while self._times and now - next(iter(self._times.values())) > _FORGET_SECONDS:
            self._times.popitem(last=False)
        return seconds

    def forget(self, rollout_id: str) -> None:
        """Forget a rollout."""
        self._times.pop(rollout_id, None)


class Processing:
    """Answers requests for trajectories."""

    def __init__(self, service: Service, settings: Settings) -> None:
        """Store the arguments; the first request connects to the store."""
        self._service = service
        self._settings = settings
        self._builds = BuildNotifier(settings)
        self._callbacks = Callbacks(service, settings.queue, self.trajectories)
        self.demands = TaskDemands(service)
        """Rollouts of stored tasks, which the server enqueues by itself."""
        self._unbuilt = ObservedEnds()
        """Rollouts that ended without a build."""
        self._threads = ThreadPoolExecutor(_READS_AT_ONCE, "trajectories")
        """Threads that read the store: while it does not answer, they wait for it, and those that read the queue's database do not."""
        self._clients: list[Client] = []
        """Clients of the store that no request uses at the moment."""

    async def resume(self) -> None:
        """Go on with the callbacks and the demands of earlier requests."""
        await self._callbacks.resume()
        self.demands.start()

    def stop_waiting(self) -> None:
        """End the waits for builds, once the service is stopping."""
        self._builds.notify()

    async def close(self) -> None:
        """End callbacks, demands and connections; what is not done goes on when the server is started again."""
        await self.demands.close()
        await self._callbacks.close()
        self._builds.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for client in self._clients:
            client.close()

    @cached_property
    def spec(self) -> str:
        """Return the build specification of the trajectories.

        Raises:
            SettingsError: a file that the specification names is not on this machine.
        """
        return self._settings.builder.spec

    async def begin(self, request: ProcessRequest) -> list[str]:
        """Enqueue the rollouts of a request; return their ids in order, once they are durable.

        Raises:
            ValueError: a rollout of another run has one of the ids; or the request asks for what cannot be done.
            SettingsError: their builds cannot be recognised.
        """
        _ = self.spec  # what is refused is refused before anything is enqueued
        if not self.may_sample(request.sampling, request.limits):
            raise ValueError(NO_GATEWAY)
        handlers = self._settings.runner.handlers
        if handlers and (unknown := {task.data_source for task in request.tasks} - {*handlers, *([""] if len(handlers) == 1 else [])}):
            raise ValueError(f"no handler for data source {min(unknown)!r}; runner.handlers has {', '.join(sorted(handlers))}.")
        if request.callback is not None:
            require_allowed(request.callback, self._settings.queue.callback_hosts)
        ids = (await self._service.enqueue(Enqueue(run_id=request.run_id, rollouts=request.rollouts()))).rollout_ids
        if request.callback is not None:
            await self._callbacks.add(request.run_id, ids, request.callback)
        return ids

    def may_sample(self, sampling: SamplingParameters, limits: CallLimits) -> bool:
        """Return whether these can be set: they need a gateway, unless they are the agents' own."""
        return self._settings.runner.gateway or (sampling, limits) == (OWN_SAMPLING, NO_LIMITS)

    async def trajectories(
        self, run_id: str, rollouts: Sequence[str], seconds: float, is_over: Callable[[], bool]
    ) -> AsyncGenerator[Trajectory]:
        """Yield the trajectories of rollouts of a run as they are ready.

        They are waited for at most `seconds`, and no longer once `is_over` returns True, as where the client has left.

        Raises:
            StoreError: the store does not answer, or fails.
        """
        end = time.monotonic() + seconds
        pending = dict.fromkeys(rollouts)
        while True:
            ends, builds = self._service.next_end(run_id), self._builds.next()
            ended = await self._service.read(lambda connection: rows.ended_among(connection, list(pending)))
            unbuilt = 0
            for start in range(0, len(ended), _READ_MOST):
                part = ended[start : start + _READ_MOST]
                names = [rollout.rollout_id for rollout in part]
                built = await asyncio.get_running_loop().run_in_executor(self._threads, self._read, run_id, names)
                for rollout in part:
                    trajectory = built.pop(rollout.rollout_id, None)
                    if trajectory and rollout.attempts and trajectory.attempt < rollout.attempts[-1].attempt:
                        trajectory = None  # the attempt had seemed to be the last: the rollout was dead, or its lease lost
                    if trajectory:
                        self._unbuilt.forget(rollout.rollout_id)
                    if trajectory or self._is_unbuildable(rollout):
                        del pending[rollout.rollout_id]
                        yield _trajectory(rollout, trajectory, self.spec)
                    else:
                        unbuilt += 1
            if not pending or time.monotonic() >= end or self._service.stopping or is_over():
                return
            await _wait_for_any([builds, ends] if unbuilt < len(pending) else [builds], min(end, time.monotonic() + _LOOK_SECONDS))
            await asyncio.sleep(_GATHER_SECONDS)

    def _is_unbuildable(self, rollout: QueuedRollout) -> bool:
        """Return whether no build is waited for: no attempt began, or its end was seen too long ago."""
        return not rollout.attempts or self._unbuilt.seconds_since(rollout.rollout_id, time.monotonic()) > BUILD_SECONDS

    def _read(self, run_id: str, rollouts: Sequence[str]) -> dict[str, BuiltTrajectory]:
        try:
            client = self._clients.pop()
        except IndexError:
            client = connect(self._settings.store)
        built = read_trajectories(client, run_id, self.spec, rollouts)
        self._clients.append(client)
        return built


async def _wait_for_any(events: Sequence[asyncio.Event], end: float) -> None:
    waits = [asyncio.create_task(wait_for_event(event, end)) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _trajectory(rollout: QueuedRollout, built: BuiltTrajectory | None, spec: str) -> Trajectory:
    last = rollout.attempts[-1] if rollout.attempts else None
    rewards = built.rewards if built else []
    return Trajectory(
        rollout_id=rollout.rollout_id,
        run_id=rollout.run_id,
        task_id=rollout.task_id,
        group_id=rollout.group_id,
        group_size=rollout.group_size,
        mode=rollout.mode,
        state=rollout.state,
        failure=last.reason.value if last and last.reason else "",
        detail=last.detail if last else "",
        attempts=last.attempt + 1 if last else 0,
        built=built is not None,
        build_spec=spec,
        turns=built.turns if built else [],
        drops=built.drops if built else [],
        rewards=rewards,
        total_reward=sum(reward.value for reward in rewards) if rewards else None,
        seconds=built.seconds if built else None,
        stage_seconds=dict(built.stage_seconds) if built else {},
    )
