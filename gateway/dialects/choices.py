"""Base of the two dialects whose answers hold `choices`, with ids and logprobs in fields of vLLM's own.

In: answers and chunks with more than the client asked for. Out: the same without it, and an `EngineAnswer`. Invariant: where
vLLM writes null for what was not asked, null is left; a chunk that vLLM sends only for its ids is left out; fields stand in vLLM's
order, and those that are not ours to read as the bytes they came in.

A whole answer of fields that we know is read in one pass: a client waits for it, and logprobs make most of its bytes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from gateway.dialects.answer import Choice, EngineAnswer, EngineFacts, Index, TokenId
from gateway.dialects.base import NULL, ClientRequest, Dialect, Fields, StreamReader, data_of, read_number
from spangrad.semconv import ANSWER_FIELD

_Choices = list[Fields]
_IDS = frozenset({"token_ids", "prompt_token_ids"})
_LOGPROBS = frozenset({"logprobs"})
IN_ORDER = (
    *("id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage", "prompt_logprobs"),
    *("prompt_token_ids", "prompt_text", "kv_transfer_params", "ec_transfer_params", "metrics", "error"),
)
"""All fields of a `KnownAnswer` but our own, in the order of vLLM's answers."""
_TEXT = msgspec.json.Decoder(str)
_OPTIONAL_TEXT = msgspec.json.Decoder(str | None)
_USAGE = msgspec.json.Decoder(dict[str, Any] | None)
_FIELDS = msgspec.json.Decoder(Fields)
_CHOICES = msgspec.json.Decoder(_Choices)


class ReadChoice(msgspec.Struct, gc=False):
    """Fields of a choice that are read."""

    index: Index
    finish_reason: str | UnsetType | None = UNSET
    token_ids: list[TokenId] | UnsetType | None = UNSET


_C = TypeVar("_C", bound=ReadChoice)


class ReadAnswer(msgspec.Struct, Generic[_C], gc=False):
    """Fields of an answer or chunk that are read."""

    id: Raw | UnsetType = UNSET
    model: Raw | UnsetType = UNSET
    choices: list[_C] | UnsetType = UNSET
    usage: Raw | UnsetType = UNSET
    prompt_token_ids: list[TokenId] | UnsetType | None = UNSET
    error: Raw | UnsetType = UNSET
    engine: EngineFacts | UnsetType = msgspec.field(default=UNSET, name=ANSWER_FIELD)


class KnownAnswer(ReadAnswer[_C], forbid_unknown_fields=True, gc=False):
    """An answer of which every field is known, and can be written again."""

    object: Raw | UnsetType = UNSET
    created: Raw | UnsetType = UNSET
    service_tier: Raw | UnsetType = UNSET
    system_fingerprint: Raw | UnsetType = UNSET
    prompt_logprobs: Raw | UnsetType = UNSET
    prompt_text: Raw | UnsetType = UNSET
    kv_transfer_params: Raw | UnsetType = UNSET
    ec_transfer_params: Raw | UnsetType = UNSET
    metrics: Raw | UnsetType = UNSET


class ChoicesDialect(Dialect, Generic[_C]):
    """Base of the dialects chat and completions."""

    object_type: str
    """`object` of whole answers."""
    read_answer: msgspec.json.Decoder[ReadAnswer[_C]]
    known_answer: msgspec.json.Decoder[Any]
    """Decoder of a `KnownAnswer`."""
    choice_in_order: tuple[str, ...]
    """All fields of a choice in a `KnownAnswer`, in the order of vLLM's answers."""
    read_alternatives: msgspec.json.Decoder[Any] | None = None
    """Decoder of answers with alternatives. None: the dialect's alternatives are not recorded."""

    def choices_of(self, request: ClientRequest) -> int:
        """See `Dialect`; of one prompt."""
        count = read_number(request.fields.get("n"), int)
        return int(count) if count is not None and count > 0 else 1

    def read(self, body: bytes, request: ClientRequest) -> tuple[EngineAnswer, bytes]:
        """See `Dialect`."""
        alternatives = self.wants_alternatives(request)
        known = None if alternatives else self.known(body)
        top = self.decode(body, request) if known is None else known
        if top.choices is UNSET:
            raise ValueError("the answer has no `choices`")
        answer = EngineAnswer()
        self.read_top(answer, top)
        for choice in top.choices:
            self.read_choice(answer, choice, request)
        ids, logprobs = request.wants_ids, request.wants_logprobs
        if known is not None:
            answer.json = self._encode_known(known)
            if not ids and not logprobs:
                return answer, answer.json
        fields, choices = _fields_of(body)
        if alternatives:
            answer.json = encode(fields, _recorded(answer, top.choices, choices), ids=False, logprobs=True)
        elif known is None:
            answer.json = encode(fields, choices, ids=False, logprobs=False)
        return answer, encode(fields, choices, ids=ids, logprobs=logprobs)

    def wants_alternatives(self, request: ClientRequest) -> bool:
        """Return whether the client asked for alternatives that are recorded."""
        return self.read_alternatives is not None and bool(request.fields.get("top_logprobs"))

    def decode(self, data: bytes, request: ClientRequest) -> ReadAnswer[_C]:
        """Read an answer or chunk.

        Raises:
            ValueError: it is none.
        """
        if self.read_alternatives and self.wants_alternatives(request):
            try:
                return self.read_alternatives.decode(data)
            except msgspec.ValidationError:
                pass  # alternatives in another form than OpenAI's are not recorded, which is no reason to call the answer failed
        return self.read_answer.decode(data)

    def known(self, body: bytes) -> KnownAnswer[_C] | None:
        """Read an answer of known fields. None: it has others, or is none."""
        try:
            return self.known_answer.decode(body)
        except msgspec.ValidationError:
            return None

    def _encode_known(self, answer: KnownAnswer[_C]) -> bytes:
        shown = _present(answer, IN_ORDER)
        if answer.choices:
            shown["choices"] = [_present(choice, self.choice_in_order) for choice in answer.choices]
        return msgspec.json.encode(shown)

    def stream(self, request: ClientRequest) -> ChoicesStream:
        """See `Dialect`."""
        return ChoicesStream(self, request)

    def begin(self, request: ClientRequest) -> EngineAnswer:
        """Return the answer of a stream with what is known before it begins."""
        return EngineAnswer()

    def read_top(self, answer: EngineAnswer, top: ReadAnswer[_C]) -> None:
        """Read the top-level fields of an answer or chunk."""
        if top.engine is not UNSET:
            answer.engine = top.engine
        # Azure's streams begin with a chunk of an empty id.
        if top.id is not UNSET and not answer.id:
            answer.id = _TEXT.decode(top.id)
            answer.model = _OPTIONAL_TEXT.decode(top.model) if top.model is not UNSET else None
        if top.usage is not UNSET:
            answer.usage = _USAGE.decode(top.usage)

    @abstractmethod
    def read_choice(self, answer: EngineAnswer, choice: _C, request: ClientRequest) -> bool:
        """Read a choice; return whether it holds anything but ids and logprobs."""

    @abstractmethod
    def content(self, choice: Choice) -> dict[str, Any]:
        """Return the field of a choice that holds its message or text."""

    def whole(self, answer: EngineAnswer) -> dict[str, Any]:
        """Return the whole answer that a stream's parts amount to."""
        choices = [
            {
                "index": index,
                **self.content(choice),
                **({"logprobs": choice.recorded_logprobs} if choice.alternatives else {}),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in sorted(answer.choices.items())
        ]
        return {"id": answer.id, "object": self.object_type, "model": answer.model, "choices": choices, "usage": answer.usage}


class ChoicesStream(StreamReader):
    """Reader of a stream whose chunks hold choices."""

    def __init__(self, dialect: ChoicesDialect[Any], request: ClientRequest) -> None:
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
        except (ValueError, LookupError, RecursionError):
            # Not a chunk of an answer: it is passed to the client, and the call counts as failed.
            self.answer.failed = True
            return event
        return before + shown + after if shown else None

    def _chunk(self, data: bytes) -> bytes:
        """Return what the client gets of a chunk; empty: nothing."""
        top = self._dialect.decode(data, self._request)
        if top.error is not UNSET:
            self.answer.failed = True
        self._dialect.read_top(self.answer, top)
        choices = top.choices or []
        has_content = [self._dialect.read_choice(self.answer, choice, self._request) for choice in choices]
        if choices and not any(has_content) and not self._ids and not self._logprobs:
            return b""
        return encode(*_fields_of(data), ids=self._ids, logprobs=self._logprobs)


def _recorded(answer: EngineAnswer, read: Iterable[ReadChoice], choices: _Choices) -> _Choices:
    """Return the fields of choices with the alternatives that are kept in the place of all their logprobs."""
    logprobs = [answer.choices[choice.index].recorded_logprobs for choice in read]
    return [
        {name: Raw(msgspec.json.encode(kept)) if name == "logprobs" else value for name, value in choice.items()}
        for choice, kept in zip(choices, logprobs, strict=True)
    ]


def _present(struct: msgspec.Struct, names: Iterable[str]) -> dict[str, Any]:
    """Return the fields that are present, ids and logprobs as null."""
    present = {name: value for name in names if (value := getattr(struct, name)) is not UNSET}
    return {name: NULL if name in _IDS or name in _LOGPROBS else value for name, value in present.items()}


def _fields_of(body: bytes) -> tuple[Fields, _Choices]:
    """Return the fields of an answer or chunk without our own, and those of its choices."""
    top = _FIELDS.decode(body)
    top.pop(ANSWER_FIELD, None)
    return top, _CHOICES.decode(top["choices"]) if "choices" in top else []


def encode(top: Fields, choices: _Choices, *, ids: bool, logprobs: bool) -> bytes:
    """Encode an answer or chunk; hidden ids and logprobs become null, as vLLM writes them where they were not asked for."""
    hidden = (frozenset() if ids else _IDS) | (frozenset() if logprobs else _LOGPROBS)
    blanked = [{name: NULL if name in hidden else value for name, value in choice.items()} for choice in choices]
    shown: dict[str, Any] = {**top, "choices": blanked} if "choices" in top else top
    if not ids and "prompt_token_ids" in shown:
        shown = {**shown, "prompt_token_ids": NULL}
    return msgspec.json.encode(shown)
