"""Root spans: one `rollout` an attempt, which says whose the attempt is and how it went.

In: attempts, and how they ended. Out: spans to the store. Invariant: the identity of a root span is worked out from run, rollout and
attempt, so whoever writes the root of an attempt, its worker or somebody who found it dead, writes the same span; the store counts it once.
A root that was given up does not count as acknowledged.

A rollout ends with the root that carries the final mark. Where several do, because a worker died between the store's acknowledgement and
the queue's, the newest attempt's counts, in the queue as in the builder.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType

import aiohttp
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import Span, StatusCode

from runner.workers.jobs import Answer
from spangrad import semconv
from spangrad.agent.propagation import carrier_of, with_baggage
from spangrad.agent.reward_values import Rewards, entries
from spangrad.agent.telemetry import LosslessSpanProcessor, bearer, provider_through, traces_url
from spangrad.errors import StoreError
from spangrad.settings import StoreSettings
from spangrad.types import Rollout, Stage

_SERVICE = "spangrad-runner"
_FLUSH_MILLISECONDS = 5_000
_CLAIMS_KEPT = 100_000
_SECONDS = {
    Stage.INIT: semconv.INIT_SECONDS,
    Stage.RUN: semconv.RUN_SECONDS,
    Stage.EVALUATE: semconv.EVALUATE_SECONDS,
}


class Roots:
    """Root spans of one process, and their way to the store."""

    def __init__(self, store: StoreSettings) -> None:
        self._store = store
        self._ids = _Ids()
        token = store.token.get_secret_value() if store.token else None
        self._sending = LosslessSpanProcessor(traces_url(store.otlp_endpoint), bearer(token))
        self._provider = provider_through(self._sending, _SERVICE, self._ids)
        self._tracer = self._provider.get_tracer("spangrad.runner")
        self._claims: OrderedDict[tuple[str, int], None] = OrderedDict()

    def claim(self, rollout_id: str, attempt: int) -> bool:
        """Say that this process writes the root of an attempt; False when it had said so before."""
        key = (rollout_id, attempt)
        if key in self._claims:
            return False
        self._claims[key] = None
        if len(self._claims) > _CLAIMS_KEPT:
            self._claims.popitem(last=False)
        return True

    def open(self, rollout: Rollout) -> Span:
        """Begin the root of an attempt: a trace of its own, whatever span the caller is in."""
        self._ids.key = "\0".join((rollout.key.run_id, rollout.key.rollout_id, str(rollout.key.attempt)))
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
                **_prompt(rollout),
            },
        )

    def close(
        self, span: Span, answer: Answer, calls: int | None, stages: Mapping[Stage, float] = MappingProxyType({}), *, final: bool
    ) -> None:
        """Write on a root how its attempt went, and end it.

        Args:
            span: of the attempt.
            answer: rewards, or a failure.
            calls: policy calls that the gateway answered. None: nobody counted.
            stages: seconds in each stage that it came to.
            final: whether no other attempt will come.
        """
        span.set_attribute(semconv.ROLLOUT_FINAL, final)
        if calls is not None:
            span.set_attribute(semconv.ROLLOUT_CALLS, calls)
        for stage, seconds in stages.items():
            span.set_attribute(_SECONDS[stage], seconds)
        if answer.failure is not None:
            span.set_attribute(semconv.ROLLOUT_FAILURE, answer.failure)
            span.set_status(StatusCode.ERROR, answer.detail)
        for name, role, value in entries(by_name(answer.rewards) or {}):
            of_role = {semconv.REWARD_ROLE: role} if role else {}
            span.add_event(semconv.EVALUATION_EVENT, {semconv.EVALUATION_NAME: name, semconv.EVALUATION_SCORE: value, **of_role})
        span.end()

    async def acknowledged(self, patience_seconds: float) -> None:
        """Wait until the store has taken the roots that were closed before.

        Raises:
            StoreError: it has not for so long, or one was given up, before or now.
        """
        end = asyncio.get_running_loop().time() + patience_seconds
        while not await asyncio.to_thread(self._provider.force_flush, _FLUSH_MILLISECONDS):
            if asyncio.get_running_loop().time() > end:
                endpoint = self._store.otlp_endpoint
                seconds = f"{patience_seconds:g} s"
                raise StoreError(f"the store at {endpoint} has not taken root spans for {seconds}. Start it with `spangrad store`.")
        if self._sending.lost:  # for good: each of those who wait at the same time must hear of it
            raise StoreError(
                f"root spans did not get into the store at {self._store.otlp_endpoint} ({self._sending.lost_because}), and the queue is "
                "not told of attempts that have none there. See what the store has against them; then the rollouts are run again."
            )

    async def shut(self) -> None:
        """Send what is left, for a bounded time."""
        await asyncio.to_thread(self._provider.shutdown)


def carrier(rollout: Rollout, span: Span) -> dict[str, str]:
    """`traceparent` and `baggage` of an attempt."""
    entries = {
        semconv.RUN_ID: rollout.key.run_id,
        semconv.ROLLOUT_ID: rollout.key.rollout_id,
        semconv.ROLLOUT_MODE: str(rollout.mode),
        semconv.ROLLOUT_ATTEMPT: str(rollout.key.attempt),
        **{name: str(value) for name, value in _prompt(rollout).items()},
    }
    return carrier_of(with_baggage(trace.set_span_in_context(span, Context()), entries))


def _prompt(rollout: Rollout) -> dict[str, str | int]:
    prompt = rollout.task.prompt
    return {} if prompt is None else {semconv.PROMPT_NAME: prompt.name, semconv.PROMPT_VERSION: prompt.version}


def by_name(rewards: Rewards | float | None) -> Rewards | None:
    """Rewards by name: a lone number is the reward."""
    return rewards if rewards is None or isinstance(rewards, Mapping) else {semconv.REWARD_NAME: rewards}


class _Ids(IdGenerator):
    """Ids of the root of `key`; set it, then start the span in the same thread."""

    def __init__(self) -> None:
        self.key = ""

    def generate_trace_id(self) -> int:
        return int.from_bytes(hashlib.sha256(f"trace of {self.key}".encode()).digest()[:16])

    def generate_span_id(self) -> int:
        return int.from_bytes(hashlib.sha256(f"root of {self.key}".encode()).digest()[:8])


async def require_store(store: StoreSettings) -> None:
    """Send no spans at all, to see that they would be taken.

    Raises:
        StoreError: they would not.
    """
    endpoint = store.otlp_endpoint
    headers = {"content-type": "application/x-protobuf", **bearer(store.token.get_secret_value() if store.token else None)}
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
