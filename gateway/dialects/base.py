"""The interface of every dialect: its path, its requests, and readers of the engine's answers.

In: a client's request and the engine's answer, as bytes. Out: what the other side gets of it, and an `EngineAnswer`.
Invariant: JSON that is not ours to change passes as the bytes it came in, and a stream's event leaves as soon as it
has arrived.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from pydantic import TypeAdapter, ValidationError

from gateway.dialects.answer import EngineAnswer
from gateway.vllm_plugin.request_fields import is_passed_unchanged, requests_ids, requests_logprobs, with_ids
from spangrad.http.announcements import OWN_SAMPLING, SamplingParameters

_BLANK_LINE = re.compile(rb"\r?\n\r?\n")
_DATA = re.compile(rb"(?:\A|\n)data: ?([^\r\n]*)")
NULL = msgspec.Raw(b"null")
Fields = dict[str, msgspec.Raw]
"""A JSON object of which only the names are decoded."""
_READ: dict[type[int | float], TypeAdapter[int] | TypeAdapter[float]] = {int: TypeAdapter(int), float: TypeAdapter(float)}
"""Type of a number -> the adapter that reads it as vLLM does, which accepts texts such as "0.5"."""


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A client's request."""

    raw: bytes
    """The bytes of the request as they came."""
    fields: dict[str, Any]
    """Its top-level fields, decoded but for the conversation, which stays raw."""
    dialect: Dialect
    client_raw: bytes | None = None
    """The client's own bytes, where the engine is asked something else (`gateway.relax`). None: `raw` is what the client sent."""

    @property
    def engine_path(self) -> str:
        """Return the path under which the engine answers the request."""
        return self.dialect.path

    @property
    def model(self) -> str | None:
        """Return the model that the request names. None: it names none."""
        model = self.fields.get("model")
        return model if isinstance(model, str) else None

    @property
    def wants_ids(self) -> bool:
        """Return whether the client gets token ids that the engine sends: it asked for them, or the gateway did not."""
        return requests_ids(self.fields) or is_passed_unchanged(self.engine_path, self.fields)

    @property
    def wants_logprobs(self) -> bool:
        """Return whether the client gets logprobs that the engine sends: it asked for them, or the gateway did not."""
        return requests_logprobs(self.engine_path, self.fields) or is_passed_unchanged(self.engine_path, self.fields)

    def changed(self, changes: Mapping[str, Any]) -> ClientRequest:
        """Return the request with these fields in place of its own."""
        fields = {**self.fields, **changes}
        return replace(self, raw=msgspec.json.encode(fields), fields=fields)

    def greedy(self) -> ClientRequest:
        """Return the same request at temperature 0, whatever it asked for."""
        return self.changed({"temperature": 0})

    def sampled(self, parameters: SamplingParameters) -> ClientRequest:
        """Return the request with these sampling parameters in place of its own; itself if there are none."""
        if parameters == OWN_SAMPLING:
            return self
        values = {name: value for name in ("temperature", "top_p", "top_k") if (value := getattr(parameters, name)) is not None}
        request = self.changed(values) if values else self
        return request if parameters.max_tokens is None else request.shortened(parameters.max_tokens)

    def limited(self, tokens: int) -> ClientRequest:
        """Return the request for at most so many tokens in all its choices together, 1 each at least; itself if it asks for no more."""
        return self.shortened(max(tokens // self.dialect.choices_of(self), 1))

    def shortened(self, most: int) -> ClientRequest:
        """Return the request for at most so many tokens in each of its choices; itself if it asks for no more."""
        names = self.dialect.length_fields
        name = next((name for name in names if self.fields.get(name) is not None), names[0])
        requested = self.fields.get(name)
        requested = self.dialect.default_length if requested is None else requested
        number = read_number(requested, int)
        return self if number is not None and number <= most else self.changed({name: most})

    def for_engine(self, more: Mapping[str, Any] | None = None) -> bytes:
        """Return the request that the engine gets, with further fields."""
        engine_request = with_ids(self.engine_path, self.fields)
        return self.raw if engine_request is self.fields and not more else msgspec.json.encode({**engine_request, **(more or {})})


class StreamReader(ABC):
    """Reader of a stream, event by event as it arrives."""

    def __init__(self, answer: EngineAnswer) -> None:
        self.answer = answer
        self._held = bytearray()
        """Beginning of an event that has not arrived whole."""

    def feed(self, data: bytes) -> bytes:
        """Process what the engine sent; return what the client gets of it now."""
        # The blank line may have begun in what is held.
        begin, start, given = max(0, len(self._held) - 3), 0, list[bytes]()
        self._held += data
        for blank in _BLANK_LINE.finditer(self._held, begin):
            event = self.event(bytes(self._held[start : blank.start()]))
            given += [event, blank.group()] if event is not None else []
            start = blank.end()
        del self._held[:start]
        return b"".join(given)

    def rest(self) -> bytes:
        """Return the bytes that came after the last whole event."""
        return bytes(self._held)

    @abstractmethod
    def event(self, event: bytes) -> bytes | None:
        """Process an event, without the blank line that ends it; return what the client gets, also without that line. None: nothing."""


class Dialect(ABC):
    """One of the API dialects in which agents call the policy."""

    path: str
    operation: str
    """`gen_ai.operation.name`."""
    length_fields: tuple[str, ...]
    """Fields of requests that hold the largest number of tokens of an answer; the first is set where a request has none."""
    default_length: int | None = None
    """Largest number of tokens of a choice where a request names none. None: as many as the model's context allows."""
    conversation: frozenset[str]
    """Request fields that are not decoded."""

    def choices_of(self, request: ClientRequest) -> int:
        """Return the number of choices that a request asks for, of all its prompts together."""
        return 1

    def parse(self, raw: bytes) -> ClientRequest:
        """Read a client's request.

        Raises:
            ValueError: it is not a JSON object; the message says what is wrong.
        """
        try:
            fields = msgspec.json.decode(raw, type=Fields)
            decoded = {name: value if name in self.conversation else msgspec.json.decode(value) for name, value in fields.items()}
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        return ClientRequest(raw, decoded, self)

    @abstractmethod
    def read(self, body: bytes, request: ClientRequest) -> tuple[EngineAnswer, bytes]:
        """Read a whole answer; return it, and the bytes that the client gets.

        Raises:
            ValueError: it is no answer in this dialect.
        """

    @abstractmethod
    def stream(self, request: ClientRequest) -> StreamReader:
        """Return a reader for the answer's stream."""

    def error(self, status: int, message: str, kind: str) -> dict[str, Any]:
        """Return an error of the gateway itself in this dialect's form, of which clients show the message."""
        return {"error": {"message": message, "type": kind, "code": status}}


def read_number(value: object, kind: type[int | float]) -> int | float | None:
    """Return a request's number as vLLM reads it, from a text as well. None: there is none, or it cannot be read."""
    if value is None or type(value) is kind:
        return value
    try:
        return _READ[kind].validate_python(value)
    except ValidationError:
        return None


def append_text(fields: dict[str, Any], name: str, text: object) -> None:
    """Append a part to a text of an object, or set the text where there is none.

    CPython extends a text in place if nothing else refers to it. With a copy for each part, an answer of 100,000 tokens would take half a
    minute.

    Raises:
        TypeError: the part is not a string.
    """
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a string")
    whole = fields.get(name)
    fields[name] = None
    if isinstance(whole, str):
        whole += text
    fields[name] = whole if isinstance(whole, str) else text


def data_of(event: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the part of an event before its data, the data, and the part after it; an event without data is all before."""
    match = _DATA.search(event)
    return (event[: match.start(1)], match[1], event[match.end(1) :]) if match else (event, b"", b"")
