"""Notes that an attempt's code leaves for its host in the same process, carried by OpenTelemetry's context.

In: a host that begins an attempt, and code of the agent that rewards itself. Out: whether it did. Invariant: the note follows the attempt's
context, so that its threads and tasks write to the same note, and other attempts never do.
"""

from __future__ import annotations

from dataclasses import dataclass

from opentelemetry import context
from opentelemetry.context import Context

_KEY = context.create_key("spangrad-attempt")


@dataclass(slots=True)
class AttemptNote:
    """Facts about an attempt that are recorded before it ends."""

    rewarded: bool = False
    """True if a reward was recorded on one of its spans, in this process."""


def with_note(source: Context, note: AttemptNote) -> Context:
    """Return the context with a note."""
    return context.set_value(_KEY, note, source)


def note_reward() -> None:
    """Record that a reward was given; does nothing outside of an agent host."""
    note = context.get_value(_KEY)
    if isinstance(note, AttemptNote):
        note.rewarded = True
