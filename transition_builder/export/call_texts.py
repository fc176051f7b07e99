"""Rollouts of a part as conversations; a call without a usable text is counted with its reason, once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transition_builder.dialects.messages import Dialogue, Message
from transition_builder.export.conversations import Conversation, of_messages
from transition_builder.export.reading import ExportReader, GroupSlice
from transition_builder.export.tally import LeftOut
from transition_builder.export.texts import read_dialogues


@dataclass(frozen=True, slots=True)
class CallText:
    """Call and its dialogue."""

    call: dict[str, Any]
    """Row of `GroupSlice.calls`."""
    dialogue: Dialogue


@dataclass(frozen=True, slots=True)
class SpokenRollout:
    """Calls of a rollout that have a text."""

    rollout: dict[str, Any]
    """Row of `GroupSlice.rollouts`."""
    call_texts: list[CallText]
    """Calls with a text, in order."""
    whole: bool
    """True if the rollout's first call is among them."""

    def conversations(self) -> list[Conversation]:
        """Return the calls with messages, merged; their `calls` are places in `call_texts`."""
        places = [place for place, conversation in enumerate(self.call_texts) if not isinstance(conversation.dialogue.prompt, str)]
        merged = of_messages([_messages(self.call_texts[place].dialogue) for place in places])
        for conversation in merged:
            conversation.calls = [places[at] for at in conversation.calls]
        return merged


def spoken(reader: ExportReader, part: GroupSlice, *, keep_cut: bool = False) -> Iterator[SpokenRollout]:
    """Yield the rollouts of a part that have a text.

    Args:
        reader: counts calls without a text.
        part: the part to read.
        keep_cut: keep responses that ended at their token limit.
    """
    rollouts = list(part.by_rollout())
    dialogues = iter(read_dialogues(reader.client, reader.url, [call for _, calls in rollouts for call in calls]))
    for rollout, calls in rollouts:
        call_texts: list[CallText] = []
        whole = True
        for place, call in enumerate(calls):
            result = next(dialogues)
            if isinstance(result, Dialogue) and (result.cut or call["FinishReason"] == "length") and not keep_cut:
                result = LeftOut.CUT_SHORT
            if isinstance(result, Dialogue):
                call_texts.append(CallText(call, result))
            else:
                reader.tally.leave(result)
                whole = whole and place > 0
        if call_texts:
            yield SpokenRollout(rollout, call_texts, whole)


def about(reader: ExportReader, rollout: dict[str, Any], calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the metadata of a row: its dataset, rollout and calls."""
    return {
        "dataset": str(reader.dataset),
        "run": rollout["RunId"],
        "mode": rollout["Mode"],
        "task": rollout["TaskId"],
        "group": rollout["GroupId"],
        "rollout": rollout["RolloutId"],
        "attempt": rollout["Attempt"],
        "build_spec": reader.dataset.build_spec,
        "revision": calls[0]["Revision"],
        "return": rollout["Return"],
        "agents": list(dict.fromkeys(call["AgentName"] for call in calls)),
        "calls": [call["CallId"] for call in calls],
        "tokenizers": sorted({call["TokenizerHash"] for call in calls if call["TokenizerHash"]}),
    }


def _messages(dialogue: Dialogue) -> tuple[list[Message], Message, list[dict[str, Any]]]:
    assert not isinstance(dialogue.prompt, str)
    assert not isinstance(dialogue.reply, str)
    return dialogue.prompt, dialogue.reply, dialogue.tools
