"""Runs rollouts: a group of each task, through a queue, by a worker in this process and by any other worker of that queue.

Invariant: when `run` returns, all its rollouts have ended, and the store has acknowledged the root spans of all attempts; a failed attempt
carries a reason, and a reward only where the policy caused the failure.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from runner.demand_source import DemandSource
from runner.embedded import EmbeddedQueue
from runner.environments.client import EnvironmentClient
from runner.groups import rollouts_of
from runner.queue.client import QueueClient
from runner.queue.wire import QueuedRollout, RolloutSelector, RolloutState
from runner.rewards.client import RewardClient
from runner.sandboxes.agent_sandbox import AgentSandbox, open_agent_sandbox
from runner.workers.agent_processes import HostPool
from runner.workers.agents import AgentsBySource, AgentSpec, agent_environment, is_service
from runner.workers.attempt_files import AttemptFiles
from runner.workers.attempts import Attempts, AttemptServices, RunServices, StopReason
from runner.workers.containers import remove_of_dead
from runner.workers.gateway_client import GatewayClient
from runner.workers.handlers import ANY_SOURCE, Handlers
from runner.workers.lost_attempts import LostAttempts
from runner.workers.root_spans import UNCONFINED, RootSpans, require_store
from runner.workers.worker import Worker
from spangrad.agent.reward_values import Rewards
from spangrad.client.task_groups import pinned_prompt, queued
from spangrad.errors import QueueError
from spangrad.greedy_baseline import wants_greedy
from spangrad.http.queue_messages import NewRollout
from spangrad.settings import Settings
from spangrad.types import AttemptFailure, Mode, PromptVersion, Rollout, RolloutKey, Task

_logger = logging.getLogger(__name__)

_STORE_RETRY_SECONDS = 30.0
_LONG_POLL_SECONDS = 10.0
_PAGE = 1000
_DEMAND_SECONDS = 0.5
"""Longest pause between two looks for groups that are stale or no longer needed, in seconds; a rising demand ends it."""
_CANCELLED_AT_ONCE = 1000
"""Number of rollouts in one cancellation request."""
_STOPPED = StopReason(AttemptFailure.CANCELLED, "the runner was stopped", final=True, reported=True)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a rollout."""

    key: RolloutKey
    """Key of its last attempt."""
    task_id: str
    mode: Mode
    """Purpose of the rollout."""
    reward: Rewards | None
    """Final rewards by name, or by name and role. None: it failed, and has no reward for that (`runner.failure_rewards`); empty if the
    agent has rewarded itself: its spans then hold the rewards."""
    failure: AttemptFailure | None
    """Failure of its last attempt. None: it succeeded."""
    detail: str
    """Explanation for people; empty if it succeeded."""
    seconds: float
    """Time that the agent ran in the last attempt, in seconds; 0 if it is unknown."""
    calls: int | None
    """Policy calls of the last attempt. None: there is no gateway, or it does not know the attempt any more, which then failed."""


class Runner:
    """A queue, a worker, and the worker's agent hosts; an async context manager.

    Args:
        settings: addresses of store, gateway and queue, and the number of rollouts that run at once.
        agent: the agent to run, or agents by data source, which are named as in runner.handlers.
        resume: continue with the newest queue that a killed process has left of this run, instead of creating one. With a queue server
            (queue.url), all waiting rollouts of the run are run anyway.
    """

    def __init__(self, settings: Settings, agent: AgentSpec | AgentsBySource, *, resume: bool = False) -> None:
        self._settings = settings
        self._agent = agent
        self._resume = resume
        self._stack = AsyncExitStack()
        self._cursor = 0
        self._prompt: PromptVersion | None = None
        """Prompt version that rollouts are pinned to whose tasks name no prompt. None: they are not pinned."""
        self.queue: QueueClient
        self._worker: Worker
        self._services: RunServices

    async def __aenter__(self) -> Self:
        """Check that store and gateway answer, then start the agent hosts.

        Raises:
            StoreError: the store takes no spans.
            GatewayError: the gateway does not answer, or has no engine.
            AgentError: the agent cannot be loaded.
            QueueError: the queue does not answer; or there is none to resume.
        """
        settings = self._settings.runner
        async with AsyncExitStack() as stack:
            handlers = await open_handlers(self._settings, self._agent, stack, self._open_queue)
            self._services, self.queue = handlers.services, handlers.services.queue
            self._cursor = (await self.queue.run(settings.run_id)).cursor
            worker = Worker(settings.run_id, handlers, store_retry_seconds=_STORE_RETRY_SECONDS)
            self._worker = await stack.enter_async_context(worker)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._stack.aclose()

    async def run(
        self, tasks: Sequence[Task], *, mode: Mode, group_size: int, progress: Callable[[Outcome], None] | None = None
    ) -> list[Outcome]:
        """Run `group_size` rollouts of each task, in a new group per task, and a greedy rollout of each task where the settings ask for it.

        `progress` is called with each outcome as it arrives.

        Returns:
            Outcomes, by task, then by rollout; a task's greedy one is its first.

        Raises:
            SettingsError: greedy rollouts or the sampling of validation are configured, and there is no gateway.
            GatewayError: the gateway does not answer.
            AgentError: a crashed agent cannot be loaded any more.
            StoreError: the root spans are not accepted.
            QueueError: the queue does not answer.
            PromptError: the prompt that prompts.pin names is not published.
        """
        settings = self._settings.runner
        greedy = wants_greedy(self._settings, mode)
        rollouts = rollouts_of(tasks, settings.run_id, mode, group_size, greedy=greedy)
        cursor = self._cursor
        ids = [rollout.key.rollout_id for rollout in rollouts]
        try:
            self._prompt = await asyncio.to_thread(pinned_prompt, self._settings)
            await self.queue.enqueue(settings.run_id, [self._queued(rollout, self._settings) for rollout in rollouts])
            return await self._wait(ids, cursor, progress)
        except BaseException:
            await self._abandon(ids, cursor)
            raise

    async def finish(self, progress: Callable[[Outcome], None] | None = None) -> list[Outcome]:
        """Run what is in the queue already, after `resume` has opened it.

        Returns:
            Outcomes of all its rollouts, including those that had ended before.

        Raises:
            SpangradError: as `run`.
        """
        ids = await self.waiting()
        try:
            return await self._wait(ids, 0, progress)
        except BaseException:
            await self._abandon(ids, 0)
            raise

    async def follow(self, tasks: Sequence[Task], ending: asyncio.Event, *, seed: int) -> None:
        """Enqueue groups of mode train as trainers demand them, and work on them, until `ending` is set; then drain.

        Args:
            tasks: taken in an order that depends on the seed, again and again.
            ending: event that ends the work; rollouts that are not done by then stay in the queue.
            seed: determines that order.

        Raises:
            SpangradError: as `run`.
        """

        async def served(policy: str) -> int | None:
            return await self._services.gateway.served(policy) if self._services.gateway is not None else None

        source = DemandSource(self._settings, self.queue, tasks, seed=seed, queued=self._queued, served=served)
        stopping = asyncio.create_task(ending.wait())
        rising: asyncio.Task[Any] | None = None
        try:
            while not stopping.done():
                self._prompt = await asyncio.to_thread(pinned_prompt, self._settings)
                demanded = await source.update()
                if rising is None or rising.done():
                    more = self.queue.demand(self._settings.runner.run_id, above=demanded, wait_seconds=_LONG_POLL_SECONDS)
                    rising = asyncio.create_task(more)
                waits: set[asyncio.Future[Any]] = {stopping, self._worker.failed, rising}
                await asyncio.wait(waits, timeout=_DEMAND_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if self._worker.failed.done():
                    raise self._worker.failed.result()
                if rising.done():
                    await rising
        finally:
            stopping.cancel()
            if rising:
                rising.cancel()
            await self._worker.drain(0 if self._worker.failed.done() else self._settings.runner.drain_seconds)

    async def waiting(self) -> list[str]:
        """Return the ids of the run's rollouts in the queue, in order of arrival."""
        ids: list[str] = []
        after = 0
        while (page := await self.queue.rollouts(run_id=self._settings.runner.run_id, after=after, limit=_PAGE)).rollouts:
            ids += [rollout.rollout_id for rollout in page.rollouts]
            after = page.cursor
        return ids

    def _queued(self, rollout: Rollout, settings: Settings) -> NewRollout:
        """Convert a rollout to the queue's form, pinned to the prompt that its task names, else to that of prompts.pin."""
        return queued(rollout, settings, self._prompt)

    async def _wait(self, ids: Sequence[str], cursor: int, progress: Callable[[Outcome], None] | None) -> list[Outcome]:
        left = set(ids)
        outcomes: dict[str, Outcome] = {}
        while left:
            ended_page = asyncio.create_task(
                self.queue.ended(self._settings.runner.run_id, after=cursor, limit=_PAGE, wait_seconds=_LONG_POLL_SECONDS)
            )
            try:
                await asyncio.wait([ended_page, self._worker.failed], return_when=asyncio.FIRST_COMPLETED)
                if self._worker.failed.done():
                    raise self._worker.failed.result()
            finally:
                ended_page.cancel()
            page = ended_page.result()
            cursor = page.cursor
            self._cursor = max(cursor, self._cursor)
            for rollout in page.rollouts:
                await self._services.lost.close(rollout)
                if rollout.rollout_id in left:
                    left.discard(rollout.rollout_id)
                    outcome = outcomes[rollout.rollout_id] = outcome_of(rollout)
                    if progress is not None:
                        progress(outcome)
        await self._worker.without(ids)
        await self._services.roots.acknowledged(_STORE_RETRY_SECONDS)
        return [outcomes[name] for name in ids]

    async def _abandon(self, ids: Sequence[str], cursor: int) -> None:
        """Cancel the rollouts that have not ended, and wait until each attempt that began has its root span."""
        for start in range(0, len(ids), _CANCELLED_AT_ONCE):
            await self.queue.cancel(RolloutSelector(rollout_ids=list(ids[start : start + _CANCELLED_AT_ONCE])))
        self._worker.stop(set(ids), _STOPPED)
        left = set(ids)
        while left:
            page = await self.queue.ended(self._settings.runner.run_id, after=cursor, limit=_PAGE)
            cursor = page.cursor
            if not page.rollouts:
                break  # the missing rollouts were not enqueued
            for rollout in page.rollouts:
                await self._services.lost.close(rollout)
            left -= {rollout.rollout_id for rollout in page.rollouts}
        await self._worker.without(ids)
        await self._services.roots.acknowledged(_STORE_RETRY_SECONDS)

    async def _open_queue(self) -> QueueClient:
        settings = self._settings.runner
        if self._settings.queue.url is not None:
            return QueueClient.of(self._settings.queue)
        left = await EmbeddedQueue.left(self._settings)
        chosen = left.pop()[0] if left and self._resume else None
        for queue, count in left:
            await queue.close()
            _logger.warning(
                "%d rollouts of run %s were left by a process that ended; --resume continues them (%s)",
                count, settings.run_id, queue.file,
            )  # fmt: skip
        if self._resume and chosen is None:
            raise QueueError(f"nothing of run {settings.run_id} is left in {settings.directory}: there is nothing to resume.")
        return chosen or EmbeddedQueue.begin(self._settings)


async def open_handlers(
    settings: Settings, agent: AgentSpec | AgentsBySource, stack: AsyncExitStack, queue: Callable[[], Awaitable[QueueClient]]
) -> Handlers:
    """Open the services that attempts need, and start the hosts of each agent; `stack` closes them.

    Raises:
        SpangradError: the store, the gateway, the queue or an agent is not available.
    """
    await require_store(settings.store)
    gateway = None
    if settings.runner.gateway:
        gateway = GatewayClient(settings.gateway.url, settings.gateway.token)
        stack.push_async_callback(gateway.close)
        await gateway.require_ready()
    agents = agent if isinstance(agent, Mapping) else {ANY_SOURCE: agent}
    opened: dict[str, tuple[AttemptServices, AgentSandbox | None]] = {}
    for source, spec in agents.items():
        own = _of_handler(settings, source)
        opened[source] = await _open_services(own, spec, stack), await stack.enter_async_context(open_agent_sandbox(own, spec))
    roots = RootSpans(settings.store)
    stack.push_async_callback(roots.shut)
    opened_queue = await queue()
    stack.push_async_callback(opened_queue.close)
    files = AttemptFiles(settings.runner.directory, settings.runner.attempts_kept)
    await asyncio.to_thread(files.prune)
    services = RunServices(gateway, roots, opened_queue, files, LostAttempts(gateway, roots, opened_queue))
    attempts: dict[str, Attempts] = {}
    pools: list[HostPool] = []
    for source, (agent_services, sandbox) in opened.items():
        runner, spec = _of_handler(settings, source).runner, agents[source]
        pool = HostPool(spec, runner, agent_environment(os.environ, settings, spec), sandbox and sandbox.launch, name=source)
        stack.push_async_callback(pool.close)
        await asyncio.to_thread(remove_of_dead, spec)
        attempts[source] = Attempts(pool, services, runner, agent_services, sandbox.facts if sandbox else UNCONFINED)
        pools.append(pool)
    await asyncio.gather(*(pool.start() for pool in pools))
    return Handlers(attempts, services)


def _of_handler(settings: Settings, source: str) -> Settings:
    return settings if source == ANY_SOURCE else settings.model_copy(update={"runner": settings.runner.of_handler(source)})


async def _open_services(settings: Settings, agent: AgentSpec, stack: AsyncExitStack) -> AttemptServices:
    """Connect to the environment service and the reward service, where the agent names them by URL.

    Raises:
        EnvironmentsError: a service does not answer, or refuses the token.
    """
    environments = rewards = None
    if agent.environment and is_service(agent.environment):
        environments = EnvironmentClient(agent.environment, settings.environments.token)
        await stack.enter_async_context(environments)
    if agent.evaluator and is_service(agent.evaluator):
        rewards = RewardClient(agent.evaluator, settings.rewards.token)
        await stack.enter_async_context(rewards)
    return AttemptServices(environments, rewards, by_rules=settings.builder.rewards_from == "rules")


def outcome_of(queued_rollout: QueuedRollout) -> Outcome:
    """Return the outcome of a rollout that has ended."""
    last = queued_rollout.attempts[-1] if queued_rollout.attempts else None
    succeeded = queued_rollout.state is RolloutState.SUCCEEDED
    failure = None if succeeded else (last and last.reason) or AttemptFailure.CANCELLED
    return Outcome(
        RolloutKey(queued_rollout.run_id, queued_rollout.rollout_id, last.attempt if last else 0),
        queued_rollout.task_id,
        queued_rollout.mode,
        ((last and last.rewards) or {}) if succeeded else last and last.rewards,
        AttemptFailure.CANCELLED if queued_rollout.state is RolloutState.CANCELLED else failure,
        last.detail if last else "cancelled before it began",
        (last and last.seconds) or 0.0,
        last.calls if last else 0,
    )
