"""What became of what an export read.

In: counts, as they come. Out: what was written and what was left out, and why. Invariant: calls read = calls written + calls left out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from spangrad.errors import BuilderError


class LeftOut(StrEnum):
    """Why something that the builder made is not in an export."""

    NOT_SELECTED = "not_selected"
    """The export was not asked for this agent, model, policy, tool or component."""
    BELOW_RETURN = "below_return"
    """Its rollout's return is below --min-return."""
    NO_RETURN = "no_return"
    """Its rollout has no reward at all, and this export compares returns."""
    NO_TEXT = "no_text"
    """No span holds what was asked and answered."""
    UNREADABLE_TEXT = "unreadable_text"
    """A span holds it in a form that is not known here."""
    REDACTED_TEXT = "redacted_text"
    """A rule of the gateway took something out of it."""
    CUT_SHORT = "cut_short"
    """The answer ended at its token limit; as text it would teach to stop there."""
    NO_IDS = "no_token_ids"
    """It has no token ids, and this export writes ids."""
    NOT_TEXT = "not_text"
    """It holds images or other parts that are no text, and this format has no place for them."""
    NO_MESSAGES = "no_messages"
    """It was asked through /v1/completions, without messages."""
    FOREIGN_REPLIES = "foreign_replies"
    """It holds replies that no call of the rollout gave, and this format trains every reply."""
    TOOLS_DIFFER = "tools_differ"
    """Its tools cannot stand beside those of other rows in Parquet's columns without being changed."""
    LATER_CALL = "later_call"
    """It is not its rollout's first call, and this format wants what the rollout began with."""
    OTHER_BRANCH = "other_branch"
    """It is no part of the conversation that the rollout began with."""
    SAME_PROMPT = "same_prompt"
    """Another rollout began with the same messages, and stands for it."""
    NOT_IN_A_PAIR = "not_in_a_pair"
    """Its rollout is neither the best nor the worst of its group."""
    GROUP_OF_ONE = "group_of_one"
    """Its group has no other rollout to compare with."""
    TIE = "tie"
    """The best and the worst rollout of its group have the same return, or too nearly."""
    PROMPTS_DIFFER = "prompts_differ"
    """No two rollouts of its group began with the same messages."""


@dataclass(slots=True)
class Tally:
    """Counts of an export."""

    calls: int = 0
    """Policy calls that the builder concluded for the rollouts that were asked for."""
    rollouts: int = 0
    groups: int = 0
    bare_rollouts: int = 0
    """Rollouts without one policy call."""
    calls_written: int = 0
    written: Counter[str] = field(default_factory=Counter[str])
    """What the files hold, by unit: rows, sequences, pairs, tokens."""
    left_out: Counter[str] = field(default_factory=Counter[str])
    """Calls by reason; those that the builder dropped by `dropped: REASON`."""
    groups_left_out: Counter[str] = field(default_factory=Counter[str])
    """Groups without a pair, by reason."""

    def leave(self, reason: LeftOut, calls: int = 1) -> None:
        """Count calls that are not written."""
        if calls:
            self.left_out[reason.value] += calls

    def write(self, calls: int, **units: int) -> None:
        """Count calls that are written, and what they became."""
        self.calls_written += calls
        self.written.update({name: count for name, count in units.items() if count})

    def check(self) -> None:
        """See that no call was lost.

        Raises:
            BuilderError: the sum is wrong.
        """
        lost = self.calls - self.calls_written - sum(self.left_out.values())
        if lost:
            raise BuilderError(
                f"of {self.calls} calls {self.calls_written} were written and {sum(self.left_out.values())} left out: {lost} are not "
                "accounted for, so rows of otel.transitions or otel.drops are missing. `spangrad build --all` says of which rollouts."
            )
