"""Runs one attempt of a rollout, stage by stage: environment, agent, evaluator; with root span, announcement, and count of calls.

Invariant: every lease ends in one `EndedAttempt` and one root span, whatever happens to the agent; a failed attempt carries a reason, and a
reward where the policy caused the failure. Each stage has slots of its own, and an attempt holds one while it is in that stage; a leased
environment is released, however the attempt ends.

An attempt with an environment waits with it for a slot of stage run. So the slots before that stage are few, and the number of leases
taken from the queue is limited by them (`Attempts.entry`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from runner.environments.client import EnvironmentClient, LeasedInstance, NoInstanceError
from runner.queue.client import QueueClient
from runner.queue.wire import AttemptRecord, QueuedRollout, RolloutLease, RolloutState
from runner.rewards.client import RewardClient
from runner.workers.agent_processes import AgentHost, HostPool
from runner.workers.attempt_files import AttemptFiles
from runner.workers.gateway_client import AttemptLimits, GatewayClient
from runner.workers.hosted import Ends, Hosted
from runner.workers.jobs import AttemptOutcome, Job
from runner.workers.root_spans import RootSpan, RootSpans, carrier
from runner.workers.slots import Slot, Slots, StageClock
from spangrad.errors import SpangradError
from spangrad.settings import RunnerSettings
from spangrad.types import AttemptFailure, Mode, Rollout, RolloutKey, SandboxRung, Stage, Task

T = TypeVar("T")
_CLOSED_BY_GATEWAY = frozenset({AttemptFailure.TIMEOUT, AttemptFailure.TOKEN_BUDGET, AttemptFailure.CALL_BUDGET})
_CANCELLED_BETWEEN_ATTEMPTS = AttemptOutcome(None, AttemptFailure.CANCELLED, "the rollout was cancelled between two attempts")


@dataclass(frozen=True, slots=True)
class StopReason:
    """Reason to stop an attempt, and its consequence for the rollout."""

    failure: AttemptFailure
    detail: str
    final: bool
    """True if no other attempt follows."""
    reported: bool
    """True if the queue knows already."""


class StoppedError(Exception):
    """The attempt was stopped."""


class Stop:
    """Stop signal of one attempt; the first reason counts."""

    def __init__(self) -> None:
        self.requested: asyncio.Future[StopReason] = asyncio.get_running_loop().create_future()

    def now(self, reason: StopReason) -> None:
        """Stop the attempt."""
        if not self.requested.done():
            self.requested.set_result(reason)

    async def first(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for work, or for the stop signal.

        Raises:
            StoppedError: the signal came first; the work was cancelled.
        """
        task = asyncio.create_task(work)
        try:
            await asyncio.wait([task, self.requested], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
        if task.cancelled():
            raise StoppedError
        return task.result()


@dataclass(frozen=True, slots=True)
class EndedAttempt:
    """Result of an attempt, to be reported to the queue."""

    lease: RolloutLease
    answer: AttemptOutcome
    calls: int | None
    """Number of policy calls. None: they were not counted."""
    stages: Mapping[Stage, float]
    """Seconds in each stage that the attempt reached."""
    final: bool
    """True if its root span has the final mark."""
    reported: bool
    """True if the queue knows already."""

    @property
    def seconds(self) -> float:
        """Time that the agent ran, in seconds."""
        return self.stages.get(Stage.RUN, 0.0)


@dataclass(slots=True)
class _AttemptState:
    """State of a running attempt."""

    rollout: Rollout
    timeout_seconds: float
    """Time limit of the agent, in seconds."""
    stop: Stop
    clock: StageClock
    entry: Slot
    """Slot held until the attempt has a slot of stage run, or, where no stage comes before that, until it has run."""
    span: RootSpan | None = None
    """Root span. None: the attempt has not begun."""
    calls: int | None = 0
    """Number of policy calls. None: the attempt has begun, and they are not counted yet."""
    propagation: Mapping[str, str] = field(default_factory=dict[str, str])
    """Propagation headers: `traceparent` and `baggage`."""


@dataclass(frozen=True, slots=True)
class AttemptServices:
    """Services that attempts use over HTTP."""

    environments: EnvironmentClient | None = None
    """None: the agent has no environment, or its host creates it."""
    rewards: RewardClient | None = None
    """None: the agent's host evaluates, or there is no evaluator."""
    by_rules: bool = False
    """True if the builder's rules alone may reward an attempt (builder.rewards_from), so that it needs no reward of its own."""


class Attempts:
    """Runs attempts with an agent's hosts and services."""

    def __init__(
        self,
        pool: HostPool,
        gateway: GatewayClient | None,
        roots: RootSpans,
        queue: QueueClient,
        files: AttemptFiles,
        settings: RunnerSettings,
        services: AttemptServices,
        sandbox: SandboxRung,
    ) -> None:
        """`sandbox` is the kind in which the agent's programs run; the others are what attempts use."""
        self._pool = pool
        self.gateway = gateway
        self.roots = roots
        self.files = files
        self.queue = queue
        self._settings = settings
        self._services = services
        self._sandbox = sandbox
        self._ahead = Slots(settings.workers * settings.initialised_ahead)
        self._lease_slots = Slots(settings.workers * settings.initialisations)
        self._evaluation_slots = Slots(settings.workers * settings.evaluations)
        running = settings.workers * settings.concurrency
        before = settings.workers * settings.initialised_ahead if pool.initialises or services.environments else 0
        self.entry = before or running
        """Number of attempts that can begin at once."""
        self.most = before + 2 * running
        """Number of attempts at once: those before stage run, those in it, and as many that are evaluated or reported."""

    async def make(
        self, lease: RolloutLease, stop: Stop, clock: StageClock, entered: Callable[[], None], broken: Callable[[SpangradError], None]
    ) -> EndedAttempt:
        """Run an attempt.

        Args:
            lease: names the attempt.
            stop: ends it early.
            clock: measures its stages.
            entered: called once, when another attempt can begin in its place.
            broken: called when it cannot go on for a reason outside of the attempt; it then waits to be stopped.
        """
        state = _AttemptState(rollout_of(lease), lease.timeout_seconds, stop, clock, Slot(entered))
        self.roots.claim(lease.rollout_id, lease.attempt)
        answer = AttemptOutcome(None, AttemptFailure.CANCELLED, "it had not begun")
        try:
            with state.entry:
                answer = await self._run_stages(state)
            if answer.failure is AttemptFailure.NO_REWARD and self._services.by_rules:
                answer = replace(answer, rewards={}, failure=None, detail="")
            answer = self._with_reward(await self._counted(state, answer))
            if lease.attempt:
                await self._write_lost(await self.queue.rollout(lease.rollout_id), None)
        except StoppedError:
            pass
        except SpangradError as error:
            broken(error)
            await asyncio.wait([stop.requested])
        reason = stop.requested.result() if stop.requested.done() else None
        if reason is not None:
            answer = AttemptOutcome(None, reason.failure, reason.detail)
        answer = answer.storable()
        final = reason.final if reason is not None else answer.failure is None or answer.rewards is not None or lease.last
        self.roots.close(state.span or self.roots.open(state.rollout), answer, state.calls, clock.times, final=final)
        return EndedAttempt(lease, answer, state.calls, clock.taken(), final=final, reported=reason is not None and reason.reported)

    async def _run_stages(self, state: _AttemptState) -> AttemptOutcome:
        """Run all stages, with or without a leased environment, unless the task demands a stronger sandbox than this worker's."""
        least = state.rollout.task.least_sandbox
        if least is not None and not self._sandbox.reaches(least):
            return AttemptOutcome(
                None,
                AttemptFailure.SANDBOX,
                f"task {state.rollout.task.task_id} demands a sandbox of at least {least}, and this worker's is {self._sandbox}. "
                f"Run a worker with runner.sandbox.least = {least} on a machine that can do it, or lower the task's least_sandbox.",
            )
        if self._services.environments is None:
            return await self._evaluated(state, await self._hosted(state, None), None)
        try:
            async with self._leased(state, self._services.environments) as instance:
                answer = await self._evaluated(state, await self._hosted(state, instance), instance)
                if instance.lost.done():
                    return AttemptOutcome(None, AttemptFailure.ENVIRONMENT, instance.lost.result())
                return answer
        except NoInstanceError as error:
            return AttemptOutcome(None, error.failure, str(error))

    @asynccontextmanager
    async def _leased(self, state: _AttemptState, environments: EnvironmentClient) -> AsyncGenerator[LeasedInstance]:
        """Lease an environment of a service, for as long as the block."""
        stop, key = state.stop, state.rollout.key
        with await stop.first(self._ahead.take()) as ahead:
            with await stop.first(self._lease_slots.take()):
                await self._begin(state)
                with state.clock.counting(Stage.INIT):
                    asked = environments.lease(key.rollout_id, key.attempt, state.rollout.task.input, self._settings.init_timeout_seconds)
                    instance = await stop.first(asked)
            entry = state.entry
            state.entry = Slot(lambda: (ahead.free(), entry.free()))
            try:
                yield instance
            finally:
                environments.release(instance)

    async def _hosted(self, state: _AttemptState, instance: LeasedInstance | None) -> AttemptOutcome:
        """Run the stages in an agent host."""
        host = await state.stop.first(self._pool.take())
        slot = Slot(lambda: self._pool.free(host))
        try:
            if instance is None:
                await self._begin(state)
            else:
                state.entry.free()
            ends: Ends = [state.stop.requested] if instance is None else [state.stop.requested, instance.lost]
            async with Hosted(host, self._job(state, instance)) as hosted:
                return await self._staged(state, hosted, host, slot, ends)
        finally:
            self._pool.give(host, freed=slot.freed)

    async def _staged(self, state: _AttemptState, hosted: Hosted, host: AgentHost, slot: Slot, ends: Ends) -> AttemptOutcome:
        stop, clock, settings = state.stop, state.clock, self._settings
        running = slot
        if self._pool.initialises:
            with await stop.first(host.stage_slots.initialising.take()), clock.counting(Stage.INIT):
                more = await hosted.go(Stage.INIT, settings.init_timeout_seconds, ends)
            if not more:
                return await hosted.finish(ends)
            running = await stop.first(host.stage_slots.running.take())
            slot.free()
            state.entry.free()
        with running, clock.counting(Stage.RUN):
            more = await hosted.go(Stage.RUN, state.timeout_seconds, ends)
        state.entry.free()
        if more:
            with await stop.first(host.stage_slots.evaluating.take()), clock.counting(Stage.EVALUATE):
                await hosted.go(Stage.EVALUATE, settings.evaluation_timeout_seconds, ends)
        return await hosted.finish(ends)

    async def _evaluated(self, state: _AttemptState, answer: AttemptOutcome, instance: LeasedInstance | None) -> AttemptOutcome:
        """Return the answer with the rewards of the reward service, if there is one."""
        rewards = self._services.rewards
        if rewards is None or answer.failure is not None:
            return answer
        key, task = state.rollout.key, state.rollout.task
        body = {
            "rollout_id": key.rollout_id,
            "attempt": key.attempt,
            "task_id": task.task_id,
            "input": task.input,
            "output": answer.output,
            "environment": instance.environment if instance is not None else None,
        }
        with await state.stop.first(self._evaluation_slots.take()), state.clock.counting(Stage.EVALUATE):
            return await state.stop.first(rewards.evaluate(body, self._settings.evaluation_timeout_seconds))

    async def _begin(self, state: _AttemptState) -> None:
        """Open the root span, and announce the attempt to the gateway."""
        state.calls = None
        state.span = self.roots.open(state.rollout)
        state.propagation = carrier(state.span)
        if self.gateway is not None:
            await self.gateway.announce(state.rollout.key, state.rollout.mode, state.propagation["traceparent"], self._limits(state))

    def _limits(self, state: _AttemptState) -> AttemptLimits:
        """Return the limits of an attempt's calls: its agent's and its evaluator's time, unless an initialisation may call before both."""
        seconds = None if self._pool.initialises else state.timeout_seconds + self._settings.evaluation_timeout_seconds
        return AttemptLimits(seconds, self._settings.max_calls, self._settings.max_output_tokens)

    async def _counted(self, state: _AttemptState, answer: AttemptOutcome) -> AttemptOutcome:
        """Return the answer after the gateway has counted the calls; it is a failure if the count is needed and unknown."""
        if self.gateway is None or state.stop.requested.done():
            return answer
        counted = await self.gateway.calls(state.rollout.key)
        state.calls = counted and counted.calls
        counts = answer.failure is None or self._settings.failure_rewards.of(answer.failure) is not None
        if counted is None and counts:
            return AttemptOutcome(None, AttemptFailure.UNCOUNTED, f"the gateway does not know this attempt any more{_after(answer)}")
        if counted is not None and counted.overflowed and answer.failure in {AttemptFailure.EXCEPTION, AttemptFailure.EXIT_CODE}:
            return replace(answer, failure=AttemptFailure.CONTEXT_OVERFLOW)
        if (
            counted is not None
            and counted.closed in _CLOSED_BY_GATEWAY
            and answer.failure in {AttemptFailure.EXCEPTION, AttemptFailure.EXIT_CODE}
        ):
            return replace(answer, failure=AttemptFailure(counted.closed))
        return answer

    def _with_reward(self, answer: AttemptOutcome) -> AttemptOutcome:
        """Return the answer, with the reward of its failure where the policy caused that."""
        reward = self._settings.failure_rewards.of(answer.failure)
        return answer if reward is None else replace(answer, rewards=reward)

    async def close_lost_attempts(self, queued: QueuedRollout) -> None:
        """Write the missing root spans of a rollout that was cancelled, or whose last worker died."""
        if not queued.attempts or queued.state not in {RolloutState.DEAD, RolloutState.CANCELLED}:
            return
        last = queued.attempts[-1]
        between = queued.state is RolloutState.CANCELLED and last.reason is not AttemptFailure.CANCELLED
        if not between and not _ended_by_queue(last):
            return
        full_rollout = await self.queue.rollout(queued.rollout_id) if last.attempt else queued
        await self._write_lost(full_rollout, None if between else last.attempt)
        if between:
            # No attempt was running, and no root span has the final mark: another one must mark the end of the rollout.
            self._write(_rollout(queued, last.attempt + 1), _CANCELLED_BETWEEN_ATTEMPTS, 0, final=True)

    def end_cancelled(self, lease: RolloutLease) -> None:
        """Write the final root span of a rollout that was cancelled before the queue learned of an attempt that is not final."""
        rollout = rollout_of(lease)
        self._write(replace(rollout, key=replace(rollout.key, attempt=lease.attempt + 1)), _CANCELLED_BETWEEN_ATTEMPTS, 0, final=True)

    async def _write_lost(self, full_rollout: QueuedRollout, final: int | None) -> None:
        """Write the root spans of attempts whose workers are gone: until they exist, the builder waits for them."""
        for attempt in full_rollout.attempts:
            if _ended_by_queue(attempt):
                key = RolloutKey(full_rollout.run_id, full_rollout.rollout_id, attempt.attempt)
                counted = await self.gateway.calls(key) if self.gateway is not None else None
                answer = AttemptOutcome(None, attempt.reason, attempt.detail)
                self._write(_rollout(full_rollout, attempt.attempt), answer, counted and counted.calls, final=attempt.attempt == final)

    def _write(self, rollout: Rollout, answer: AttemptOutcome, calls: int | None, *, final: bool) -> None:
        if self.roots.claim(rollout.key.rollout_id, rollout.key.attempt):
            self.roots.close(self.roots.open(rollout), answer, calls, final=final)

    def _job(self, state: _AttemptState, instance: LeasedInstance | None) -> Job:
        key = state.rollout.key
        return Job(
            id=f"{key.rollout_id}/{key.attempt}",
            input=state.rollout.task.input,
            traceparent=state.propagation["traceparent"],
            baggage=state.propagation["baggage"],
            endpoint=self.gateway.endpoint(key) if self.gateway is not None else None,
            log=self.files.directory(key.rollout_id, key.attempt),
            environment=instance.environment if instance is not None else None,
        )


def rollout_of(lease: RolloutLease) -> Rollout:
    """Return the rollout of a lease."""
    key = RolloutKey(lease.run_id, lease.rollout_id, lease.attempt)
    return Rollout(key, _task(lease), lease.mode, lease.group_id, lease.group_size)


def _task(lease: RolloutLease) -> Task:
    return Task(lease.task_id, lease.task_input(), lease.prompt, lease.least_sandbox)


def _rollout(queued: QueuedRollout, attempt: int) -> Rollout:
    key = RolloutKey(queued.run_id, queued.rollout_id, attempt)
    return Rollout(key, Task(queued.task_id, None, queued.prompt), Mode(queued.mode), queued.group_id, queued.group_size)


def _after(answer: AttemptOutcome) -> str:
    return "" if answer.failure is None else f"; it had failed: {answer.failure.value}: {answer.detail}"


def _ended_by_queue(attempt: AttemptRecord) -> bool:
    """Return whether the queue itself ended the attempt: workers report the seconds, and release only attempts with a root span."""
    return attempt.ended_at is not None and attempt.reason not in {None, AttemptFailure.RELEASED} and attempt.seconds is None
