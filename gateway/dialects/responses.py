"""`/v1/responses`: OpenAI's newer dialect, which vLLM answers itself; ids in the field that our middleware adds.

In: responses and their events. Out: the same without our field, and an `EngineAnswer`. Invariant: that of
`gateway.dialects.tapped`. vLLM's own `enable_response_messages` would give ids only at a response's end and logprobs
only of its texts: where the client asks for it, it gets what vLLM gives, and we do not read it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.dialects.base import ClientRequest, Fields, append_text
from gateway.dialects.tapped import MiddlewareFieldDialect, MiddlewareFieldStream
from gateway.vllm_plugin.request_fields import RESPONSES_PATH

_DELTAS = {
    "response.output_text.delta": "text",
    "response.reasoning_text.delta": "text",
    "response.function_call_arguments.delta": "arguments",
}
"""Type of an event -> the field of an item to which it appends."""


class ResponsesDialect(MiddlewareFieldDialect):
    """OpenAI's responses."""

    path = RESPONSES_PATH
    operation = "chat"
    length_fields = ("max_output_tokens",)
    conversation = frozenset({"input", "instructions"})
    required = "output"
    finish = "status"
    hidden = frozenset({"input_messages", "output_messages"})

    def stream(self, request: ClientRequest) -> ResponsesStream:
        """See `Dialect`."""
        return ResponsesStream(self)


class ResponsesStream(MiddlewareFieldStream):
    """Reader that keeps the response that the last event holds whole, or the items that arrived of a stream that is cut."""

    def __init__(self, dialect: ResponsesDialect) -> None:
        super().__init__(dialect)
        self._response: dict[str, Any] = {}
        self._items: dict[int, dict[str, Any]] = {}

    def take(self, event: dict[str, Any], raw: Fields) -> None:
        """See `MiddlewareFieldStream`."""
        kind: str = event["type"]
        if "response" in event:
            self._response = event["response"]
            response = msgspec.json.decode(raw["response"], type=Fields)
            self._dialect.read_head(self.answer, response)
            if kind not in ("response.created", "response.in_progress", "response.queued"):
                self._dialect.read_finish(self.answer, response)
        if "item" in event:
            self._items[event["output_index"]] = event["item"]
        elif kind in _DELTAS:
            append_text(self._items[event["output_index"]], _DELTAS[kind], event["delta"])
        if kind in ("error", "response.failed"):
            self.answer.failed = True

    def whole(self) -> dict[str, Any] | None:
        """See `MiddlewareFieldStream`."""
        if not self._response:
            return None
        items = self._response.get("output") or [item for _, item in sorted(self._items.items())]
        return {**self._response, **{name: None for name in self._dialect.hidden if name in self._response}, "output": items}
