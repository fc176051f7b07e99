"""`/v1/messages`: Anthropic's dialect, which vLLM answers itself; ids in the field that our middleware adds.

In: messages and their events. Out: the same without our field, and an `EngineAnswer`. Invariant: that of
`gateway.dialects.tapped`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.dialects.base import ClientRequest, Fields, append_text
from gateway.dialects.tapped import MiddlewareFieldDialect, MiddlewareFieldStream
from gateway.vllm_plugin.request_fields import MESSAGES_PATH
from spangrad.errors import JSON_ERRORS

_DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature", "input_json_delta": "partial_json"}
"""Type of a delta -> the field to which it appends."""


class MessagesDialect(MiddlewareFieldDialect):
    """Anthropic's messages."""

    path = MESSAGES_PATH
    operation = "chat"
    length_fields = ("max_tokens",)
    conversation = frozenset({"messages", "system"})
    required = "content"
    finish = "stop_reason"

    def stream(self, request: ClientRequest) -> MessagesStream:
        """See `Dialect`."""
        return MessagesStream(self)

    def error(self, status: int, message: str, kind: str) -> dict[str, Any]:
        """See `Dialect`."""
        return {"type": "error", "error": {"type": kind, "message": message}}


class MessagesStream(MiddlewareFieldStream):
    """Reader that assembles a message from its events."""

    def __init__(self, dialect: MessagesDialect) -> None:
        super().__init__(dialect)
        self._message: dict[str, Any] = {}
        self._blocks: dict[int, dict[str, Any]] = {}

    def take(self, event: dict[str, Any], raw: Fields) -> None:
        """See `MiddlewareFieldStream`."""
        match event["type"]:
            case "message_start":
                self._message = event["message"]
                self._dialect.read_head(self.answer, msgspec.json.decode(raw["message"], type=Fields))
            case "content_block_start":
                self._blocks[event["index"]] = event["content_block"]
            case "content_block_delta":
                block, delta = self._blocks[event["index"]], event["delta"]
                name = _DELTAS.get(delta["type"])
                if name is not None:
                    append_text(block, name, delta[name])
            case "message_delta":
                self._message |= event["delta"]
                self._dialect.read_finish(self.answer, msgspec.json.decode(raw["delta"], type=Fields))
                self.answer.usage = (self.answer.usage or {}) | event.get("usage", {})
            case "error":
                self.answer.failed = True
            case _:
                pass  # content_block_stop, message_stop, ping

    def whole(self) -> dict[str, Any] | None:
        """See `MiddlewareFieldStream`."""
        if not self._message:
            return None
        blocks = [_block(block) for _, block in sorted(self._blocks.items())]
        return {**self._message, "content": blocks, "usage": self.answer.usage}


def _block(block: dict[str, Any]) -> dict[str, Any]:
    """Return a block with the input of its tool decoded, where all of it has arrived."""
    try:
        return {**{k: v for k, v in block.items() if k != "partial_json"}, "input": msgspec.json.decode(block["partial_json"])}
    except (KeyError, *JSON_ERRORS):
        return block
