"""Contexts of a conversation's later calls, which begin with the tokens that its earlier ones read and sampled.

In: a prompt as vLLM rendered it from messages, and the call before it. Out: a prompt that begins with that call's own tokens. Invariant:
a prompt is continued only where its messages begin with those of the call before and a reply; otherwise it is as vLLM rendered it.

A chat template renders an earlier reply from its text, which may give other tokens than were sampled: special tokens leave no text, a
text has several tokenizations, and templates leave out the reasoning of earlier turns. The policy would read what it never wrote, and a
rollout's calls would not merge into one row.

Runs inside vLLM's process; the gateway keeps what an engine reports of a call, and gives it with the next.
"""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from collections.abc import Set
from dataclasses import astuple, dataclass
from hashlib import blake2b
from typing import Any

REQUEST_FIELD = "spangrad_continues"
"""Field of a request to an engine: the call before, as `Continued.field`; {} for the first call of a conversation."""
REPORT = "rendered"
"""Entry of the answer's field: `Rendered` of the prompt, where the request had `REQUEST_FIELD`."""
_GENERATION_PROMPT = 32
"""Most tokens that a template puts between the last message and the reply."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as a template rendered it, by which a later rendering is known to begin with it."""

    length: int
    """Number of its tokens."""
    digest: str
    """Digest of all of them."""
    ended: int
    """Number of tokens up to the last that ends a turn; what follows is a template's beginning of a reply, or a message."""
    ended_digest: str

    @classmethod
    def of(cls, ids: list[int], ends: Set[int]) -> Rendered:
        """Describe a prompt; `ends` are the tokens that end a turn."""
        ended = next((at + 1 for at in range(len(ids) - 1, -1, -1) if ids[at] in ends), 0)
        return cls(len(ids), _digest(ids), ended, _digest(ids[:ended]))

    def reply_begins(self, ids: list[int]) -> int | None:
        """Return the place in a later rendering at or before which the reply to this prompt begins. None: it does not begin with this.

        Templates may write the beginning of a reply otherwise once it is an earlier one, such as without an empty block of reasoning.
        """
        if _digest(ids[: self.length]) == self.digest:
            return self.length
        is_tail = self.ended > 0 and self.length - self.ended <= _GENERATION_PROMPT
        return self.ended if is_tail and _digest(ids[: self.ended]) == self.ended_digest else None


@dataclass(frozen=True, slots=True)
class Continued:
    """A call that another one continues; without tokens, for the first call of a conversation."""

    ids: list[int]
    """Tokens that it read, and those that it sampled."""
    rendered: Rendered

    def field(self) -> dict[str, Any]:
        """Return the value of `REQUEST_FIELD`."""
        return {"ids": b64encode(array("I", self.ids).tobytes()).decode(), REPORT: astuple(self.rendered)} if self.ids else {}

    @classmethod
    def of_field(cls, value: Any) -> Continued:
        """Read the value of `REQUEST_FIELD`.

        Raises:
            KeyError, TypeError, ValueError: it is malformed.
        """
        if not value:
            return FIRST
        ids = array("I")
        ids.frombytes(b64decode(value["ids"]))
        return cls(ids.tolist(), Rendered(*value[REPORT]))

    def prompt(self, rendered: list[int], ends: Set[int]) -> list[int]:
        """Return the prompt that continues this call, or the rendered one where that does not begin with this call and a reply.

        Args:
            rendered: the prompt as vLLM rendered it from all messages.
            ends: tokens that end a turn.
        """
        if not self.ids:
            return rendered
        begin = self.rendered.reply_begins(rendered)
        end = None if begin is None else next((at for at in range(begin, len(rendered)) if rendered[at] in ends), None)
        if end is None:
            return rendered
        return self.ids + rendered[end + (self.ids[-1] in ends) :]


FIRST = Continued([], Rendered(0, "", 0, ""))
"""Stands for the call before the first."""


def _digest(ids: list[int]) -> str:
    return blake2b(array("I", ids).tobytes(), digest_size=12).hexdigest()
