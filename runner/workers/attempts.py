"""Makes one attempt of a rollout, stage by stage: environment, agent, evaluator; around them root span, announcement, count of calls.

In: a lease, and a word when it is not wanted any more. Out: how the attempt ended, its root span closed but not sent yet. Invariant: every
lease ends in one `Ended` and one root span, whatever happens to the agent; a failed attempt carries a reason, and a reward where the policy
caused the failure. Each stage has places of its own, which an attempt holds while it is in that stage; what was leased for it is given
back, however it ends.

An attempt that has an environment waits with it for a place among those that run. So the places before that are few, and a lease of the
queue is taken for one of those (`Attempts.entry`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from opentelemetry.trace import Span

from runner.environments.client import EnvironmentClient, Instance, NoInstanceError
from runner.queue.client import QueueClient
from runner.queue.wire import Attempt, Lease, State
from runner.queue.wire import Rollout as Standing
from runner.rewards.client import RewardClient
from runner.workers.agent_processes import AgentHost, HostPool
from runner.workers.attempt_files import AttemptFiles
from runner.workers.gateway_client import GatewayClient
from runner.workers.hosted import Ends, Hosted
from runner.workers.jobs import Answer, Job
from runner.workers.root_spans import Roots, carrier
from runner.workers.slots import Place, Places, StageClock
from spangrad.errors import SpangradError
from spangrad.settings import RunnerSettings
from spangrad.types import AttemptFailure, Mode, Rollout, RolloutKey, Stage, Task

T = TypeVar("T")
_BETWEEN = Answer(None, AttemptFailure.CANCELLED, "the rollout was cancelled between two attempts")


@dataclass(frozen=True, slots=True)
class Why:
    """Why an attempt is stopped, and what that means for its rollout."""

    failure: AttemptFailure
    detail: str
    final: bool
    """Whether no other attempt will come."""
    told: bool
    """Whether the queue knows already."""


class StoppedError(Exception):
    """An attempt is not wanted any more."""


class Stop:
    """A word to one attempt; the first one counts."""

    def __init__(self) -> None:
        self.asked: asyncio.Future[Why] = asyncio.get_running_loop().create_future()

    def now(self, why: Why) -> None:
        """Say it."""
        if not self.asked.done():
            self.asked.set_result(why)

    async def first(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for work, or for the word.

        Raises:
            StoppedError: the word came first; the work was cancelled.
        """
        task = asyncio.create_task(work)
        try:
            await asyncio.wait([task, self.asked], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
        if task.cancelled():
            raise StoppedError
        return task.result()


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt ended."""

    lease: Lease
    answer: Answer
    calls: int | None
    """Policy calls. None: nobody counted."""
    stages: Mapping[Stage, float]
    """Seconds in each stage that it came to."""
    final: bool
    """Whether its root has the final mark."""
    told: bool
    """Whether the queue knows already."""

    @property
    def seconds(self) -> float:
        """That the agent ran."""
        return self.stages.get(Stage.RUN, 0.0)


@dataclass(slots=True)
class _Making:
    """An attempt that is being made."""

    rollout: Rollout
    timeout_seconds: float
    """That the agent may take."""
    stop: Stop
    clock: StageClock
    entry: Place
    """Held until it has a place among those that run, or, where nothing comes before that, until it has run."""
    span: Span | None = None
    """None: it has not begun."""
    calls: int | None = 0
    """Policy calls. None: it has begun, and they are not counted."""
    carried: Mapping[str, str] = field(default_factory=dict[str, str])
    """`traceparent` and `baggage`."""


@dataclass(frozen=True, slots=True)
class Services:
    """What is asked over HTTP for an attempt."""

    environments: EnvironmentClient | None = None
    """None: the agent has none, or its host makes them."""
    rewards: RewardClient | None = None
    """None: the agent's host evaluates, or nobody does."""
    by_rules: bool = False
    """Whether the builder's rules alone may reward an attempt (builder.rewards_from), so that it needs no reward of its own."""


class Attempts:
    """What attempts are made with."""

    def __init__(
        self,
        pool: HostPool,
        gateway: GatewayClient | None,
        roots: Roots,
        queue: QueueClient,
        files: AttemptFiles,
        settings: RunnerSettings,
        services: Services,
    ) -> None:
        """Begin nothing yet.

        Args:
            pool: where agents run.
            gateway: who counts their calls. None: nobody.
            roots: who writes the root spans.
            queue: who has the rollouts.
            files: what is kept of attempts.
            settings: how many may be in each stage, and for how long.
            services: who is asked for environments and rewards.
        """
        self._pool = pool
        self.gateway = gateway
        self.roots = roots
        self.files = files
        self.queue = queue
        self._settings = settings
        self._services = services
        self._ahead = Places(settings.workers * settings.initialised_ahead)
        self._asking = Places(settings.workers * settings.initialisations)
        self._judging = Places(settings.workers * settings.evaluations)
        running = settings.workers * settings.concurrency
        before = settings.workers * settings.initialised_ahead if pool.initialises or services.environments else 0
        self.entry = before or running
        """Attempts that can begin at once."""
        self.most = before + 2 * running
        """Attempts at once: those that come before, those that run, and as many that are evaluated or told of."""

    async def make(
        self, lease: Lease, stop: Stop, clock: StageClock, entered: Callable[[], None], broken: Callable[[SpangradError], None]
    ) -> Ended:
        """Make an attempt.

        Args:
            lease: of what.
            stop: ends it early.
            clock: counts its stages.
            entered: called once, when somebody else can begin in its place.
            broken: called when it cannot go on for a reason that is not its own; it then waits to be stopped.
        """
        making = _Making(rollout_of(lease), lease.timeout_seconds, stop, clock, Place(entered))
        self.roots.claim(lease.rollout_id, lease.attempt)
        answer = Answer(None, AttemptFailure.CANCELLED, "it had not begun")
        try:
            with making.entry:
                answer = await self._through(making)
            if answer.failure is AttemptFailure.NO_REWARD and self._services.by_rules:
                answer = replace(answer, rewards={}, failure=None, detail="")
            answer = self._with_reward(await self._counted(making, answer))
            if lease.attempt:
                await self._write_lost(await self.queue.rollout(lease.rollout_id), None)
        except StoppedError:
            pass
        except SpangradError as error:
            broken(error)
            await asyncio.wait([stop.asked])
        why = stop.asked.result() if stop.asked.done() else None
        if why is not None:
            answer = Answer(None, why.failure, why.detail)
        answer = answer.storable()
        final = why.final if why is not None else answer.failure is None or answer.rewards is not None or lease.last
        stages = clock.taken()
        self.roots.close(making.span or self.roots.open(making.rollout), answer, making.calls, stages, final=final)
        return Ended(lease, answer, making.calls, stages, final=final, told=why is not None and why.told)

    async def _through(self, making: _Making) -> Answer:
        """All stages, with an environment that is leased, or without one."""
        if self._services.environments is None:
            return await self._judged(making, await self._hosted(making, None), None)
        try:
            async with self._leased(making, self._services.environments) as instance:
                answer = await self._judged(making, await self._hosted(making, instance), instance)
                if instance.lost.done():
                    return Answer(None, AttemptFailure.ENVIRONMENT, instance.lost.result())
                return answer
        except NoInstanceError as error:
            return Answer(None, error.failure, str(error))

    @asynccontextmanager
    async def _leased(self, making: _Making, environments: EnvironmentClient) -> AsyncGenerator[Instance]:
        """An environment of a service, for as long as the block."""
        stop, key = making.stop, making.rollout.key
        with await stop.first(self._ahead.take()) as ahead:
            with await stop.first(self._asking.take()):
                await self._begin(making)
                with making.clock.counting(Stage.INIT):
                    asked = environments.lease(key.rollout_id, key.attempt, making.rollout.task.input, self._settings.init_timeout_seconds)
                    instance = await stop.first(asked)
            entry = making.entry
            making.entry = Place(lambda: (ahead.free(), entry.free()))
            try:
                yield instance
            finally:
                environments.release(instance)

    async def _hosted(self, making: _Making, instance: Instance | None) -> Answer:
        """The stages in an agent host."""
        host = await making.stop.first(self._pool.take())
        slot = Place(lambda: self._pool.free(host))
        try:
            if instance is None:
                await self._begin(making)
            else:
                making.entry.free()
            ends: Ends = [making.stop.asked] if instance is None else [making.stop.asked, instance.lost]
            async with Hosted(host, self._job(making, instance)) as hosted:
                return await self._staged(making, hosted, host, slot, ends)
        finally:
            self._pool.give(host, freed=slot.freed)

    async def _staged(self, making: _Making, hosted: Hosted, host: AgentHost, slot: Place, ends: Ends) -> Answer:
        stop, clock, settings = making.stop, making.clock, self._settings
        running = slot
        if self._pool.initialises:
            with await stop.first(host.places.initialising.take()), clock.counting(Stage.INIT):
                more = await hosted.go(Stage.INIT, settings.init_timeout_seconds, ends)
            if not more:
                return await hosted.finish(ends)
            running = await stop.first(host.places.running.take())
            slot.free()
            making.entry.free()
        with running, clock.counting(Stage.RUN):
            more = await hosted.go(Stage.RUN, making.timeout_seconds, ends)
        making.entry.free()
        if more:
            with await stop.first(host.places.judging.take()), clock.counting(Stage.EVALUATE):
                await hosted.go(Stage.EVALUATE, settings.evaluation_timeout_seconds, ends)
        return await hosted.finish(ends)

    async def _judged(self, making: _Making, answer: Answer, instance: Instance | None) -> Answer:
        """The answer, with the rewards of a service where one gives them."""
        rewards = self._services.rewards
        if rewards is None or answer.failure is not None:
            return answer
        key, task = making.rollout.key, making.rollout.task
        body = {
            "rollout_id": key.rollout_id,
            "attempt": key.attempt,
            "task_id": task.task_id,
            "input": task.input,
            "output": answer.output,
            "environment": instance.environment if instance is not None else None,
        }
        with await making.stop.first(self._judging.take()), making.clock.counting(Stage.EVALUATE):
            return await making.stop.first(rewards.judge(body, self._settings.evaluation_timeout_seconds))

    async def _begin(self, making: _Making) -> None:
        """Open the root, and announce the attempt."""
        making.calls = None
        making.span = self.roots.open(making.rollout)
        making.carried = carrier(making.rollout, making.span)
        if self.gateway is not None:
            await self.gateway.announce(making.rollout.key, making.rollout.mode, making.carried["traceparent"])

    async def _counted(self, making: _Making, answer: Answer) -> Answer:
        """The answer, once the gateway has counted the calls."""
        if self.gateway is None or making.stop.asked.done():
            return answer
        counted = await self.gateway.calls(making.rollout.key)
        making.calls = counted and counted.calls
        counts = answer.failure is None or self._settings.failure_rewards.of(answer.failure) is not None
        if counted is None and counts:
            return Answer(None, AttemptFailure.UNCOUNTED, f"the gateway does not know this attempt any more{_after(answer)}")
        if counted is not None and counted.overflowed and answer.failure in {AttemptFailure.EXCEPTION, AttemptFailure.EXIT_CODE}:
            return replace(answer, failure=AttemptFailure.CONTEXT_OVERFLOW)
        return answer

    def _with_reward(self, answer: Answer) -> Answer:
        """Return the answer, with the reward of its failure where the policy caused that."""
        reward = self._settings.failure_rewards.of(answer.failure)
        return answer if reward is None else replace(answer, rewards=reward)

    async def mourn(self, standing: Standing) -> None:
        """Write the roots that nobody else will of a rollout that has ended: of an attempt whose worker is gone, or of a cancellation."""
        if not standing.attempts or standing.state not in {State.DEAD, State.CANCELLED}:
            return
        last = standing.attempts[-1]
        between = standing.state is State.CANCELLED and last.reason is not AttemptFailure.CANCELLED
        if not between and not _ended_by_queue(last):
            return
        whole = await self.queue.rollout(standing.rollout_id) if last.attempt else standing
        await self._write_lost(whole, None if between else last.attempt)
        if between:
            # No attempt was under way, and those before were not the last: somebody must say that no other comes.
            self._write(_rollout(standing, last.attempt + 1), _BETWEEN, 0, final=True)

    def end_cancelled(self, lease: Lease) -> None:
        """End a rollout that was cancelled before the queue heard of an attempt, whose root says that others come."""
        rollout = rollout_of(lease)
        self._write(replace(rollout, key=replace(rollout.key, attempt=lease.attempt + 1)), _BETWEEN, 0, final=True)

    async def _write_lost(self, whole: Standing, final: int | None) -> None:
        """Write the roots of attempts whose workers are gone: until they are there, the builder waits for them."""
        for one in whole.attempts:
            if _ended_by_queue(one):
                key = RolloutKey(whole.run_id, whole.rollout_id, one.attempt)
                counted = await self.gateway.calls(key) if self.gateway is not None else None
                answer = Answer(None, one.reason, one.detail)
                self._write(_rollout(whole, one.attempt), answer, counted and counted.calls, final=one.attempt == final)

    def _write(self, rollout: Rollout, answer: Answer, calls: int | None, *, final: bool) -> None:
        if self.roots.claim(rollout.key.rollout_id, rollout.key.attempt):
            self.roots.close(self.roots.open(rollout), answer, calls, final=final)

    def _job(self, making: _Making, instance: Instance | None) -> Job:
        key = making.rollout.key
        return Job(
            id=f"{key.rollout_id}/{key.attempt}",
            input=making.rollout.task.input,
            traceparent=making.carried["traceparent"],
            baggage=making.carried["baggage"],
            endpoint=self.gateway.endpoint(key) if self.gateway is not None else None,
            log=self.files.directory(key.rollout_id, key.attempt),
            environment=instance.environment if instance is not None else None,
        )


def rollout_of(lease: Lease) -> Rollout:
    """What a lease is of."""
    key = RolloutKey(lease.run_id, lease.rollout_id, lease.attempt)
    return Rollout(key, Task(lease.task_id, lease.task_input(), lease.prompt), lease.mode, lease.group_id, lease.group_size)


def _rollout(standing: Standing, attempt: int) -> Rollout:
    key = RolloutKey(standing.run_id, standing.rollout_id, attempt)
    return Rollout(key, Task(standing.task_id, None, standing.prompt), Mode(standing.mode), standing.group_id, standing.group_size)


def _after(answer: Answer) -> str:
    return "" if answer.failure is None else f"; it had failed: {answer.failure.value}: {answer.detail}"


def _ended_by_queue(attempt: Attempt) -> bool:
    """Whether the queue ended it itself: workers say how long their agents ran, and give back only what they have written a root of."""
    return attempt.ended_at is not None and attempt.reason not in {None, AttemptFailure.RELEASED} and attempt.seconds is None
