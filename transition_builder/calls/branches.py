"""Tree of a rollout's calls: the parent of each call, and the numbers of the branches.

Invariant: a call's parent stands before it in its attempt, so that there are no cycles; choices of one call share parent and branch.

The rules are those of docs/concepts/calls.md ("Parent calls"). A parent is named by the choice that the prompt goes on from, or else by
the first. A call that gave nothing to act upon is on its parent's branch, or, where it would have started one, has the number that
starts next.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import polars as pl

from transition_builder.calls.agents import Agents
from transition_builder.calls.forest import Indices, Mask, SpanForest, chains
from transition_builder.calls.preceding import NO_CALL, Events

Conversation = tuple[bytes, bytes, int]


def _as_bytes(column: pl.Series) -> Callable[[int], bytes]:
    """Return a function that reads the list in a row as bytes, to compare long ones fast; a column of one chunk is not copied."""
    array = column.rechunk().to_arrow()
    values = np.ascontiguousarray(array.values.to_numpy(zero_copy_only=False))
    buffer, bounds = values.data.cast("B"), (array.offsets.to_numpy().astype(np.int64) * values.itemsize).tolist()
    return lambda row: buffer[bounds[row] : bounds[row + 1]].tobytes()


def parents(events: Events, before: Indices, choices: pl.DataFrame, by_event: Indices, first: Indices) -> tuple[Indices, Indices, Mask]:
    """Return each call's parent, the row of the parent's choice (NO_CALL for none), and whether the prompt goes on from it.

    `before` is the call that came before each event, `by_event` the rows of `choices` in the order of events, then of choices, and `first`
    the place in it of each call's first choice.
    """
    prompt_of, response_of = _as_bytes(choices["PromptIds"]), _as_bytes(choices["ResponseIds"])
    rows, bounds, parent, useful = by_event.tolist(), [*first.tolist(), len(by_event)], before.tolist(), events.useful.tolist()
    choice = [rows[bounds[call]] if call != NO_CALL else NO_CALL for call in parent]
    continues = [False] * len(parent)
    for begin, end in pairwise([*np.unique(events.first).tolist(), len(parent)]):
        # Prompt and response of each choice that was answered, and its row, by useful calls.
        conversations = dict[int, list[Conversation]]()
        for call in (np.flatnonzero(events.is_call[begin:end]) + begin).tolist():
            own_rows = rows[bounds[call] : bounds[call + 1]]
            prompt = prompt_of(own_rows[0])
            for conversation in conversations.get(parent[call], ()):
                if _continues(prompt, conversation):
                    choice[call], continues[call] = conversation[-1], True
                    break
            else:
                if prompt and (longest := _longest_prefix_parent(prompt, conversations)) is not None:
                    parent[call], choice[call], continues[call] = *longest, True
            if useful[call]:
                prompts = (prompt, *map(prompt_of, own_rows[1:]))
                answered = zip(prompts, map(response_of, own_rows), own_rows, strict=True)
                conversations[call] = [conversation for conversation in answered if conversation[1]]
    return np.array(parent, dtype=np.int64), np.array(choice, dtype=np.int64), np.array(continues, dtype=np.bool_)


def _continues(prompt: bytes, conversation: Conversation) -> bool:
    earlier, response, _ = conversation
    return prompt.startswith(earlier) and prompt.startswith(response, len(earlier))


def _longest_prefix_parent(prompt: bytes, conversations: dict[int, list[Conversation]]) -> tuple[int, int] | None:
    """Return the call and the choice of the longest conversation that a prompt goes on from, the latest of several."""
    longest, best = 0, None
    for call in reversed(conversations):
        for conversation in reversed(conversations[call]):
            length = len(conversation[0]) + len(conversation[1])
            if length > longest and _continues(prompt, conversation):
                longest, best = length, (call, conversation[-1])
    return best


def branches(forest: SpanForest, agents: Agents, events: Events, parent: Indices, continues: Mask) -> Indices:
    """Return the branch number of each call."""
    child = (parent != NO_CALL) & (continues | ~_is_sub_call(forest, agents, events, parent))
    own_agent = (events.agent[parent] == events.agent) | agents.alike(events.agent[parent], events.agent)
    continuations = dict[int, int]()
    for of_own_agent in (True, False):
        for call in np.flatnonzero(child & events.useful & (own_agent == of_own_agent)).tolist():
            continuations.setdefault(int(parent[call]), call)
    numbers, branch_count = list[int](), 0
    for call, (first, above, is_child, useful) in enumerate(
        zip(events.first.tolist(), parent.tolist(), child.tolist(), events.useful.tolist(), strict=True)
    ):
        branch_count = branch_count if call > first else 0
        if is_child and (not useful or continuations[above] == call):
            numbers.append(numbers[above])
        else:
            numbers.append(branch_count)
            branch_count += useful
    return np.array(numbers, dtype=np.int64)


def _is_sub_call(forest: SpanForest, agents: Agents, events: Events, parent: Indices) -> Mask:
    """Return whether each call lies in a tool, or in an agent nested in its parent's, that its parent does not lie in."""
    in_own_tool = (events.tool != forest.size) & (events.tool != events.tool[parent])
    parent_agent, around = events.agent[parent], agents.around[events.agent]
    in_own_agent = (chains(around, agents.around) == parent_agent[:, None]).any(axis=1) & (parent_agent != forest.size)
    return in_own_tool | in_own_agent
