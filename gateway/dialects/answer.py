"""An engine's answer, in a form common to all dialects.

In: what the dialects' readers parse. Out: an `EngineAnswer` for the call's span. Invariant: prompts and choices stand in the
engine's order, and of n choices to p prompts, choice i answers prompt i // (n / p).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
"""A token id that a span can hold: an unsigned integer of four bytes."""
Version = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Logprob = Annotated[float, msgspec.Meta(ge=-3.4028234e38, le=3.4028234e38)]
"""A float of four bytes, finite."""
Index = Annotated[int, msgspec.Meta(ge=0, le=2**16 - 1)]
"""A choice's index; the store numbers choices in two bytes."""


ALTERNATIVES_MOST = 50_000
"""Largest number of alternatives that are kept of an answer, some 2 MB: 20 each of 2,500 tokens."""


class Sampling(msgspec.Struct, frozen=True):
    """Sampling parameters in effect, the engine's defaults applied."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    constrained: bool
    """True if tokens were masked or forced, or their logits shifted."""


class EngineFacts(msgspec.Struct, frozen=True):
    """Facts that the engine's middleware adds to an answer: the policy and the weights that gave it, and the sampling."""

    policy: str
    tokenizer_hash: str
    versions: list[list[tuple[TokenId, Version]]] | None = None
    """Pairs for each choice: the response token at which a policy version begins, and the version; empty: not known. None: the answer
    was not finished."""
    sampling: Sampling | None = None
    """None: the answer was not finished."""
    rendered: tuple[int, str, int, str] | None = None
    """`continuation.Rendered` of the prompt. None: no later call continues this one, or the answer was not finished."""


class Alternative(msgspec.Struct, gc=False):
    """Token that might have been sampled, with its logprob (nats)."""

    token: str
    logprob: Logprob


class TokenAlternatives(Alternative, gc=False):
    """Sampled token with the likeliest tokens in its place, in OpenAI's form of a chat."""

    top_logprobs: list[Alternative] = []


@dataclass(slots=True)
class Choice:
    """One of the answer's choices."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    finish_reason: str | None = None
    """None: the answer was cut before the engine was done."""
    message: dict[str, Any] = field(default_factory=dict[str, Any])
    """The message assembled from a stream's parts; empty for whole answers, whose JSON is kept."""
    alternatives: list[TokenAlternatives] = field(default_factory=list[TokenAlternatives])
    """Alternatives of the first tokens, where the client asked for them (`EngineAnswer.add_alternatives`)."""

    @property
    def recorded_logprobs(self) -> dict[str, list[TokenAlternatives]] | None:
        """Return the `logprobs` of the choice as they are recorded. None: there are no alternatives."""
        return {"content": self.alternatives} if self.alternatives else None


@dataclass(slots=True)
class EngineAnswer:
    """An answer, or the part of it that arrived before it was cut."""

    id: str | None = None
    model: str | None = None
    prompts: list[list[int]] = field(default_factory=list[list[int]])
    """The token ids of each prompt; empty: not known."""
    choices: dict[int, Choice] = field(default_factory=dict[int, Choice])
    usage: dict[str, Any] | None = None
    """None: the client did not ask for it (streams), or the answer was cut."""
    engine: EngineFacts | None = None
    """None: the engine has no spangrad middleware, or failed."""
    failed: bool = False
    """True if a stream held an error of the engine, or something that is no part of an answer."""
    json: bytes | None = None
    """A whole answer without its arrays, but for alternatives. None: see `response_json`."""
    whole: Callable[[], dict[str, Any] | None] | None = None
    """Assembles a stream's parts into the whole answer. None: it was no stream."""
    alternatives: int = 0
    """Number of alternatives that arrived."""

    def add_alternatives(self, choice: Choice, tokens: Iterable[TokenAlternatives]) -> None:
        """Keep the alternatives of the next tokens of a choice, up to `ALTERNATIVES_MOST` in all choices.

        None are kept after a token without: what is kept stands at the places of the first tokens. The tokens' logprobs are added after.
        """
        if len(choice.alternatives) < len(choice.logprobs):
            return
        for token in tokens:
            self.alternatives += len(token.top_logprobs)
            if self.alternatives <= ALTERNATIVES_MOST:
                choice.alternatives.append(token)

    @property
    def tokens_out(self) -> int:
        """Return the number of generated tokens whose ids are known."""
        return sum(len(choice.token_ids) for choice in self.choices.values())

    def ordered(self) -> list[Choice]:
        """Return the choices in the order of their indices; one of which nothing arrived is empty."""
        return [self.choices.get(index) or Choice() for index in range(max(self.choices, default=-1) + 1)]

    def response_json(self) -> bytes | None:
        """Return the answer without its arrays, but for alternatives, a stream's assembled into a whole answer. None: nothing arrived."""
        if self.json is not None or self.whole is None:
            return self.json
        whole = self.whole()
        return msgspec.json.encode(whole) if whole else None
