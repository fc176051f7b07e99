"""Tally of the calls that an export read. Invariant: calls read = calls written + calls left out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from spangrad.errors import BuilderError


class LeftOut(StrEnum):
    """Reason why a built call is not in an export."""

    NOT_UTF8 = "not_utf8"
    """Its rollout's id, run, group or mode is not UTF-8, and no file can hold it."""
    NOT_SELECTED = "not_selected"
    """The export does not select this agent, model, policy, tool or component."""
    BELOW_RETURN = "below_return"
    """Its rollout's return is below --min-return."""
    NO_RETURN = "no_return"
    """Its rollout has no reward at all, or rewards of several roles, and this export compares returns."""
    NO_TEXT = "no_text"
    """No span holds its prompt and response."""
    UNREADABLE_TEXT = "unreadable_text"
    """A span holds its text in an unknown form."""
    REDACTED_TEXT = "redacted_text"
    """A redaction rule of the gateway removed part of its text."""
    CUT_SHORT = "cut_short"
    """Its response ended at its token limit; as text it would teach to stop there."""
    NO_IDS = "no_token_ids"
    """It has no token ids, and this export writes ids."""
    NO_LOGPROBS = "no_logprobs"
    """It lacks a logprob for each sampled token, and this export writes logprobs."""
    NOT_TEXT = "not_text"
    """It has images or other parts that are no text, and this format cannot hold them."""
    NO_MESSAGES = "no_messages"
    """Its request was to /v1/completions, without messages."""
    FOREIGN_REPLIES = "foreign_replies"
    """It has replies that no call of the rollout gave, and this format trains every reply."""
    TOOLS_DIFFER = "tools_differ"
    """Parquet's columns cannot hold its tools unchanged, beside those of other rows or at all."""
    LATER_CALL = "later_call"
    """It is not its rollout's first call, and this format holds the first prompts of rollouts."""
    OTHER_BRANCH = "other_branch"
    """It is no part of the conversation that the rollout began with."""
    SAME_PROMPT = "same_prompt"
    """Another rollout began with the same messages, and represents it."""
    NOT_IN_A_PAIR = "not_in_a_pair"
    """Its rollout is neither the best nor the worst of its group."""
    GROUP_OF_ONE = "group_of_one"
    """Its group has no other rollout to compare with."""
    TIE = "tie"
    """The best and the worst rollout of its group have the same return, or too nearly."""
    PROMPTS_DIFFER = "prompts_differ"
    """No two rollouts of its group began with the same messages."""


@dataclass(slots=True)
class ExportTally:
    """Counts of an export."""

    calls: int = 0
    """Policy calls that the builder concluded for the requested rollouts."""
    rollouts: int = 0
    groups: int = 0
    bare_rollouts: int = 0
    """Rollouts without one policy call."""
    calls_written: int = 0
    written: Counter[str] = field(default_factory=Counter[str])
    """Contents of the files, by unit: rows, sequences, pairs, tokens."""
    left_out: Counter[str] = field(default_factory=Counter[str])
    """Calls by reason; those that the builder dropped by `dropped: REASON`."""
    groups_left_out: Counter[str] = field(default_factory=Counter[str])
    """Groups without a pair, by reason."""

    def count_left_out(self, reason: LeftOut, calls: int = 1) -> None:
        """Count calls that are not written."""
        if calls:
            self.left_out[reason.value] += calls

    def write(self, calls: int, **units: int) -> None:
        """Count calls that are written, and the units that they became."""
        self.calls_written += calls
        self.written.update({name: count for name, count in units.items() if count})

    def check(self) -> None:
        """Check that no call was lost.

        Raises:
            BuilderError: the sum is wrong.
        """
        lost = self.calls - self.calls_written - sum(self.left_out.values())
        if lost:
            raise BuilderError(
                f"of {self.calls} calls {self.calls_written} were written and {sum(self.left_out.values())} left out: {lost} are not "
                "accounted for, so rows of transitions or drops are missing. `spangrad build --all` says of which rollouts."
            )
