"""The chat dialect: what the engine is asked, what the client gets, and what is kept of the answer.

In: the client's request, the engine's answer (whole, or as a stream of events). Out: the engine's request; the answer as
vLLM would have sent it without us; an `Answer` with token ids, logprobs and versions. Invariant: JSON that we have no
business with passes as the bytes it came in, and a stream's event leaves as soon as it has come.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.vllm_plugin.asking import CHAT_PATH, ask, asks_ids, asks_logprobs
from spangrad.semconv import ANSWER_FIELD

_NULL = msgspec.Raw(b"null")
_Fields = dict[str, msgspec.Raw]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A client's request."""

    raw: bytes
    """As it came."""
    fields: dict[str, Any]
    """Its top-level fields, decoded but for `messages`, which stay raw."""

    @property
    def wants_ids(self) -> bool:
        """Whether the client asked for token ids."""
        return asks_ids(self.fields)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the client asked for logprobs."""
        return asks_logprobs(self.fields)

    def for_engine(self) -> bytes:
        """The request that the engine gets."""
        return msgspec.json.encode(ask(CHAT_PATH, self.fields))


class EngineFacts(msgspec.Struct, frozen=True):
    """What the engine says of itself in an answer."""

    policy: str
    version_start: int
    tokenizer_hash: str
    version_end: int | None = None
    """None: the answer was not finished."""


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


@dataclass(slots=True)
class Choice:
    """One of the answer's choices."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    finish_reason: str | None = None
    """None: the answer was cut before the engine was done."""
    message: dict[str, Any] = field(default_factory=dict[str, Any])
    """Put together from a stream's deltas; empty for whole answers, whose JSON is kept."""


@dataclass(slots=True)
class Answer:
    """What is kept of an answer, or of as much of it as came."""

    id: str | None = None
    model: str | None = None
    prompt_ids: list[int] = field(default_factory=list[int])
    choices: dict[int, Choice] = field(default_factory=dict[int, Choice])
    usage: dict[str, Any] | None = None
    """None: the client did not ask for it (streams), or the answer was cut."""
    engine: EngineFacts | None = None
    """None: the engine has no spangrad middleware, or failed."""
    failed: bool = False
    """Whether a stream held an error of the engine's, or something that is no chunk of an answer."""
    json: bytes | None = None
    """A whole answer without its arrays. None: see `response_json`."""

    def ordered(self) -> list[Choice]:
        """The choices by index."""
        return [self.choices[index] for index in sorted(self.choices)]

    def response_json(self) -> bytes | None:
        """The answer without its arrays; a stream's as the whole answer that it amounts to. None: nothing came."""
        if self.json is not None or not self.choices:
            return self.json
        choices = [
            {"index": index, "message": choice.message, "finish_reason": choice.finish_reason}
            for index, choice in sorted(self.choices.items())
        ]
        whole = {"id": self.id, "object": "chat.completion", "model": self.model, "choices": choices, "usage": self.usage}
        return msgspec.json.encode(whole)


def parse_request(raw: bytes) -> ChatRequest:
    """Read a client's request.

    Raises:
        ValueError: it is not a JSON object; the message says what is wrong.
    """
    fields = msgspec.json.decode(raw, type=_Fields)
    return ChatRequest(raw, {name: value if name == "messages" else msgspec.json.decode(value) for name, value in fields.items()})


def read_answer(body: bytes, request: ChatRequest) -> tuple[Answer, bytes]:
    """Read a whole answer, and give what the client gets of it.

    Raises:
        ValueError: the engine's answer is not that of a chat completion.
    """
    top = msgspec.json.decode(body, type=_Fields)
    if "choices" not in top:
        raise ValueError("the answer has no `choices`")
    choices = msgspec.json.decode(top["choices"], type=list[_Fields])
    answer = Answer()
    _read_top(answer, top)
    for fields in choices:
        if "index" not in fields:
            raise ValueError("a choice has no `index`")
        _read_choice(answer, fields)
    answer.json = _encode(top, choices, ids=False, logprobs=False)
    if not request.wants_ids and not request.wants_logprobs:
        return answer, answer.json
    return answer, _encode(top, choices, ids=request.wants_ids, logprobs=request.wants_logprobs)


class StreamReader:
    """Reads a stream as it comes."""

    def __init__(self, request: ChatRequest) -> None:
        self.answer = Answer()
        self._ids = request.wants_ids
        self._logprobs = request.wants_logprobs
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Take what the engine sent; give what the client gets of it now."""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        return b"".join(self._event(event) for event in events)

    def rest(self) -> bytes:
        """What came after the last whole event."""
        return self._rest

    def _event(self, event: bytes) -> bytes:
        if not event.startswith(b"data: {"):
            return event + b"\n\n"
        try:
            return self._chunk(event)
        except (ValueError, LookupError):
            # Not a chunk of a chat completion: the client shall see it, and the call counts as failed.
            self.answer.failed = True
            return event + b"\n\n"

    def _chunk(self, event: bytes) -> bytes:
        top = msgspec.json.decode(event[6:], type=_Fields)
        if "error" in top:
            self.answer.failed = True
        _read_top(self.answer, top)
        choices = msgspec.json.decode(top["choices"], type=list[_Fields]) if "choices" in top else []
        deltas = [_read_choice(self.answer, fields) for fields in choices]
        if not self._ids and not self._logprobs and choices and all(_is_silent(*pair) for pair in zip(choices, deltas, strict=True)):
            return b""
        return b"data: " + _encode(top, choices, ids=self._ids, logprobs=self._logprobs) + b"\n\n"


def _read_top(answer: Answer, top: _Fields) -> None:
    """Keep what stands at the top of an answer or chunk, and take our own field off."""
    own = top.pop(ANSWER_FIELD, None)
    if own is not None:
        answer.engine = msgspec.json.decode(own, type=EngineFacts)
    if "id" in top and answer.id is None:
        answer.id = msgspec.json.decode(top["id"], type=str)
        answer.model = msgspec.json.decode(top.get("model", _NULL), type=str | None)
    if "prompt_token_ids" in top and not answer.prompt_ids:
        answer.prompt_ids = msgspec.json.decode(top["prompt_token_ids"], type=list[int] | None) or []
    if "usage" in top:
        answer.usage = msgspec.json.decode(top["usage"], type=dict[str, Any] | None)


def _read_choice(answer: Answer, fields: _Fields) -> dict[str, Any]:
    """Keep what a choice brings, and give its delta (empty for whole answers)."""
    choice = answer.choices.setdefault(msgspec.json.decode(fields["index"], type=int), Choice())
    choice.token_ids += msgspec.json.decode(fields.get("token_ids", _NULL), type=list[int] | None) or []
    logprobs = msgspec.json.decode(fields.get("logprobs", _NULL), type=_Logprobs | None)
    choice.logprobs += [one.logprob for one in (logprobs.content if logprobs else None) or []]
    choice.finish_reason = msgspec.json.decode(fields.get("finish_reason", _NULL), type=str | None) or choice.finish_reason
    delta = msgspec.json.decode(fields.get("delta", b"{}"), type=dict[str, Any])
    _merge(choice.message, delta)
    return delta


def _is_silent(fields: _Fields, delta: dict[str, Any]) -> bool:
    """Whether vLLM sends a chunk only because its ids or logprobs were asked for: it says nothing else."""
    return not delta and bytes(fields.get("finish_reason", _NULL)) == b"null"


def _merge(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a delta to the message that it is part of."""
    for name, value in delta.items():
        if name == "tool_calls" and value is not None:
            calls = message.setdefault("tool_calls", [])
            for part in value:
                while len(calls) <= part["index"]:
                    calls.append({"function": {"name": "", "arguments": ""}})
                call = calls[part["index"]]
                function = part.get("function") or {}
                call.update({key: one for key, one in part.items() if key in {"id", "type"} and one is not None})
                call["function"]["name"] += function.get("name") or ""
                call["function"]["arguments"] += function.get("arguments") or ""
        elif isinstance(value, str) and name != "role":
            message[name] = (message.get(name) or "") + value
        else:
            message[name] = value


def _encode(top: _Fields, choices: list[_Fields], *, ids: bool, logprobs: bool) -> bytes:
    """Write an answer or chunk without what is not wanted, as null where vLLM writes null."""
    hidden = [] if ids else ["token_ids"]
    hidden += [] if logprobs else ["logprobs"]
    shown = {**top, "choices": [{**one, **{name: _NULL for name in hidden if name in one}} for one in choices]} if "choices" in top else top
    if not ids and "prompt_token_ids" in shown:
        shown = {**shown, "prompt_token_ids": _NULL}
    return msgspec.json.encode(shown)
