"""Root spans: one `rollout` span per attempt, with its identity, how it went, and a child span for each stage.

Invariant: the ids of a root span are a function of run, rollout and attempt, so its worker and a process that finds the worker dead write
the same span; the store counts it once. A root span that could not be sent does not count as acknowledged.

A rollout ends with the root span that carries the final mark. Where several do, because a worker died between the store's acknowledgement
and the queue's, the newest attempt's counts, in the queue as in the builder.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource

from runner.workers.jobs import AttemptOutcome
from runner.workers.slots import StageTime
from span_processors.export import SEQUENCE, LosslessQueue, traces_url
from spangrad import semconv
from spangrad.agent.propagation import carrier_of, with_baggage
from spangrad.agent.reward_values import Rewards, entries
from spangrad.encoding import otlp
from spangrad.errors import StoreError
from spangrad.http.async_http import AsyncClient
from spangrad.http.service import RemoteService, bearer, without_userinfo
from spangrad.settings import StoreSettings
from spangrad.types import Rollout, SandboxRung

_SERVICE = "spangrad-runner"
_CHECK_SECONDS = 10.0
_FLUSH_MILLISECONDS = 5_000
_CLAIMS_KEPT = 100_000


@dataclass(frozen=True, slots=True)
class SandboxFacts:
    """Facts on the sandboxes of an agent's attempts."""

    rung: SandboxRung = SandboxRung.NONE
    image: str = ""
    """Digest of the image whose files programs see. Empty: they see the machine's."""


UNCONFINED = SandboxFacts()


@dataclass(frozen=True, slots=True)
class RootSpan:
    """A root span that has begun."""

    rollout: Rollout
    ids: otlp.SpanIds
    began: int
    """Time in nanoseconds since 1970."""
    sequence: Mapping[str, otlp.Value] = field(default_factory=SEQUENCE.next)
    """Attributes of its place in the sequence of the process."""
    sandbox: SandboxFacts = UNCONFINED
    """Sandbox that the attempt's program runs in."""


class _EncodedSpans(LosslessQueue[bytes]):
    """Queue of spans that are encoded."""

    _resource = otlp.resource(cast("Mapping[str, otlp.Value]", Resource.create({SERVICE_NAME: _SERVICE}).attributes))
    _scope = otlp.scope(semconv.RUNNER_SCOPE)

    def encode(self, spans: Sequence[bytes]) -> Iterator[tuple[bytes, int]]:
        yield otlp.request(self._resource, self._scope, spans), len(spans)


class RootSpans:
    """Root spans of one process, and their exporter."""

    def __init__(self, store: StoreSettings) -> None:
        self._store = store
        self._sending = _EncodedSpans(traces_url(store.otlp_endpoint), bearer(store.token))
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

    def open(self, rollout: Rollout, sandbox: SandboxFacts = UNCONFINED, began: int | None = None) -> RootSpan:
        """Begin the root span of an attempt, at a time in nanoseconds since 1970 or now: a trace of its own, whatever the caller's span."""
        key = "\0".join((rollout.key.run_id, rollout.key.rollout_id, str(rollout.key.attempt)))
        ids = otlp.SpanIds(hashlib.sha256(f"trace of {key}".encode()).digest()[:16], _span_id(key))
        return RootSpan(rollout, ids, time.time_ns() if began is None else began, sandbox=sandbox)

    def close(
        self,
        span: RootSpan,
        answer: AttemptOutcome,
        calls: int | None,
        stages: Sequence[StageTime] = (),
        *,
        final: bool,
        log: str = "",
        ended: int | None = None,
    ) -> None:
        """Write the result of an attempt to its root span, and its stages as children; end it at a time in nanoseconds since 1970, or now.

        `calls` are those that the gateway answered, None if they were not counted; `log` is the end of what the attempt printed; after
        one that is `final` no other attempt follows.
        """
        rollout = span.rollout
        ended = max(time.time_ns() if ended is None else ended, span.began)  # the clock may have been moved back meanwhile
        attributes: dict[str, otlp.Value] = {
            **_identity(rollout),
            semconv.TASK_ID: rollout.task.task_id,
            semconv.GROUP_ID: rollout.group_id,
            semconv.GROUP_SIZE: rollout.group_size,
            **span.sequence,
            semconv.ROLLOUT_FINAL: final,
            semconv.ROLLOUT_CALLS: calls,
            semconv.ROLLOUT_FAILURE: answer.failure,
            semconv.ROLLOUT_DATA_SOURCE: rollout.task.data_source or None,
            semconv.ROLLOUT_PARTIAL: answer.detail or None if answer.failure is None else None,
            semconv.ROLLOUT_LOG: log or None,
            semconv.ROLLOUT_SANDBOX: span.sandbox.rung if span.sandbox.rung is not SandboxRung.NONE else None,
            semconv.SANDBOX_IMAGE: span.sandbox.image or None,
        }
        events = [
            otlp.SpanEvent(
                semconv.EVALUATION_EVENT,
                ended,
                {semconv.EVALUATION_NAME: name, semconv.EVALUATION_SCORE: value, semconv.REWARD_ROLE: role or None},
            )
            for name, role, value in entries(by_name(answer.rewards) or {})
        ]
        error = None if answer.failure is None else answer.detail
        # Children first: who receives the root has them all.
        for index, stage in enumerate(stages):
            self._put(self._stage(span, stage, index))
        times = span.began, ended
        self._put(otlp.span(span.ids, semconv.ROOT_SPAN_NAME, otlp.SpanKind.INTERNAL, times, attributes, events=events, error=error))

    def _stage(self, root: RootSpan, stage: StageTime, index: int) -> bytes:
        ids = otlp.SpanIds(root.ids.trace, _span_id(f"{root.ids.span.hex()}\0{stage.stage}\0{index}"), root.ids.span)
        times = stage.started_at, stage.started_at + round(stage.seconds * 1e9)
        return otlp.span(ids, stage.stage, otlp.SpanKind.INTERNAL, times, {**_identity(root.rollout), **SEQUENCE.next()})

    def _put(self, span: bytes) -> None:
        self._sending.put(span, len(span))

    async def acknowledged(self, retry_seconds: float) -> None:
        """Wait until the store has accepted the root spans that were closed before.

        Raises:
            StoreError: the time limit has passed, or a span was given up, before or now.
        """
        end = asyncio.get_running_loop().time() + retry_seconds
        endpoint = without_userinfo(self._store.otlp_endpoint)
        while not await asyncio.to_thread(self._sending.force_flush, _FLUSH_MILLISECONDS):
            if asyncio.get_running_loop().time() > end:
                seconds = f"{retry_seconds:g} s"
                raise StoreError(f"the store at {endpoint} has not taken root spans for {seconds}. Start it with `spangrad store`.")
        if self._sending.lost:  # it stays set: each of the concurrent callers must raise
            raise StoreError(
                f"root spans did not get into the store at {endpoint} ({self._sending.lost_because}), and the queue is "
                "not informed of attempts without them. Check why the store refuses them; then the rollouts are run again."
            )

    async def shut(self) -> None:
        """Send the remaining spans, in bounded time."""
        await asyncio.to_thread(self._sending.shutdown)


def carrier(span: RootSpan) -> dict[str, str]:
    """Return `traceparent` and `baggage` of an attempt."""
    carried = {name: str(value) for name, value in _identity(span.rollout).items()}
    return {"traceparent": span.ids.traceparent, **carrier_of(with_baggage(Context(), carried))}


def _span_id(key: str) -> bytes:
    return hashlib.sha256(f"root of {key}".encode()).digest()[:8]


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


async def require_store(store: StoreSettings) -> None:
    """Send an empty request, to check that the store accepts spans.

    Raises:
        StoreError: it does not.
    """
    remedy = "Start it with `spangrad store`, or set store.otlp_endpoint."
    protobuf = {"Content-Type": "application/x-protobuf"}
    service = RemoteService("the store", store.otlp_endpoint, store.token, StoreError, remedy, own_headers=protobuf)
    try:
        async with AsyncClient(service, seconds=_CHECK_SECONDS) as client:
            await client.ask("POST", traces_url(""), bytes)
    except StoreError as error:
        if error.http_status is None:
            raise
        raise StoreError(f"{error} Check store.otlp_endpoint and store.token.") from None
