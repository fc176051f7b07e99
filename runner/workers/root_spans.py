"""Root spans: one `rollout` span per attempt, with its identity, how it went, and a child span for each stage.

Invariant: the ids of a root span are a function of run, rollout and attempt, so its worker and a process that finds the worker dead write
the same span; the store counts it once. A root span that could not be sent does not count as acknowledged.

A rollout ends with the root span that carries the final mark. Where several do, because a worker died between the store's acknowledgement
and the queue's, the newest attempt's counts, in the queue as in the builder.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import Span, StatusCode

from runner.workers.jobs import AttemptOutcome
from runner.workers.slots import StageTime
from span_processors.export import LosslessSpanProcessor, provider_through, traces_url
from spangrad import semconv
from spangrad.agent.propagation import carrier_of, with_baggage
from spangrad.agent.reward_values import Rewards, entries
from spangrad.errors import StoreError
from spangrad.http.async_http import AsyncClient
from spangrad.http.service import RemoteService, bearer
from spangrad.settings import StoreSettings
from spangrad.types import Rollout

_SERVICE = "spangrad-runner"
_CHECK_SECONDS = 10.0
_FLUSH_MILLISECONDS = 5_000
_CLAIMS_KEPT = 100_000


class RootSpans:
    """Root spans of one process, and their exporter."""

    def __init__(self, store: StoreSettings) -> None:
        self._store = store
        self._ids = _Ids()
        token = store.token.get_secret_value() if store.token else None
        self._sending = LosslessSpanProcessor(traces_url(store.otlp_endpoint), bearer(token))
        self._provider = provider_through(self._sending, _SERVICE, self._ids)
        self._tracer = self._provider.get_tracer(semconv.RUNNER_SCOPE)
        self._claims: OrderedDict[tuple[str, int], None] = OrderedDict()

    def claim(self, rollout_id: str, attempt: int) -> bool:
        """Claim the root span of an attempt for this process; return False if it was claimed before."""
        key = (rollout_id, attempt)
        if key in self._claims:
            return False
        self._claims[key] = None
        if len(self._claims) > _CLAIMS_KEPT:
            self._claims.popitem(last=False)
        return True

    def open(self, rollout: Rollout) -> Span:
        """Begin the root span of an attempt: a trace of its own, independent of the caller's span."""
        self._ids.key = "\0".join((rollout.key.run_id, rollout.key.rollout_id, str(rollout.key.attempt)))
        return self._tracer.start_span(
            semconv.ROOT_SPAN_NAME,
            context=Context(),
            attributes={
                **_identity(rollout),
                semconv.TASK_ID: rollout.task.task_id,
                semconv.GROUP_ID: rollout.group_id,
                semconv.GROUP_SIZE: rollout.group_size,
            },
        )

    def close(self, span: Span, answer: AttemptOutcome, calls: int | None, stages: Sequence[StageTime] = (), *, final: bool) -> None:
        """Write the result of an attempt to its root span, and its stages as children, and end it.

        Args:
            span: root span of the attempt.
            answer: rewards, or a failure.
            calls: policy calls that the gateway answered. None: they were not counted.
            stages: times of the stages that the attempt reached.
            final: True if no other attempt follows.
        """
        span.set_attribute(semconv.ROLLOUT_FINAL, final)
        if calls is not None:
            span.set_attribute(semconv.ROLLOUT_CALLS, calls)
        if answer.failure is not None:
            span.set_attribute(semconv.ROLLOUT_FAILURE, answer.failure)
            span.set_status(StatusCode.ERROR, answer.detail)
        for name, role, value in entries(by_name(answer.rewards) or {}):
            of_role = {semconv.REWARD_ROLE: role} if role else {}
            span.add_event(semconv.EVALUATION_EVENT, {semconv.EVALUATION_NAME: name, semconv.EVALUATION_SCORE: value, **of_role})
        self._write_stages(span, stages)
        span.end()

    def _write_stages(self, root: Span, stages: Sequence[StageTime]) -> None:
        """Write the child spans before their root ends: who receives the root has them all."""
        if not isinstance(root, ReadableSpan) or not stages:
            return
        carried = {key: value for key in semconv.CONTEXT_KEYS if (value := (root.attributes or {}).get(key)) is not None}
        for index, stage in enumerate(stages):
            self._ids.key = f"{root.get_span_context().span_id:x}\0{stage.stage}\0{index}"
            child = self._tracer.start_span(
                stage.stage, trace.set_span_in_context(root, Context()), attributes=carried, start_time=stage.started_at
            )
            child.end(stage.started_at + round(stage.seconds * 1e9))

    async def acknowledged(self, retry_seconds: float) -> None:
        """Wait until the store has accepted the root spans that were closed before.

        Raises:
            StoreError: the time limit has passed, or a span was given up, before or now.
        """
        end = asyncio.get_running_loop().time() + retry_seconds
        while not await asyncio.to_thread(self._provider.force_flush, _FLUSH_MILLISECONDS):
            if asyncio.get_running_loop().time() > end:
                endpoint = self._store.otlp_endpoint
                seconds = f"{retry_seconds:g} s"
                raise StoreError(f"the store at {endpoint} has not taken root spans for {seconds}. Start it with `spangrad store`.")
        if self._sending.lost:  # it stays set: each of the concurrent callers must raise
            raise StoreError(
                f"root spans did not get into the store at {self._store.otlp_endpoint} ({self._sending.lost_because}), and the queue is "
                "not informed of attempts without them. Check why the store refuses them; then the rollouts are run again."
            )

    async def shut(self) -> None:
        """Send the remaining spans, in bounded time."""
        await asyncio.to_thread(self._provider.shutdown)


def carrier(rollout: Rollout, span: Span) -> dict[str, str]:
    """Return `traceparent` and `baggage` of an attempt."""
    carried = {name: str(value) for name, value in _identity(rollout).items()}
    return carrier_of(with_baggage(trace.set_span_in_context(span, Context()), carried))


def _identity(rollout: Rollout) -> dict[str, str | int]:
    """Return the attributes that an attempt's root span and its baggage share."""
    prompt = rollout.task.prompt
    return {
        semconv.RUN_ID: rollout.key.run_id,
        semconv.ROLLOUT_ID: rollout.key.rollout_id,
        semconv.ROLLOUT_MODE: rollout.mode,
        semconv.ROLLOUT_ATTEMPT: rollout.key.attempt,
        **({} if prompt is None else {semconv.PROMPT_NAME: prompt.name, semconv.PROMPT_VERSION: prompt.version}),
    }


def by_name(rewards: Rewards | float | None) -> Rewards | None:
    """Return rewards by name: a lone number is the main reward."""
    return rewards if rewards is None or isinstance(rewards, Mapping) else {semconv.REWARD_NAME: rewards}


class _Ids(IdGenerator):
    """Generates the ids of the span of `key`; set it, then start the span in the same thread."""

    def __init__(self) -> None:
        self.key = ""

    def generate_trace_id(self) -> int:
        return int.from_bytes(hashlib.sha256(f"trace of {self.key}".encode()).digest()[:16])

    def generate_span_id(self) -> int:
        return int.from_bytes(hashlib.sha256(f"root of {self.key}".encode()).digest()[:8])


async def require_store(store: StoreSettings) -> None:
    """Send an empty request, to check that the store accepts spans.

    Raises:
        StoreError: it does not.
    """
    remedy = "Start it with `spangrad store`, or set store.otlp_endpoint."
    token = store.token.get_secret_value() if store.token else None
    protobuf = {"Content-Type": "application/x-protobuf"}
    service = RemoteService("the store", store.otlp_endpoint, token, StoreError, remedy, own_headers=protobuf)
    try:
        async with AsyncClient(service, seconds=_CHECK_SECONDS) as client:
            await client.ask("POST", traces_url(""), bytes)
    except StoreError as error:
        if error.http_status is None:
            raise
        raise StoreError(f"{error} Check store.otlp_endpoint and store.token.") from None
