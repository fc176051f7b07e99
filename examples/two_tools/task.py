"""The reward of the two tools' task, whose questions stand in tasks.jsonl.

In: what an agent was given and what it came to. Out: its final reward. Failed tool calls are not priced here: their spans tell.
"""

from __future__ import annotations

from collections.abc import Mapping

REWARDS = {"right": 1.0, "wrong_city": 0.0, "gave_up": 0.0, "malformed": -1.0}
"""A reply that is no tool call must cost more than all failed tool calls together, or the policy learns to end early."""


def evaluate(given: Mapping[str, str], output: Mapping[str, str]) -> float:
    """The final reward of a rollout, by its outcome."""
    del given
    return REWARDS[output["outcome"]]
