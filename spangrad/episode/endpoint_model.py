"""Model behind an OpenAI-compatible endpoint, as episodes ask it.

In: messages and tools. Out: its reply. Invariant: the standard library alone; the request carries the current trace, and the call is a
span by OpenTelemetry's conventions, so that the gateway's own span of it is joined.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.trace import SpanKind

from spangrad import semconv
from spangrad.episode.player import ModelReply, ReplyRequest
from spangrad.errors import EngineError
from spangrad.http.json_http import ask
from spangrad.http.service import RemoteService

_RETRY_SECONDS = 60.0
"""Time for which a call is retried while the endpoint is away or busy, in seconds; a request's own time limit ends it earlier."""
_CALL_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class EndpointModel:
    """Model of a chat endpoint."""

    url: str
    """Base URL, which ends in /v1."""
    key: str = field(repr=False)
    model: str = "policy"
    """Name of the model in requests."""
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further fields of requests, such as temperature."""

    async def reply(self, request: ReplyRequest) -> ModelReply:
        """Ask for a reply; behind the gateway, in a context that begins with the tokens of the previous call and reply.

        Raises:
            EngineError: the endpoint refuses, or does not answer.
        """
        body = {"model": self.model, "messages": list(request.messages), **self.sampling}
        if request.tools:
            body["tools"] = list(request.tools)
        if request.max_tokens is not None:
            body["max_completion_tokens"] = request.max_tokens
        attributes = {semconv.GEN_AI_OPERATION: "chat", semconv.GEN_AI_REQUEST_MODEL: self.model}
        tracer = trace.get_tracer(semconv.EPISODE_SCOPE)
        with tracer.start_as_current_span(f"chat {self.model}", kind=SpanKind.CLIENT, attributes=attributes) as span:
            answer = await self._ask(body, request.previous.response_id if request.previous else "", request.seconds)
            choice = answer["choices"][0]
            reply = ModelReply(
                _appended(choice["message"]),
                choice.get("finish_reason") or "",
                answer.get("id") or "",
                int((answer.get("usage") or {}).get("completion_tokens") or 0),
            )
            span.set_attributes(
                {
                    semconv.GEN_AI_RESPONSE_ID: reply.response_id,
                    semconv.GEN_AI_RESPONSE_MODEL: answer.get("model") or self.model,
                    semconv.GEN_AI_FINISH_REASONS: [reply.finish_reason],
                    semconv.GEN_AI_OUTPUT_TOKENS: reply.tokens,
                }
            )
        return reply

    async def _ask(self, body: Mapping[str, Any], continues: str, seconds: float | None) -> Any:
        headers: dict[str, str] = {semconv.CONTINUES_HEADER: continues or "new"}
        propagate.inject(headers)
        remedy = "Start it, or set OPENAI_BASE_URL."
        # The thread outlives a caller that stops waiting. Its last try begins before the turn is over: nothing is asked out of turn.
        retry_seconds, call_seconds = (_RETRY_SECONDS, _CALL_SECONDS) if seconds is None else (min(_RETRY_SECONDS, 0.9 * seconds), seconds)
        service = RemoteService("the model's endpoint", self.url, self.key, EngineError, remedy, retry_seconds, headers)
        return await asyncio.to_thread(ask, service, "POST", "/chat/completions", body, seconds=call_seconds)


def _appended(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a reply as a message of the next context: fields that are empty are left out, as clients send them."""
    kept = {name: message[name] for name in ("content", "tool_calls") if message.get(name)}
    return {"role": "assistant", "content": "", **kept}
