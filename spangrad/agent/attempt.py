"""What an attempt's code and its host tell each other in one process, carried by OpenTelemetry's context.

In: a host that begins an attempt, and code of the agent that rewards itself. Out: whether it did. Invariant: the note goes where
the attempt's spans go, so threads and tasks that have the attempt's context write on the same note, and other attempts never do.
"""

from __future__ import annotations

from dataclasses import dataclass

from opentelemetry import context
from opentelemetry.context import Context

_KEY = context.create_key("spangrad-attempt")


@dataclass(slots=True)
class AttemptNote:
    """What is known of an attempt before it ends."""

    rewarded: bool = False
    """Whether a reward was recorded on one of its spans, in this process."""


def with_note(source: Context, note: AttemptNote) -> Context:
    """The context with a note to write on."""
    return context.set_value(_KEY, note, source)


def note_reward() -> None:
    """Write that a reward was recorded; does nothing outside of an agent host."""
    note = context.get_value(_KEY)
    if isinstance(note, AttemptNote):
        note.rewarded = True
