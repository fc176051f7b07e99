"""Groups that nothing before the trainer stops and that no trainer may train, by the reason that each is skipped for.

In: the sound rows of a group, as the store holds them. Out: the same group, poisoned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainer.ledger.skips import SkipReason

Rows = list[dict[str, Any]]


def _without_numbers(rows: Rows, trained: str) -> Rows:
    return [{**rows[0], "Logprobs": [float("nan")] * len(rows[0]["Logprobs"])}, *rows[1:]]


def _of_another_distribution(rows: Rows, trained: str) -> Rows:
    return [{**row, "Logprobs": [logprob - 2 for logprob in row["Logprobs"]]} for row in rows]


def _trained_before(rows: Rows, trained: str) -> Rows:
    """Give the first rollout the id of one that was trained under its own group, as a conversation that went on under another has it."""
    first = rows[0]["RolloutId"]
    return [{**row, "RolloutId": trained, "Revision": 1} if row["RolloutId"] == first else row for row in rows]


def _without_a_prompt(rows: Rows, trained: str) -> Rows:
    return [{**rows[0], "PromptIds": []}, *rows[1:]]


POISON: dict[SkipReason, Callable[[Rows, str], Rows]] = {
    SkipReason.NOT_FINITE: _without_numbers,
    SkipReason.LOGPROB_GAP: _of_another_distribution,
    SkipReason.ALREADY_TRAINED: _trained_before,
    SkipReason.CONTRADICTORY: _without_a_prompt,
}
"""Takes a group's rows and the id of a rollout that was trained under another group."""
