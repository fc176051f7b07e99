"""Runs one attempt of a rollout, stage by stage: environment, agent, evaluator; with root span, announcement, and count of calls.

Invariant: every attempt ends with an answer and one root span, whatever happens to the agent; a failed attempt carries a reason, and a
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
from runner.queue.wire import RolloutLease
from runner.rewards.client import RewardClient
from runner.workers.agent_processes import HostPool
from runner.workers.attempt_files import AttemptFiles
from runner.workers.gateway_client import GatewayClient
from runner.workers.hosted import Hosted
from runner.workers.jobs import AttemptOutcome, Job
from runner.workers.lost_attempts import LostAttempts
from runner.workers.root_spans import RootSpan, RootSpans, SandboxFacts, carrier
from runner.workers.slots import Slot, Slots, StageClock
from spangrad.errors import SpangradError
from spangrad.http.announcements import AnnouncedAttempt, CallLimits, StartedStage
from spangrad.settings import RunnerSettings
from spangrad.types import AttemptFailure, Rollout, Stage

T = TypeVar("T")
_CLOSED_BY_GATEWAY = {
    AttemptFailure.TOKEN_BUDGET.value: AttemptFailure.TOKEN_BUDGET,
    AttemptFailure.CALL_BUDGET.value: AttemptFailure.CALL_BUDGET,
    f"{Stage.RUN}_timeout": AttemptFailure.TIMEOUT,
}
"""Failures of attempts whose agents failed after the gateway had refused them calls, by the gateway's reason."""
_NOT_BEGUN = AttemptOutcome(None, AttemptFailure.CANCELLED, "it had not begun")


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
    """Work was stopped that had not ended."""


class Stop:
    """Stop signal of one attempt; the first reason counts."""

    def __init__(self) -> None:
        self.requested: asyncio.Future[StopReason] = asyncio.get_running_loop().create_future()

    def now(self, reason: StopReason) -> None:
        """Stop the attempt."""
        if not self.requested.done():
            self.requested.set_result(reason)

    async def first(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for work as `unless_stopped` does."""
        return await unless_stopped(self.requested, work)


async def unless_stopped(stopping: asyncio.Future[Any], work: Coroutine[Any, Any, T]) -> T:
    """Wait for work, or for a stop signal.

    Raises:
        StoppedError: the signal came first; the work was cancelled.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
    if task.cancelled():
        raise StoppedError
    return task.result()


@dataclass(slots=True)
class LeasedAttempt:
    """State of an attempt, from its lease to the report of its end."""

    lease: RolloutLease
    rollout: Rollout
    entry: Slot
    """Slot held until the attempt has a slot of stage run, or, where no stage comes before that, until it has run."""
    stop: Stop = field(default_factory=Stop)
    clock: StageClock = field(default_factory=StageClock)
    span: RootSpan | None = None
    """Root span. None: the attempt has not begun."""
    calls: int | None = 0
    """Number of policy calls. None: the attempt has begun, and they are not counted."""
    propagation: Mapping[str, str] = field(default_factory=dict[str, str])
    """Propagation headers: `traceparent` and `baggage`."""
    instance: LeasedInstance | None = None
    """Environment that a service leased for it. None: there is none."""
    answer: AttemptOutcome = _NOT_BEGUN
    final: bool = True
    """True if its root span has the final mark."""
    reported: bool = False
    """True if the queue knows of its end already."""

    @property
    def seconds(self) -> float:
        """Time that the agent has run, in seconds; waits, initialisation and evaluation do not count."""
        return self.clock.seconds(Stage.RUN)


@dataclass(frozen=True, slots=True)
class RunServices:
    """Services and files that all attempts of a worker share."""

    gateway: GatewayClient | None
    """None: agents call the engine itself."""
    roots: RootSpans
    queue: QueueClient
    files: AttemptFiles
    lost: LostAttempts


@dataclass(frozen=True, slots=True)
class AttemptServices:
    """Services that the attempts of one agent use over HTTP."""

    environments: EnvironmentClient | None = None
    """None: the agent has no environment, or its host creates it."""
    rewards: RewardClient | None = None
    """None: the agent's host evaluates, or there is no evaluator."""
    by_rules: bool = False
    """True if the builder's rules alone may reward an attempt (builder.rewards_from), so that it needs no reward of its own."""


class Attempts:
    """Runs attempts with an agent's hosts and services; the settings are those of the agent's handler."""

    def __init__(
        self, pool: HostPool, run: RunServices, settings: RunnerSettings, services: AttemptServices, sandbox: SandboxFacts
    ) -> None:
        self._pool = pool
        self._run = run
        self._settings = settings
        self._services = services
        self._sandbox = sandbox
        self._limits = CallLimits(max_calls=settings.max_calls, max_output_tokens=settings.max_output_tokens)
        self._ahead = Slots(settings.initialised_ahead)
        self._initialising = Slots(settings.initialisations)
        self._running = Slots(settings.concurrency)
        self._evaluating = Slots(settings.evaluations)
        running = settings.concurrency
        before = settings.initialised_ahead if pool.initialises or services.environments else 0
        self.entry = before or running
        """Number of attempts that can begin at once."""
        self.most = before + 2 * running
        """Number of attempts at once: those before stage run, those in it, and as many that are evaluated or reported."""

    def problem_with(self, lease: RolloutLease) -> str | None:
        """Return why the agent cannot do what a lease asks for, as the beginning of a sentence. None: it can."""
        if not lease.image or self._pool.takes_image(lease.image):
            return None
        return f"the handler of the rollout may not run image {lease.image!r}: runner.container.images does not allow it"

    async def make(self, state: LeasedAttempt, broken: Callable[[SpangradError], None]) -> None:
        """Run an attempt, until its root span is closed and its state says how it ended.

        `broken` is called when it cannot go on for a reason outside of the attempt; it then waits to be stopped.
        """
        lease, stop, answer = state.lease, state.stop, state.answer
        self._run.roots.claim(lease.rollout_id, lease.attempt)
        try:
            with state.entry:
                answer = await self._run_stages(state)
            if answer.failure is AttemptFailure.NO_REWARD and self._services.by_rules:
                answer = replace(answer, rewards={}, failure=None, detail="")
            answer = self._with_reward(await self._counted(state, answer))
            await self._run.lost.close_before(lease)
        except StoppedError:
            pass
        except SpangradError as error:
            broken(error)
            await asyncio.wait([stop.requested])
        reason = stop.requested.result() if stop.requested.done() else None
        if reason is not None:
            answer = AttemptOutcome(None, reason.failure, reason.detail)
        state.answer = answer = answer.storable()
        state.final = reason.final if reason is not None else answer.failure is None or answer.rewards is not None or lease.last
        state.reported = reason is not None and reason.reported
        log = self._run.files.tail(lease.rollout_id, lease.attempt)
        span = state.span or self._run.roots.open(state.rollout, self._sandbox)
        self._run.roots.close(span, answer, state.calls, state.clock.times, final=state.final, log=log)

    async def _run_stages(self, state: LeasedAttempt) -> AttemptOutcome:
        """Run all stages, with or without a leased environment, unless the task demands a stronger sandbox than this worker's."""
        least = state.rollout.task.least_sandbox
        if least is not None and not self._sandbox.rung.reaches(least):
            return AttemptOutcome(
                None,
                AttemptFailure.SANDBOX,
                f"task {state.rollout.task.task_id} demands a sandbox of at least {least}, and this worker's is {self._sandbox.rung}. "
                f"Run a worker with runner.sandbox.least = {least} on a machine that can do it, or lower the task's least_sandbox.",
            )
        if self._services.environments is None:
            return await self._evaluated(state, await self._hosted(state))
        try:
            async with self._leased(state, self._services.environments) as instance:
                answer = await self._evaluated(state, await self._hosted(state))
                if instance.lost.done():
                    return AttemptOutcome(None, AttemptFailure.ENVIRONMENT, instance.lost.result())
                return answer
        except NoInstanceError as error:
            return AttemptOutcome(None, AttemptFailure.ENVIRONMENT, str(error))

    @asynccontextmanager
    async def _leased(self, state: LeasedAttempt, environments: EnvironmentClient) -> AsyncGenerator[LeasedInstance]:
        stop, key = state.stop, state.rollout.key
        with await stop.first(self._ahead.take()) as ahead:
            with await stop.first(self._initialising.take()):
                await self._begin(state)
                async with self._stage(state, Stage.INIT, self._settings.init_timeout_seconds):
                    asked = environments.lease(key.rollout_id, key.attempt, state.rollout.task.input, self._settings.init_timeout_seconds)
                    state.instance = instance = await stop.first(asked)
            entry = state.entry
            state.entry = Slot(lambda: (ahead.free(), entry.free()))
            try:
                yield instance
            finally:
                environments.release(instance)

    async def _hosted(self, state: LeasedAttempt) -> AttemptOutcome:
        host = await state.stop.first(self._pool.take())
        slot = Slot(lambda: self._pool.free(host))
        try:
            ends: list[asyncio.Future[Any]] = [state.stop.requested]
            if state.instance is None:
                await self._begin(state)
            else:
                state.entry.free()
                ends.append(state.instance.lost)
            async with Hosted(host, self._job(state), ends) as hosted:
                return await self._staged(state, hosted, slot)
        finally:
            self._pool.give(host, freed=slot.freed)

    async def _staged(self, state: LeasedAttempt, hosted: Hosted, slot: Slot) -> AttemptOutcome:
        stop, settings = state.stop, self._settings
        running = slot
        if self._pool.initialises:
            with await stop.first(self._initialising.take()):
                async with self._stage(state, Stage.INIT, settings.init_timeout_seconds):
                    more = await hosted.go(Stage.INIT, settings.init_timeout_seconds)
            if not more:
                return await hosted.finish()
            running = await stop.first(self._running.take())
            slot.free()
            state.entry.free()
        with running:
            async with self._stage(state, Stage.RUN, state.lease.timeout_seconds):
                more = await hosted.go(Stage.RUN, state.lease.timeout_seconds)
        state.entry.free()
        if settings.close_after_run and state.instance is not None and self._services.environments is not None:
            self._services.environments.release(state.instance)
        if more:
            with await stop.first(self._evaluating.take()):
                async with self._stage(state, Stage.EVALUATE, settings.evaluation_timeout_seconds):
                    await hosted.go(Stage.EVALUATE, settings.evaluation_timeout_seconds)
        return await hosted.finish()

    async def _evaluated(self, state: LeasedAttempt, answer: AttemptOutcome) -> AttemptOutcome:
        """Return the answer with the rewards of the reward service, if there is one."""
        rewards = self._services.rewards
        if rewards is None or answer.failure is not None or answer.rewards is not None:
            return answer
        key, task = state.rollout.key, state.rollout.task
        body = {
            "rollout_id": key.rollout_id,
            "attempt": key.attempt,
            "task_id": task.task_id,
            "input": task.input,
            "output": answer.output,
            "environment": state.instance.environment if state.instance is not None else None,
        }
        with await state.stop.first(self._evaluating.take()):
            async with self._stage(state, Stage.EVALUATE, self._settings.evaluation_timeout_seconds):
                return await state.stop.first(rewards.evaluate(body, self._settings.evaluation_timeout_seconds))

    @asynccontextmanager
    async def _stage(self, state: LeasedAttempt, stage: Stage, seconds: float) -> AsyncGenerator[None]:
        """Announce a stage and its time limit to the gateway, and measure the stage for as long as the block."""
        if self._run.gateway is not None:
            key = state.rollout.key
            started = StartedStage(rollout_id=key.rollout_id, attempt=key.attempt, stage=stage, seconds=seconds)
            await state.stop.first(self._run.gateway.start_stage(started))
        with state.clock.counting(stage):
            yield

    async def _begin(self, state: LeasedAttempt) -> None:
        state.calls = None
        state.span = self._run.roots.open(state.rollout, self._sandbox)
        state.propagation = carrier(state.span)
        if self._run.gateway is not None:
            key, lease = state.rollout.key, state.lease
            attempt = AnnouncedAttempt(
                rollout_id=key.rollout_id,
                attempt=key.attempt,
                run_id=key.run_id,
                mode=state.rollout.mode,
                traceparent=state.propagation["traceparent"],
                limits=lease.limits.within(self._limits),
                sampling=lease.sampling,
            )
            await self._run.gateway.announce(attempt)

    async def _counted(self, state: LeasedAttempt, answer: AttemptOutcome) -> AttemptOutcome:
        """Return the answer after the gateway has counted the calls; it is a failure if the count is needed and unknown."""
        if self._run.gateway is None or state.stop.requested.done():
            return answer
        counted = await self._run.gateway.calls(state.rollout.key)
        state.calls = counted and counted.calls
        if counted is None:
            if answer.failure is None or self._settings.failure_rewards.of(answer.failure) is not None:
                after = "" if answer.failure is None else f"; it had failed: {answer.failure.value}: {answer.detail}"
                return AttemptOutcome(None, AttemptFailure.UNCOUNTED, f"the gateway does not know this attempt any more{after}")
        elif answer.failure in {AttemptFailure.EXCEPTION, AttemptFailure.EXIT_CODE}:
            closed = _CLOSED_BY_GATEWAY.get(counted.closed, answer.failure)
            return replace(answer, failure=AttemptFailure.CONTEXT_OVERFLOW if counted.overflowed else closed)
        return answer

    def _with_reward(self, answer: AttemptOutcome) -> AttemptOutcome:
        """Return the answer, with the reward of its failure where the policy caused that."""
        reward = self._settings.failure_rewards.of(answer.failure)
        return answer if reward is None else replace(answer, rewards=reward)

    def _job(self, state: LeasedAttempt) -> Job:
        key = state.rollout.key
        return Job(
            id=f"{key.rollout_id}/{key.attempt}",
            input=state.rollout.task.input,
            traceparent=state.propagation["traceparent"],
            baggage=state.propagation["baggage"],
            endpoint=self._run.gateway.endpoint(key) if self._run.gateway is not None else None,
            log=self._run.files.directory(key.rollout_id, key.attempt),
            environment=state.instance.environment if state.instance is not None else None,
            image=state.lease.image or None,
        )
