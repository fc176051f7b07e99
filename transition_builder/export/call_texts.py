"""Rollouts of a part as conversations.

In: a `Part` and the store. Out: of each rollout its calls with their dialogues, and merged conversations. Invariant: a call without a
usable text is counted with its reason, once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transition_builder.export.conversations import Conversation, of_messages
from transition_builder.export.messages import Dialogue, Message
from transition_builder.export.reading import Part, Reader
from transition_builder.export.tally import LeftOut
from transition_builder.export.texts import read_dialogues


@dataclass(frozen=True, slots=True)
class Said:
    """One call and what was said in it."""

    call: dict[str, Any]
    """A row of `Part.calls`."""
    dialogue: Dialogue


@dataclass(frozen=True, slots=True)
class SpokenRollout:
    """A rollout's calls that have a text."""

    rollout: dict[str, Any]
    """A row of `Part.rollouts`."""
    said: list[Said]
    """In order."""
    whole: bool
    """Whether its first call is among them."""

    def conversations(self) -> list[Conversation]:
        """The calls with messages, merged; `calls` are places in `said`."""
        places = [place for place, one in enumerate(self.said) if not isinstance(one.dialogue.prompt, str)]
        made = of_messages([_messages(self.said[place].dialogue) for place in places])
        for one in made:
            one.calls = [places[at] for at in one.calls]
        return made


def spoken(reader: Reader, part: Part, *, keep_cut: bool = False) -> Iterator[SpokenRollout]:
    """The rollouts of a part that have a text.

    Args:
        reader: counts what has none.
        part: of it.
        keep_cut: keep answers that ended at their token limit.
    """
    rollouts = list(part.by_rollout())
    dialogues = iter(read_dialogues(reader.client, reader.url, [call for _, calls in rollouts for call in calls]))
    for rollout, calls in rollouts:
        said: list[Said] = []
        whole = True
        for place, call in enumerate(calls):
            found = next(dialogues)
            if isinstance(found, Dialogue) and (found.cut or call["FinishReason"] == "length") and not keep_cut:
                found = LeftOut.CUT_SHORT
            if isinstance(found, Dialogue):
                said.append(Said(call, found))
            else:
                reader.tally.leave(found)
                whole = whole and place > 0
        if said:
            yield SpokenRollout(rollout, said, whole)


def about(reader: Reader, rollout: dict[str, Any], calls: list[dict[str, Any]]) -> dict[str, Any]:
    """What a row says of where it is from."""
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
