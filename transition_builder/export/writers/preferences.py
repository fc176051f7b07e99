"""Pairs for preference training (DPO), as JSON lines: the best and the worst rollout of a group that began with the same messages.

A line has `prompt`, `chosen` and `rejected` as messages, and as token ids with masks where every call has them. `chosen` and `rejected` go
on where the prompt ends: replies, and what came between them. Where a rollout has several conversations, the first one represents it.
Invariant: a group gives one pair at most, and its two returns differ; a group that gives none is counted with the reason.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from transition_builder.dialects.messages import Message
from transition_builder.export.call_texts import RolloutTexts, about, rollout_texts
from transition_builder.export.conversations import Conversation, of_tokens, prompt_key
from transition_builder.export.files import JsonLines
from transition_builder.export.reading import ExportReader
from transition_builder.export.tally import LeftOut


@dataclass(frozen=True, slots=True)
class _Candidate:
    rollout: RolloutTexts
    main: Conversation
    """Conversation that the rollout began with."""
    calls: list[dict[str, Any]]

    @property
    def value(self) -> float:
        return float(self.rollout.rollout["Return"])

    @property
    def prompt(self) -> list[Message]:
        return self.main.messages[: self.main.prompt]


def write_preferences(reader: ExportReader, out: Path, *, min_margin: float = 0.0) -> None:
    """Write pairs to the file `out`; returns that differ by no more than `min_margin` are a tie."""
    with JsonLines(out) as lines:
        for part in reader.parts():
            for _, group in groupby(rollout_texts(reader, part, keep_cut=True), key=lambda rollout: rollout.rollout["Group"]):
                candidates = [candidate for rollout in group if (candidate := _candidate(reader, rollout)) is not None]
                if not candidates:
                    continue
                pair = _pair(candidates, min_margin)
                if isinstance(pair, LeftOut):
                    reader.tally.groups_left_out[pair.value] += 1
                    reader.tally.count_left_out(pair, sum(len(candidate.calls) for candidate in candidates))
                    continue
                lines.write(_row(reader, *pair))
                reader.tally.write(sum(len(candidate.calls) for candidate in pair), pairs=1)
                rest = sum(len(candidate.calls) for candidate in candidates if candidate not in pair)
                reader.tally.count_left_out(LeftOut.NOT_IN_A_PAIR, rest)
    tally = reader.tally
    without = tally.groups - tally.written["pairs"] - sum(tally.groups_left_out.values())
    tally.groups_left_out.update({"no_usable_rollout": without} if without else {})


def _candidate(reader: ExportReader, rollout: RolloutTexts) -> _Candidate | None:
    """Return the rollout's main conversation, if it can be compared; calls outside of it are counted."""
    reason = None
    if rollout.rollout["Return"] is None:
        reason = LeftOut.NO_RETURN
    elif not rollout.whole:
        reason = LeftOut.OTHER_BRANCH
    elif isinstance(rollout.call_texts[0].dialogue.prompt, str):
        reason = LeftOut.NO_MESSAGES
    if reason is not None:
        reader.tally.count_left_out(reason, len(rollout.call_texts))
        return None
    first = rollout.call_texts[0].call
    main, calls = next((conversation, calls) for conversation, calls in rollout.conversations() if first in calls)
    reader.tally.count_left_out(LeftOut.OTHER_BRANCH, len(rollout.call_texts) - len(calls))
    return _Candidate(rollout, main, calls)


def _pair(candidates: list[_Candidate], min_margin: float) -> tuple[_Candidate, _Candidate] | LeftOut:
    """Return the best and worst of those with the same prompt; of several such sets, of the one where they differ most."""
    if len(candidates) == 1:
        return LeftOut.GROUP_OF_ONE
    same_prompt: dict[Hashable, list[_Candidate]] = {}
    for candidate in candidates:
        same_prompt.setdefault(prompt_key(candidate.prompt), []).append(candidate)
    sets = [several for several in same_prompt.values() if len(several) > 1]
    if not sets:
        return LeftOut.PROMPTS_DIFFER
    # max and min take the first of equals, so that the same rollouts always give the same pair.
    ends = [(max(several, key=lambda candidate: candidate.value), min(several, key=lambda candidate: candidate.value)) for several in sets]
    best, worst = max(ends, key=lambda pair: pair[0].value - pair[1].value)
    return (best, worst) if best.value - worst.value > min_margin else LeftOut.TIE


def _row(reader: ExportReader, best: _Candidate, worst: _Candidate) -> dict[str, Any]:
    row: dict[str, Any] = {
        "prompt": best.prompt,
        "chosen": best.main.messages[best.main.prompt :],
        "rejected": worst.main.messages[worst.main.prompt :],
        "chosen_return": best.value,
        "rejected_return": worst.value,
    }
    if best.main.tools:
        row["tools"] = best.main.tools
    ids = _tokens(best), _tokens(worst)
    if ids[0] is not None and ids[1] is not None and ids[0][0] == ids[1][0]:
        row["prompt_ids"] = ids[0][0]
        row |= {"chosen_ids": ids[0][1], "chosen_mask": ids[0][2], "rejected_ids": ids[1][1], "rejected_mask": ids[1][2]}
        reader.tally.written["pairs_with_ids"] += 1
    row["meta"] = {
        name: about(reader, candidate.rollout.rollout, candidate.calls) for name, candidate in (("chosen", best), ("rejected", worst))
    }
    return row


def _tokens(candidate: _Candidate) -> tuple[list[int], list[int], list[int]] | None:
    """Return ids of the prompt, ids after it and their mask; None where they do not make one sequence of exactly these calls."""
    sequences = of_tokens([(call["PromptIds"], call["ResponseIds"]) for call in candidate.calls])
    if len(sequences) != 1 or not all(call["PromptIds"] and call["ResponseIds"] for call in candidate.calls):
        return None
    only = sequences[0]
    return only.ids[: only.prompt], only.ids[only.prompt :], only.mask[only.prompt :]
