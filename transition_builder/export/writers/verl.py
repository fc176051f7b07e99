"""Parquet layouts that verl's datasets read: `RLHFDataset` (a row a distinct beginning) and `MultiTurnSFTDataset` (a row a conversation).

Invariant: verl reads back the messages of the calls; rows that its reader would change or mask differently are left out, and counted.

verl's readers, as of 0.9: `RLHFDataset` wants `data_source`, `prompt`, `ability`, `reward_model` {style, ground_truth} and `extra_info`
{index, ...}; `MultiTurnSFTDataset` wants `messages`, takes `tools`, and trains every assistant message.
"""

from __future__ import annotations

import hashlib
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa

from transition_builder.dialects.messages import Dialogue
from transition_builder.export.call_texts import RolloutTexts, about, has_beginning, read_dialogues, rollout_texts
from transition_builder.export.conversations import Conversation, prompt_key
from transition_builder.export.reading import ExportReader, GroupSlice
from transition_builder.export.tally import LeftOut
from transition_builder.export.writers.columns import MessageRows

ABILITY = "agent"
_RL_COLUMNS = {
    "data_source": pa.string(),
    "ability": pa.string(),
    "reward_model": pa.struct([("style", pa.string()), ("ground_truth", pa.string())]),
    "extra_info": pa.struct(
        [("index", pa.int64())]
        + [(name, pa.string()) for name in ("split", "task", "run", "group", "rollout", "call")]
        + [("return", pa.float64())]
    ),
}
_META = pa.struct(
    [(name, pa.string()) for name in ("dataset", "run", "mode", "task", "group", "rollout")]
    + [("attempt", pa.int64()), ("build_spec", pa.string()), ("revision", pa.int64()), ("return", pa.float64())]
    + [(name, pa.list_(pa.string())) for name in ("agents", "calls", "tokenizers")]
)


def write_verl(reader: ExportReader, out: Path) -> None:
    """Write prompts for `RLHFDataset` to the file `out`: the messages that rollouts began with, each once."""
    seen: set[bytes] = set()
    with closing(MessageRows(out, "prompt", _RL_COLUMNS)) as rows:
        for part in reader.parts():
            _add_prompts(reader, part, rows, seen)
        for _, calls in rows.finish(reader.tally):
            reader.tally.write(calls, rows=1)


def _add_prompts(reader: ExportReader, part: GroupSlice, rows: MessageRows, seen: set[bytes]) -> None:
    rollouts = list(part.by_rollout())
    dialogues = read_dialogues(reader.client, [calls[0] for _, calls in rollouts])
    for (rollout, calls), dialogue in zip(rollouts, dialogues, strict=True):
        reader.tally.count_left_out(LeftOut.LATER_CALL, len(calls) - 1)
        reason = _unfit(dialogue) if has_beginning(reader, calls) else LeftOut.LATER_CALL
        if reason is None:
            assert isinstance(dialogue, Dialogue)
            assert not isinstance(dialogue.prompt, str)
            key = hashlib.sha256(repr(prompt_key(dialogue.prompt)).encode()).digest()
            if key not in seen:
                seen.add(key)
                rows.add({"prompt": dialogue.prompt, **_task(reader, rollout, calls[0], len(seen) - 1)})
                continue
            reason = LeftOut.SAME_PROMPT
        reader.tally.count_left_out(reason)


def _unfit(dialogue: Dialogue | LeftOut) -> LeftOut | None:
    if isinstance(dialogue, LeftOut):
        return dialogue
    if isinstance(dialogue.prompt, str):
        return LeftOut.NO_MESSAGES
    return None if all(isinstance(message["content"], str) for message in dialogue.prompt) else LeftOut.NOT_TEXT


def _task(reader: ExportReader, rollout: dict[str, Any], call: dict[str, Any], index: int) -> dict[str, Any]:
    return {
        "data_source": reader.dataset.name,
        "ability": ABILITY,
        # The store holds no solutions; a reward function of verl's looks the task up by its name.
        "reward_model": {"style": "rule", "ground_truth": rollout["TaskId"]},
        "extra_info": {
            "index": index,
            "split": rollout["Mode"],
            "task": rollout["TaskId"],
            "run": rollout["RunId"],
            "group": rollout["GroupId"],
            "rollout": rollout["RolloutId"],
            "call": call["CallId"],
            "return": rollout["Return"],
        },
    }


def write_verl_sft(reader: ExportReader, out: Path) -> None:
    """Write conversations for `MultiTurnSFTDataset` to the file `out`."""
    with closing(MessageRows(out, "messages", {"meta": _META})) as rows:
        for part in reader.parts():
            for rollout in rollout_texts(reader, part):
                _add_conversations(reader, rollout, rows)
        for row, calls in rows.finish(reader.tally):
            reader.tally.write(calls, rows=1, trained_messages=sum(message["role"] == "assistant" for message in row["messages"]))


def _add_conversations(reader: ExportReader, rollout: RolloutTexts, rows: MessageRows) -> None:
    reader.tally.count_left_out(LeftOut.NO_MESSAGES, sum(isinstance(call_text.dialogue.prompt, str) for call_text in rollout.call_texts))
    for conversation, calls in rollout.conversations():
        reason = _unfit_conversation(conversation)
        if reason is not None:
            reader.tally.count_left_out(reason, len(calls))
        else:
            row = {"messages": conversation.messages, "meta": about(reader, rollout.rollout, calls)}
            rows.add(row, tools=conversation.tools, calls=len(calls))


def _unfit_conversation(conversation: Conversation) -> LeftOut | None:
    if not all(isinstance(message["content"], str) for message in conversation.messages):
        return LeftOut.NOT_TEXT
    marked = zip(conversation.messages, conversation.trained, strict=True)
    return LeftOut.FOREIGN_REPLIES if any(message["role"] == "assistant" and not trained for message, trained in marked) else None
