"""Base of the two dialects whose answers hold `choices`, with ids and logprobs in fields of vLLM's own.

In: answers and chunks with more than the client asked for. Out: the same without it, and an `EngineAnswer`. Invariant: where
vLLM writes null for what was not asked, null is left; a chunk that vLLM sends only for its ids is left out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import msgspec

from gateway.dialects.answer import EngineAnswer, EngineFacts
from gateway.dialects.base import NULL, ClientRequest, Fields, StreamReader, data_of, openai_error, parse_request
from spangrad.semconv import ANSWER_FIELD

_Choices = list[Fields]


class ChoicesDialect(ABC):
    """Base of the dialects chat and completions."""

    path: str
    operation: str
    conversation: frozenset[str]
    """Request fields that are not decoded."""

    def parse(self, raw: bytes) -> ClientRequest:
        """See `Dialect`."""
        return parse_request(raw, self, self.conversation)

    def read(self, body: bytes, request: ClientRequest) -> tuple[EngineAnswer, bytes]:
        """See `Dialect`."""
        top = msgspec.json.decode(body, type=Fields)
        if "choices" not in top:
            raise ValueError("the answer has no `choices`")
        choices = msgspec.json.decode(top["choices"], type=_Choices)
        answer = EngineAnswer()
        self.read_top(answer, top)
        for fields in choices:
            if "index" not in fields:
                raise ValueError("a choice has no `index`")
            self.read_choice(answer, fields, request)
        answer.json = encode(top, choices, ids=False, logprobs=False)
        if not request.wants_ids and not request.wants_logprobs:
            return answer, answer.json
        return answer, encode(top, choices, ids=request.wants_ids, logprobs=request.wants_logprobs)

    def stream(self, request: ClientRequest) -> ChoicesStream:
        """See `Dialect`."""
        return ChoicesStream(self, request)

    def error(self, status: int, message: str, kind: str) -> dict[str, Any]:
        """See `Dialect`."""
        return openai_error(status, message, kind)

    def begin(self, request: ClientRequest) -> EngineAnswer:
        """Return the answer of a stream with what is known before it begins."""
        return EngineAnswer()

    def read_top(self, answer: EngineAnswer, top: Fields) -> None:
        """Read the top-level fields of an answer or chunk, and remove our own field."""
        engine_field = top.pop(ANSWER_FIELD, None)
        if engine_field is not None:
            answer.engine = msgspec.json.decode(engine_field, type=EngineFacts)
        if "id" in top and answer.id is None:
            answer.id = msgspec.json.decode(top["id"], type=str)
            answer.model = msgspec.json.decode(top.get("model", NULL), type=str | None)
        if "usage" in top:
            answer.usage = msgspec.json.decode(top["usage"], type=dict[str, Any] | None)

    @abstractmethod
    def read_choice(self, answer: EngineAnswer, fields: Fields, request: ClientRequest) -> bool:
        """Read a choice; return whether it holds anything but ids and logprobs."""

    @abstractmethod
    def whole(self, answer: EngineAnswer) -> dict[str, Any]:
        """Return the whole answer that a stream's parts amount to."""


class ChoicesStream(StreamReader):
    """Reader of a stream whose chunks hold choices."""

    def __init__(self, dialect: ChoicesDialect, request: ClientRequest) -> None:
        answer = dialect.begin(request)
        answer.whole = lambda: dialect.whole(answer) if answer.choices else None
        super().__init__(answer)
        self._dialect = dialect
        self._request = request
        self._ids = request.wants_ids
        self._logprobs = request.wants_logprobs

    def event(self, event: bytes) -> bytes | None:
        """See `StreamReader`."""
        before, data, after = data_of(event)
        if not data.startswith(b"{"):
            return event
        try:
            shown = self._chunk(data)
        except (ValueError, LookupError):
            # Not a chunk of an answer: it is passed to the client, and the call counts as failed.
            self.answer.failed = True
            return event
        return before + shown + after if shown else None

    def _chunk(self, data: bytes) -> bytes:
        """Return what the client gets of a chunk; empty: nothing."""
        top = msgspec.json.decode(data, type=Fields)
        if "error" in top:
            self.answer.failed = True
        self._dialect.read_top(self.answer, top)
        choices = msgspec.json.decode(top["choices"], type=_Choices) if "choices" in top else []
        has_content = [self._dialect.read_choice(self.answer, fields, self._request) for fields in choices]
        if choices and not any(has_content) and not self._ids and not self._logprobs:
            return b""
        return encode(top, choices, ids=self._ids, logprobs=self._logprobs)


def encode(top: Fields, choices: _Choices, *, ids: bool, logprobs: bool) -> bytes:
    """Encode an answer or chunk; hidden ids and logprobs become null, as vLLM writes them where they were not asked for."""
    hidden = [] if ids else ["token_ids", "prompt_token_ids"]
    hidden += [] if logprobs else ["logprobs"]
    blanked = [{**choice, **{name: NULL for name in hidden if name in choice}} for choice in choices]
    shown = {**top, "choices": blanked} if "choices" in top else top
    if not ids and "prompt_token_ids" in shown:
        shown = {**shown, "prompt_token_ids": NULL}
    return msgspec.json.encode(shown)
