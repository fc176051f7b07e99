"""OpenEnv's `TrainingTrace` (schema version 1), as JSON lines, a rollout each: what trainers read that take calls with token ids and masks.

Each call is a turn: the engine's own ids of its prompt and reply, logprobs (nats), and a mask over both. `request` and `response` hold the
texts, where they can be read; `metadata` says where the turn comes from, its rewards and its rollout's return. Invariant: each call is one
turn, whose identity is its transition's.

Source: openenv 0.10.0, openenv.core.harness.training.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from transition_builder.dialects.messages import Dialogue
from transition_builder.export.call_texts import about, read_dialogues
from transition_builder.export.files import JsonLines
from transition_builder.export.reading import ExportReader
from transition_builder.export.tally import LeftOut


def write_training_trace(reader: ExportReader, out: Path) -> None:
    """Write the traces to the file `out`."""
    with JsonLines(out) as lines:
        for part in reader.parts():
            kept: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
            for rollout, calls in part.by_rollout():
                with_ids = [call for call in calls if call["PromptIds"] and call["ResponseIds"]]
                valid = [call for call in with_ids if _has_logprobs(call)]
                reader.tally.count_left_out(LeftOut.NO_IDS, len(calls) - len(with_ids))
                reader.tally.count_left_out(LeftOut.NO_LOGPROBS, len(with_ids) - len(valid))
                kept += [(rollout, valid)] if valid else []
            dialogues = iter(read_dialogues(reader.client, [call for _, calls in kept for call in calls]))
            for rollout, calls in kept:
                turns = [
                    {**_turn(call), **_texts(call, next(dialogues)), "metadata": {**about(reader, rollout, [call]), **_facts(call)}}
                    for call in calls
                ]
                lines.write({"schema_version": 1, "turns": turns})
                trained = sum(len(call["ResponseIds"]) for call in calls)
                reader.tally.write(len(calls), rows=1, turns=len(calls), trained_tokens=trained)


def _has_logprobs(call: dict[str, Any]) -> bool:
    """Return whether a call has the logprobs that OpenEnv asks for; one without them would invalidate its whole trace."""
    logprobs = call["Logprobs"]
    return len(logprobs) == len(call["ResponseIds"]) and all(-math.inf < logprob <= 0 for logprob in logprobs)


def _turn(call: dict[str, Any]) -> dict[str, Any]:
    prompt, response = call["PromptIds"], call["ResponseIds"]
    return {
        "node_id": call["TransitionId"],
        "prompt_token_ids": prompt,
        "completion_token_ids": response,
        "per_token_logps": call["Logprobs"],
        "loss_mask": [0] * len(prompt) + [1] * len(response),
    }


def _texts(call: dict[str, Any], dialogue: Dialogue | LeftOut) -> dict[str, Any]:
    """Return request and response as chat messages; empty where the call has none."""
    if not isinstance(dialogue, Dialogue) or isinstance(dialogue.prompt, str):
        return {"request": {}, "response": {}}
    return {
        "request": {"messages": dialogue.prompt, "tools": dialogue.tools},
        "response": {"choices": [{"message": dialogue.reply, "finish_reason": call["FinishReason"]}]},
    }


def _facts(call: dict[str, Any]) -> dict[str, Any]:
    """Return how a call was sampled, and the rewards that it was given."""
    names, values = call["Rewards.Name"], call["Rewards.Value"]
    return {
        "turn": call["Turn"],
        "model": call["Model"],
        "policy": call["Policy"],
        "version": call["Version"],
        "sampling_params": {"temperature": call["Temperature"]},
        "rewards": [{"name": name, "value": value} for name, value in zip(names, values, strict=True)],
    }
