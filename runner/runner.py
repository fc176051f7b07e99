"""Runs rollouts: n of each task, side by side in agent hosts, each attempt under a root span of its own.

In: tasks, an agent, settings. Out: one root span `rollout` an attempt, with its rewards or its failure and the number of its policy
calls, and an `Outcome` a rollout. Invariant: when `run` returns, the store has acknowledged the root spans of all its attempts; a
failed attempt carries a reason and no reward.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

import aiohttp
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, StatusCode

from runner.agents import AgentSpec
from runner.gateway_client import GatewayClient
from runner.groups import rollouts_of, wants_greedy
from runner.hosts import Answer, HostPool, Job
from spangrad import semconv
from spangrad.errors import StoreError
from spangrad.propagation import carrier_of, with_baggage
from spangrad.settings import Settings
from spangrad.telemetry import bearer, tracer_provider, traces_url
from spangrad.types import AttemptFailure, Mode, Rollout, RolloutKey, Task

_SERVICE = "spangrad-runner"
_FLUSH_MILLISECONDS = 30_000
_NOT_FOR_HOSTS = frozenset({"TRACEPARENT", "TRACESTATE", "BAGGAGE"})

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a rollout ended."""

    key: RolloutKey
    """Its last attempt."""
    task_id: str
    mode: Mode
    """What it was for."""
    reward: Mapping[str, float] | None
    """Final rewards by name. None exactly when it failed; empty when the agent has rewarded itself: its spans then hold the rewards."""
    failure: AttemptFailure | None
    """Why its last attempt failed. None when it succeeded."""
    detail: str
    """What happened, for people; empty when it succeeded."""
    seconds: float
    """From the start of its first attempt to the end of its last, waits for a free slot between them included."""
    calls: int | None
    """Policy calls of the last attempt. None: there is no gateway to ask, or it has forgotten the attempt, which then failed."""


class Runner:
    """Agent hosts, a connection to the gateway, and the root spans; an async context manager.

    Args:
        settings: where store and gateway are, and how many rollouts run at once.
        agent: what to run.
        logs: directory of the agent hosts' logs.
    """

    def __init__(self, settings: Settings, agent: AgentSpec, *, logs: Path = Path("data/logs")) -> None:
        self._settings = settings
        self._gateway: GatewayClient | None = None
        self._pool = HostPool(
            agent,
            settings.runner.workers,
            settings.runner.concurrency,
            agent_environment(os.environ, settings, agent.name),
            logs,
        )
        token = settings.store.token
        self._provider = tracer_provider(_SERVICE, settings.store.otlp_endpoint, bearer(token.get_secret_value() if token else None))
        self._tracer = self._provider.get_tracer("spangrad.runner")

    async def __aenter__(self) -> Self:
        """Check that store and gateway are there, then start the agent hosts.

        Raises:
            StoreError: the store takes no spans.
            GatewayError: the gateway does not answer, or has no engine.
            AgentError: the agent cannot be loaded.
        """
        try:
            await _require_store(self._settings)
            if self._settings.runner.gateway:
                token = self._settings.gateway.token
                self._gateway = GatewayClient(self._settings.gateway.url, token.get_secret_value() if token else None)
                await self._gateway.require_ready()
            await self._pool.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close."""
        await self.close()

    async def close(self) -> None:
        """Stop all processes, then send what spans are left, for a bounded time."""
        await self._pool.close()
        if self._gateway is not None:
            await self._gateway.close()
        await asyncio.to_thread(self._provider.shutdown)

    async def run(
        self, tasks: Sequence[Task], *, mode: Mode, group_size: int, progress: Callable[[Outcome], None] | None = None
    ) -> list[Outcome]:
        """Run `group_size` rollouts of each task, which share a new group, and a greedy one of each where that is wanted.

        Args:
            tasks: what to ask the agent.
            mode: what the rollouts are for.
            group_size: rollouts a task.
            progress: called with each outcome as it comes.

        Returns:
            the outcomes, by task, then by rollout; a task's greedy one is its first.

        Raises:
            SettingsError: greedy rollouts are wanted, and there is no gateway.
            GatewayError: the gateway stays away.
            AgentError: a crashed agent cannot be loaded any more.
            StoreError: the root spans are not taken.
        """
        greedy = wants_greedy(self._settings, mode)
        rollouts = rollouts_of(tasks, self._settings.runner.run_id, mode, group_size, greedy=greedy)

        async def one(rollout: Rollout) -> Outcome:
            outcome = await self._rollout(rollout)
            if progress is not None:
                progress(outcome)
            return outcome

        running = [asyncio.create_task(one(rollout)) for rollout in rollouts]
        try:
            outcomes = await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            flushed = await asyncio.to_thread(self._provider.force_flush, _FLUSH_MILLISECONDS)
        if not flushed:
            endpoint = self._settings.store.otlp_endpoint
            seconds = _FLUSH_MILLISECONDS / 1000
            raise StoreError(f"the store at {endpoint} has not taken root spans for {seconds:g} s. Start it with `spangrad store`.")
        return outcomes

    async def _rollout(self, rollout: Rollout) -> Outcome:
        """Attempt a rollout until one attempt succeeds or none is left."""
        started: float | None = None
        for number in itertools.count():
            attempt = replace(rollout, key=replace(rollout.key, attempt=number))
            final = number + 1 >= self._settings.runner.max_attempts
            span: Span | None = None
            try:
                async with self._pool.slot() as host:
                    started = started or time.monotonic()
                    span = self._open(attempt)
                    carrier = carrier_of(_attempt_context(attempt, span))
                    if self._gateway is not None:
                        await self._gateway.announce(attempt.key, attempt.mode, carrier["traceparent"])
                    answer = await host.run(self._job(attempt, carrier), self._settings.runner.timeout_seconds)
                calls = await self._gateway.calls(attempt.key) if self._gateway is not None else None
            except BaseException:
                stopped = Answer(None, AttemptFailure.CANCELLED, "the runner was stopped")
                if span is not None:
                    _close(span, stopped, None, final=True)
                elif number:  # the attempt before it was not the last one, so somebody must say that no other comes
                    _close(self._open(attempt), stopped, 0, final=True)
                raise
            if self._gateway is not None and calls is None and answer.failure is None:
                answer = Answer(None, AttemptFailure.UNCOUNTED, "the gateway does not know this attempt any more")
            final = final or answer.failure is None
            _close(span, answer, calls, final=final)
            if final:
                return Outcome(
                    attempt.key,
                    attempt.task.task_id,
                    attempt.mode,
                    _by_name(answer.rewards),
                    answer.failure,
                    answer.detail,
                    time.monotonic() - started,
                    calls,
                )
            _logger.info("attempt %d of rollout %s failed (%s): %s", number, attempt.key.rollout_id, answer.failure, answer.detail)
        raise AssertionError("unreachable: the loop ends with a final attempt")

    def _open(self, rollout: Rollout) -> Span:
        """The root span of an attempt: a trace of its own, whatever span the caller is in."""
        return self._tracer.start_span(
            semconv.ROOT_SPAN_NAME,
            context=Context(),
            attributes={
                semconv.RUN_ID: rollout.key.run_id,
                semconv.ROLLOUT_ID: rollout.key.rollout_id,
                semconv.ROLLOUT_MODE: rollout.mode,
                semconv.ROLLOUT_ATTEMPT: rollout.key.attempt,
                semconv.TASK_ID: rollout.task.task_id,
                semconv.GROUP_ID: rollout.group_id,
                semconv.GROUP_SIZE: rollout.group_size,
            },
        )

    def _job(self, rollout: Rollout, carrier: Mapping[str, str]) -> Job:
        return Job(
            id=f"{rollout.key.rollout_id}/{rollout.key.attempt}",
            input=rollout.task.input,
            traceparent=carrier["traceparent"],
            baggage=carrier["baggage"],
            endpoint=self._gateway.endpoint(rollout.key) if self._gateway is not None else None,
        )


def agent_environment(environ: Mapping[str, str], settings: Settings, service: str) -> dict[str, str]:
    """The environment that an agent's process starts in: ours, with the addresses of policy and store.

    Args:
        environ: the runner's own environment.
        settings: where gateway, engine and store are.
        service: `service.name` of the agent's spans, unless the environment names one.
    """
    found = {name: value for name, value in environ.items() if name not in _NOT_FOR_HOSTS}
    found.setdefault("OTEL_SERVICE_NAME", service)
    found["OTEL_EXPORTER_OTLP_ENDPOINT"] = settings.store.otlp_endpoint
    if settings.store.token is not None:
        found["OTEL_EXPORTER_OTLP_HEADERS"] = f"authorization=Bearer%20{quote(settings.store.token.get_secret_value(), safe='')}"
    policy = settings.gateway.url if settings.runner.gateway else settings.gateway.engine_url
    found["OPENAI_BASE_URL"] = policy.rstrip("/") + "/v1"
    # The openai client refuses to start without a key, even where none is asked for.
    if settings.runner.gateway:
        found["OPENAI_API_KEY"] = settings.gateway.token.get_secret_value() if settings.gateway.token else "none"
    else:
        found.setdefault("OPENAI_API_KEY", "none")
    return found


def _attempt_context(rollout: Rollout, span: Span) -> Context:
    entries = {
        semconv.RUN_ID: rollout.key.run_id,
        semconv.ROLLOUT_ID: rollout.key.rollout_id,
        semconv.ROLLOUT_MODE: str(rollout.mode),
        semconv.ROLLOUT_ATTEMPT: str(rollout.key.attempt),
    }
    return with_baggage(trace.set_span_in_context(span, Context()), entries)


def _close(span: Span, answer: Answer, calls: int | None, *, final: bool) -> None:
    """Write on the root span how its attempt went, and end it."""
    span.set_attribute(semconv.ROLLOUT_FINAL, final)
    if calls is not None:
        span.set_attribute(semconv.ROLLOUT_CALLS, calls)
    if answer.failure is not None:
        span.set_attribute(semconv.ROLLOUT_FAILURE, answer.failure)
        span.set_status(StatusCode.ERROR, answer.detail)
    for name, value in (_by_name(answer.rewards) or {}).items():
        span.add_event(semconv.EVALUATION_EVENT, {semconv.EVALUATION_NAME: name, semconv.EVALUATION_SCORE: value})
    span.end()


def _by_name(rewards: Mapping[str, float] | float | None) -> Mapping[str, float] | None:
    return rewards if rewards is None or isinstance(rewards, Mapping) else {semconv.REWARD_NAME: rewards}


async def _require_store(settings: Settings) -> None:
    """Send no spans at all, to see that they would be taken.

    Raises:
        StoreError: they would not.
    """
    endpoint = settings.store.otlp_endpoint
    headers = {
        "content-type": "application/x-protobuf",
        **bearer(settings.store.token.get_secret_value() if settings.store.token else None),
    }
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session,
            session.post(traces_url(endpoint), data=b"", headers=headers) as answer,
        ):
            if answer.status >= 300:
                said = (await answer.text())[:300]
                raise StoreError(
                    f"the store at {endpoint} refuses spans: HTTP {answer.status} {said}. Check store.otlp_endpoint and store.token."
                )
    except (aiohttp.ClientError, OSError) as error:
        raise StoreError(
            f"the store at {endpoint} does not answer ({error}). Start it with `spangrad store`, or set store.otlp_endpoint."
        ) from None
