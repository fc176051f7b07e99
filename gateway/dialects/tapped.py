"""Base of the dialects whose answers have no place for ids: the engine's middleware reports them in its own field.

In: answers and events with the field `spangrad`. Out: the same without it, byte for byte what vLLM's own code wrote,
and an `EngineAnswer`. Invariant: each of the engine's generations is a prompt and the choice that answers it; of a stream
that is cut, the tokens up to the last event are kept.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import msgspec

from gateway.dialects.answer import Choice, EngineAnswer, EngineFacts, Logprob, TokenId
from gateway.dialects.base import NULL, ClientRequest, Dialect, Fields, StreamReader, data_of
from spangrad.semconv import ANSWER_FIELD


class _Generation(msgspec.Struct):
    """A request to the engine and what it generated, or the part of both that is new since the last event."""

    prompt_token_ids: list[TokenId] = []
    token_ids: list[TokenId] = []
    logprobs: list[Logprob] = []
    finish_reason: str | None = None


class _Field(EngineFacts, frozen=True):
    generations: list[_Generation] = msgspec.field(default_factory=list[_Generation])


class MiddlewareFieldDialect(Dialect):
    """Base of the dialects responses and messages."""

    required: str
    """A field that every answer has."""
    finish: str
    """The field that says how the answer ended."""
    hidden: frozenset[str] = frozenset()
    """Fields of answers that hold token ids where the client asked for them: not kept a second time."""

    def read(self, body: bytes, request: ClientRequest) -> tuple[EngineAnswer, bytes]:
        """See `Dialect`."""
        top = msgspec.json.decode(body, type=Fields)
        if self.required not in top:
            raise ValueError(f"the answer has no `{self.required}`")
        answer = EngineAnswer(choices={0: Choice()})
        pop_engine_field(answer, top)
        self.read_head(answer, top)
        self.read_finish(answer, top)
        answer.json = msgspec.json.encode({name: NULL if name in self.hidden else value for name, value in top.items()})
        return answer, answer.json if self.hidden.isdisjoint(top) else msgspec.json.encode(top)

    def read_head(self, answer: EngineAnswer, top: Fields) -> None:
        """Read the id, model and usage of an answer."""
        answer.id = msgspec.json.decode(top.get("id", NULL), type=str | None)
        answer.model = msgspec.json.decode(top.get("model", NULL), type=str | None)
        answer.usage = msgspec.json.decode(top.get("usage", NULL), type=dict[str, Any] | None) or answer.usage

    def read_finish(self, answer: EngineAnswer, end: Fields) -> None:
        """Read the finish reason in the dialect's own words, where the engine's field is absent."""
        if answer.engine is None:
            answer.choices[0].finish_reason = msgspec.json.decode(end.get(self.finish, NULL), type=str | None)


class MiddlewareFieldStream(StreamReader):
    """Reader of a stream whose ids come in our own field."""

    def __init__(self, dialect: MiddlewareFieldDialect) -> None:
        super().__init__(EngineAnswer(whole=self.whole))
        self._dialect = dialect

    def event(self, event: bytes) -> bytes:
        """See `StreamReader`."""
        before, data, after = data_of(event)
        if not data.startswith(b"{"):
            return event
        try:
            top = msgspec.json.decode(data, type=Fields)
            self.answer.choices.setdefault(0, Choice())
            if pop_engine_field(self.answer, top):
                data = msgspec.json.encode(top)
            self.take(msgspec.json.decode(data, type=dict[str, Any]), top)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            # Not an event of an answer: it is passed to the client, and the call counts as failed.
            self.answer.failed = True
        return before + data + after

    @abstractmethod
    def take(self, event: dict[str, Any], raw: Fields) -> None:
        """Read an event.

        Raises:
            ValueError, LookupError, TypeError, AttributeError, RecursionError: it is no event of this dialect.
        """

    @abstractmethod
    def whole(self) -> dict[str, Any] | None:
        """Return the whole answer that the events amount to. None: nothing arrived."""


def pop_engine_field(answer: EngineAnswer, top: Fields) -> bool:
    """Remove the field that our middleware added, and read it into the answer; return whether it was there."""
    engine_field = top.pop(ANSWER_FIELD, None)
    if engine_field is None:
        return False
    field = msgspec.json.decode(engine_field, type=_Field)
    answer.engine = EngineFacts(field.policy, field.tokenizer_hash, field.versions, field.sampling, field.rendered)
    for index, generation in enumerate(field.generations):
        if index == len(answer.prompts):
            answer.prompts.append([])
        answer.prompts[index] += generation.prompt_token_ids
        choice = answer.choices.setdefault(index, Choice())
        choice.token_ids += generation.token_ids
        choice.logprobs += generation.logprobs
        choice.finish_reason = generation.finish_reason or choice.finish_reason
    return True
