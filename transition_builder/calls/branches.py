"""Tree of a rollout's calls: the parent of each call, and the numbers of the branches.

Invariant: a call's parent stands before it in its attempt, so that there are no cycles; choices of one call share parent and branch.

The rules are those of docs/concepts/calls.md ("Parent calls"). A parent is named by the choice that the prompt goes on from, or else by
the first. A call that gave nothing to act upon is on its parent's branch, or, where it would have started one, has the number that
starts next.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, pairwise
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import polars as pl

from transition_builder.calls.agents import Agents
from transition_builder.calls.forest import Indices, Mask, SpanForest, chains
from transition_builder.calls.preceding import NO_CALL, Events


class AnsweredChoice(NamedTuple):
    """Choice of a useful call that was answered."""

    ids: bytes
    """Token ids of its prompt and response."""
    call: int
    row: int


class PromptSearch(NamedTuple):
    """Search for the conversation that a call's prompt goes on from."""

    ids: bytes
    """Token ids that begin with the prompt: those of the call's own conversation where there is one, so that none are held twice."""
    call: int
    length: int
    """Number of bytes of the prompt."""


def _as_bytes(column: pl.Series) -> Callable[[int], memoryview]:
    """Return a function that views the list in a row as bytes, to compare long ones fast; a column of one chunk is not copied."""
    array = column.rechunk().to_arrow()
    values = np.ascontiguousarray(array.values.to_numpy(zero_copy_only=False))
    buffer, bounds = values.data.cast("B"), (array.offsets.to_numpy().astype(np.int64) * values.itemsize).tolist()
    return lambda row: buffer[bounds[row] : bounds[row + 1]]


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
        conversations, searches = dict[int, list[AnsweredChoice]](), list[PromptSearch]()
        for call in (np.flatnonzero(events.is_call[begin:end]) + begin).tolist():
            own_rows = rows[bounds[call] : bounds[call + 1]]
            answers = [(row, response) for row in own_rows if useful[call] and (response := response_of(row))]
            own = [AnsweredChoice(b"".join([prompt_of(row), response]), call, row) for row, response in answers]
            prompt = prompt_of(own_rows[0])
            ids = own[0].ids if own and own[0].row == own_rows[0] else bytes(prompt)
            preceding = conversations.get(parent[call], ())
            if extended := next((earlier for earlier in preceding if ids.startswith(earlier.ids, 0, len(prompt))), None):
                choice[call], continues[call] = extended.row, True
            elif prompt and conversations:
                searches.append(PromptSearch(ids, call, len(prompt)))
            conversations[call] = own
        for call, longest in longest_prefixes(chain.from_iterable(conversations.values()), searches) if searches else ():
            parent[call], choice[call], continues[call] = longest.call, longest.row, True
    return np.array(parent, dtype=np.int64), np.array(choice, dtype=np.int64), np.array(continues, dtype=np.bool_)


def longest_prefixes(conversations: Iterable[AnsweredChoice], searches: Iterable[PromptSearch]) -> Iterator[tuple[int, AnsweredChoice]]:
    """Yield the calls whose prompts go on from earlier calls' conversations, each with the longest of them, the latest of several.

    `conversations` are in the order of calls. Sorted token ids stand behind all that they begin with, which a stack holds: a search is
    no scan of all conversations.
    """
    prefixes = list[list[AnsweredChoice]]()  # of the current token ids, the shortest first; equal ones together
    for current in sorted([*conversations, *searches], key=attrgetter("ids")):
        while prefixes and not current.ids.startswith(prefixes[-1][0].ids):
            prefixes.pop()
        if isinstance(current, PromptSearch):
            for equal in reversed(prefixes):
                if len(equal[0].ids) <= current.length and (earlier := bisect_left(equal, current.call, key=attrgetter("call"))):
                    yield current.call, equal[earlier - 1]
                    break
        elif prefixes and prefixes[-1][0].ids == current.ids:
            prefixes[-1].append(current)
        else:
            prefixes.append([current])


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
