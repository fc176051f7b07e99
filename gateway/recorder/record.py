"""Span of a policy call: what is known of it, as the attributes of an OpenTelemetry span.

In: the facts of a call. Out: the bytes of one `opentelemetry.proto.trace.v1.Span`. Invariant: token ids and logprobs are
little-endian uint32 and float32 as bytes, exactly as the engine gave them; what is not known is absent, never zero.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from gateway.dialects.answer import EngineAnswer, Sampling
from gateway.dialects.base import ClientRequest, read_number
from gateway.proxy.context import CallContext
from gateway.proxy.modality import modality
from gateway.proxy.redaction import Redactor
from spangrad import semconv
from spangrad.encoding.otlp import SpanKind, Value, span
from spangrad.sampling import is_constrained

PROVIDER = "vllm"
MESSAGE_CHARACTERS = 2000
"""Most characters of an error's body that go into the span's status."""
GATEWAY_ERROR = "gateway_error"
"""`error.type` of calls that failed by a fault of the gateway."""

SAMPLING_DEFAULTS: dict[str, tuple[str, float]] = {
    "temperature": (semconv.GEN_AI_REQUEST_TEMPERATURE, 1.0),
    "top_p": (semconv.GEN_AI_REQUEST_TOP_P, 1.0),
    "top_k": (semconv.GEN_AI_REQUEST_TOP_K, 0),
    "min_p": (semconv.SAMPLING_MIN_P, 0.0),
    "presence_penalty": (semconv.GEN_AI_REQUEST_PRESENCE_PENALTY, 0.0),
    "frequency_penalty": (semconv.GEN_AI_REQUEST_FREQUENCY_PENALTY, 0.0),
    "repetition_penalty": (semconv.SAMPLING_REPETITION_PENALTY, 1.0),
}
"""Request field -> attribute, and vLLM's default with `--generation-config vllm`."""

LEAST_TEMPERATURE = 0.01
"""Smallest temperature above 0 that vLLM samples with; it raises smaller ones to this."""


@dataclass(slots=True)
class CallFacts:
    """Facts of a call; filled in while the call is in progress."""

    context: CallContext
    request: ClientRequest
    seq: int
    """Sequence number among the calls of this process."""
    started_ns: int
    provider: str = PROVIDER
    """Kind of the upstream that answers (`gen_ai.provider.name`)."""
    backend: str | None = None
    """Name of the backend that the call was forwarded to last. None: to none."""
    answer: EngineAnswer = field(default_factory=EngineAnswer)
    http_status: int | None = None
    """HTTP status of the response to the client. None: the client disconnected before one."""
    error_type: str | None = None
    """None: the call did not fail."""
    error_message: str = ""
    relaxed: tuple[str, ...] = ()
    """Names of `gateway.relax` that changed the request."""
    aborted: bool = False
    """True if the client or the engine's operator cut the answer."""


def build_span(facts: CallFacts, process_id: str, ended_ns: int, redactor: Redactor | None = None) -> bytes:
    """Serialize the span of a call, redacted."""
    operation, model = facts.request.dialect.operation, facts.request.fields.get("model")
    name, message = f"{operation} {model}" if model else operation, facts.error_message
    attributes = {**_identity(facts, process_id), **_request_and_response_attributes(facts)}
    if redactor is not None:
        name, message, attributes = redactor.redact(name, message, attributes)
    return _serialized(facts, ended_ns, name, message, attributes)


def bare_span(facts: CallFacts, process_id: str, ended_ns: int, fault: Exception) -> bytes:
    """Serialize the minimal span of a call that could not be recorded whole: its identity, and that the gateway failed."""
    # Only the type of the fault: its message may quote the call, which is not redacted.
    message = f"the call could not be recorded ({type(fault).__name__})"
    attributes = {**_identity(facts, process_id), semconv.ERROR_TYPE: GATEWAY_ERROR}
    return _serialized(replace(facts, error_type=GATEWAY_ERROR), ended_ns, facts.request.dialect.operation, message, attributes)


def _serialized(facts: CallFacts, ended_ns: int, name: str, message: str, attributes: Mapping[str, Value]) -> bytes:
    error = None if facts.error_type is None else message[:MESSAGE_CHARACTERS]
    return span(facts.context.ids, name, SpanKind.SERVER, (facts.started_ns, ended_ns), attributes, error=error)


def _identity(facts: CallFacts, process_id: str) -> dict[str, Value]:
    context = facts.context
    return {
        semconv.GEN_AI_OPERATION: facts.request.dialect.operation,
        semconv.HTTP_ROUTE: facts.request.dialect.path,
        semconv.GEN_AI_PROVIDER: facts.provider,
        semconv.BACKEND_NAME: facts.backend,
        semconv.RUN_ID: context.run_id,
        semconv.ROLLOUT_ID: context.attempt.rollout_id if context.attempt else None,
        semconv.ROLLOUT_ATTEMPT: context.attempt.attempt if context.attempt else None,
        semconv.ROLLOUT_MODE: context.mode,
        semconv.PROCESS_ID: process_id,
        semconv.SEQ: facts.seq,
        semconv.HTTP_STATUS: facts.http_status,
        semconv.ERROR_TYPE: facts.error_type,
        semconv.ABORTED: True if facts.aborted else None,
    }


def _request_and_response_attributes(facts: CallFacts) -> dict[str, Value]:
    answer, request = facts.answer, facts.request.fields
    engine, response = answer.engine, answer.response_json()
    return {
        semconv.GEN_AI_REQUEST_MODEL: _text(request.get("model")),
        semconv.GEN_AI_REQUEST_MAX_TOKENS: read_number(
            request.get("max_completion_tokens") or request.get("max_tokens") or request.get("max_output_tokens"), int
        ),
        **(_sampling(request, engine.sampling if engine else None) if facts.provider == PROVIDER else _requested_sampling(request)),
        **_answer(answer, response),
        semconv.POLICY_NAME: engine.policy if engine else None,
        semconv.POLICY_VERSIONS: msgspec.json.encode(engine.versions).decode() if engine and engine.versions else None,
        semconv.TOKENIZER_HASH: engine.tokenizer_hash if engine else None,
        semconv.RELAXED: facts.relaxed or None,
        semconv.MODALITY: modality(facts.request, response) or None,
        semconv.REQUEST_JSON: (facts.request.client_raw or facts.request.raw).decode(errors="replace"),
    }


def _requested_sampling(request: Mapping[str, Any]) -> dict[str, Value]:
    """Return the sampling parameters of a request to another upstream, whose defaults are not known."""
    return {
        semconv.GEN_AI_REQUEST_TEMPERATURE: read_number(request.get("temperature"), float),
        semconv.GEN_AI_REQUEST_TOP_P: read_number(request.get("top_p"), float),
    }


def _sampling(request: Mapping[str, Any], sampling: Sampling | None) -> dict[str, Value]:
    """Return the sampling parameters in effect: those that the engine reports, else the requested ones and the engine's defaults."""
    if sampling is not None:
        in_effect: dict[str, Value] = {key: getattr(sampling, name) for name, (key, _) in SAMPLING_DEFAULTS.items()}
        return in_effect | {semconv.SAMPLING_CONSTRAINED: sampling.constrained or is_constrained(request)}
    requested = {key: (request.get(name), default) for name, (key, default) in SAMPLING_DEFAULTS.items()}
    effective: dict[str, Value] = {
        key: default if value is None else read_number(value, type(default)) for key, (value, default) in requested.items()
    }
    # A value that cannot be read may reshape the distribution.
    effective[semconv.SAMPLING_CONSTRAINED] = is_constrained(request) or None in effective.values()
    temperature = effective[semconv.GEN_AI_REQUEST_TEMPERATURE]
    if isinstance(temperature, float) and 0 < temperature < LEAST_TEMPERATURE:
        effective[semconv.GEN_AI_REQUEST_TEMPERATURE] = LEAST_TEMPERATURE
    return effective


def _answer(answer: EngineAnswer, response: bytes | None) -> dict[str, Value]:
    choices = answer.ordered()
    response_json = response.decode(errors="replace") if response is not None else None
    if not choices:
        return {semconv.RESPONSE_JSON: response_json}
    prompt_ids = answer.prompts[0] if len(answer.prompts) == 1 else [token for prompt in answer.prompts for token in prompt]
    ids = [token for choice in choices for token in choice.token_ids]
    logprobs = [logprob for choice in choices for logprob in choice.logprobs]
    usage = answer.usage or {}
    return {
        semconv.GEN_AI_RESPONSE_ID: answer.id,
        semconv.GEN_AI_RESPONSE_MODEL: answer.model,
        # One for each choice, in order; empty for a choice that was cut.
        semconv.GEN_AI_FINISH_REASONS: [choice.finish_reason or "" for choice in choices],
        semconv.GEN_AI_INPUT_TOKENS: len(prompt_ids) or read_number(usage.get("prompt_tokens", usage.get("input_tokens")), int),
        semconv.GEN_AI_OUTPUT_TOKENS: len(ids) or read_number(usage.get("completion_tokens", usage.get("output_tokens")), int),
        semconv.INPUT_TOKEN_IDS: struct.pack(f"<{len(prompt_ids)}I", *prompt_ids) or None,
        semconv.INPUT_LENGTHS: [len(prompt) for prompt in answer.prompts] if len(answer.prompts) > 1 else None,
        semconv.OUTPUT_TOKEN_IDS: struct.pack(f"<{len(ids)}I", *ids) or None,
        semconv.OUTPUT_LOGPROBS: struct.pack(f"<{len(logprobs)}f", *logprobs) or None,
        semconv.OUTPUT_LENGTHS: [len(choice.token_ids) for choice in choices] if len(choices) > 1 else None,
        semconv.RESPONSE_JSON: response_json,
    }


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
