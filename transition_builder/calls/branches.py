"""Tree of a rollout's calls: the parent of each call, and the numbers of the branches.

In: calls in order, what came before them (`before`), their token ids. Out: ParentCallId and Branch. Invariant: a call's parent stands
before it in `lineage.order`, so that there are no cycles; choices of one call share parent and branch.

*Parent*. The call that came before, by `before`, where the call's prompt begins with its prompt and response; else the call of the
attempt, earlier in order, whose prompt and response are the longest beginning of the prompt (the latest of several); else the one that
came before; else none. It is named by the choice that the prompt goes on from, or else by the first. So a sub-agent's first call has the
call that caused its tool call or handed over for parent, parallel calls have one parent, and two conversations that one agent leads at
once stay apart.

*Branch*. Of a call's children that are no *sub-calls* the first one of its own agent goes on its branch, or, where none is of its own
agent, the first (a hand-over). Any other, and a call without a parent, starts the attempt's next branch, in order, from 0. A sub-call
lies in a tool call that its parent does not lie in, or in an agent inside its parent's agent, and its prompt does not go on from its
parent's response. So a branch is one agent's thread: sub-agents and all but the first of parallel calls branch off. Calls that gave
nothing to act upon (failed, unused, duplicates) are never parents and start no branch: one is on its parent's branch, or, where it
would have started one, has the number that starts next.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from transition_builder.calls.before import NO_CALL, CallHistory
from transition_builder.calls.lineage import Indices, Mask


@dataclass(frozen=True, slots=True)
class Lists:
    """Column of lists as one array."""

    values: np.ndarray
    first: Indices
    length: Indices

    @classmethod
    def of(cls, column: pl.Series) -> Lists:
        """Read a column; no copy is made where it is one chunk."""
        array = column.rechunk().to_arrow()
        bounds = array.offsets.to_numpy().astype(np.int64)
        return cls(array.values.to_numpy(zero_copy_only=False), bounds[:-1], np.diff(bounds))

    def take(self, rows: Indices) -> Lists:
        """Return the lists of the given rows."""
        return Lists(self.values, self.first[rows], self.length[rows])

    @property
    def bytes(self) -> memoryview:
        """Return the bytes of all values."""
        return np.ascontiguousarray(self.values).data.cast("B")


@dataclass(frozen=True, slots=True)
class Tree:
    """Tree of calls, by their rows in `CallHistory.calls`."""

    parent: Indices
    """Row of the parent call; NO_CALL for none."""
    choice: Indices
    """Place of the parent's choice among all choices (see `build_call_tree`); NO_CALL for none."""
    branch: Indices


def build_call_tree(past: CallHistory, prompts: Lists, responses: Lists, first: Indices) -> Tree:
    """Find parents and number branches.

    Args:
        past: all calls.
        prompts: token ids of their choices, in the order of calls, then of choices.
        responses: response token ids of the same.
        first: the place in those of each call's first choice.
    """
    many = len(first)
    rows = np.arange(many)
    parent = past.latest(past.calls, rows, ended=True)
    last = np.append(first, len(prompts.length))[1:]
    goes_on = np.zeros(many, dtype=np.bool_)
    choice = np.where(parent == NO_CALL, NO_CALL, first[parent]) if many else parent

    with_parent = np.flatnonzero(parent != NO_CALL)
    width = int((last - first).max(initial=1))
    for step in range(width):
        extending = with_parent[~goes_on[with_parent] & (first[parent[with_parent]] + step < last[parent[with_parent]])]
        from_choice = first[parent[extending]] + step
        fits = _goes_on(prompts, responses, from_choice, first[extending])
        goes_on[extending[fits]], choice[extending[fits]] = True, from_choice[fits]

    searching = np.flatnonzero(~goes_on & (prompts.length[first] > 0) & (rows > past.first[past.calls.attempt])) if many else rows
    longest = _longest_prefix_parent(past, prompts, responses, first, searching)
    better = longest != NO_CALL
    extending = searching[better]
    choice[extending], goes_on[extending] = longest[better], True
    parent[extending] = np.searchsorted(first, longest[better], side="right") - 1
    return Tree(parent, choice, _numbers(past, parent, goes_on))


def _goes_on(prompts: Lists, responses: Lists, earlier: Indices, later: Indices) -> Mask:
    """Return whether each later prompt begins with the earlier prompt and response."""
    prompt_length, response_length = prompts.length[earlier], responses.length[earlier]
    fits = (response_length > 0) & (prompt_length + response_length <= prompts.length[later])
    at = np.flatnonzero(fits)
    # The last token rules out most candidates; the rest is compared as bytes.
    end = prompts.first[later[at]] + prompt_length[at] + response_length[at] - 1
    same = prompts.values[end] == responses.values[responses.first[earlier[at]] + response_length[at] - 1]
    fits[at[~same]] = False
    at = at[same]
    asked, answered = prompts.bytes, responses.bytes
    width = prompts.values.itemsize
    new, old = (prompts.first[rows[at]] * width for rows in (later, earlier))
    places = (at, new, old, prompt_length[at] * width, responses.first[earlier[at]] * width, response_length[at] * width)
    for row, here, there, size, reply, more in zip(*(one.tolist() for one in places), strict=True):
        middle = here + size
        fits[row] = asked[here:middle].tobytes() == asked[there : there + size].tobytes() and (
            asked[middle : middle + more].tobytes() == answered[reply : reply + more].tobytes()
        )
    return fits


def _longest_prefix_parent(past: CallHistory, prompts: Lists, responses: Lists, first: Indices, calls: Indices) -> Indices:
    """Return, for each call, the earlier choice whose prompt and response are the longest prefix of its prompt; NO_CALL where none is."""
    best, length = np.full(len(calls), NO_CALL, dtype=np.int64), np.zeros(len(calls), dtype=np.int64)
    owner = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(prompts.length))))
    least = first[past.first[past.calls.attempt[calls]]]
    active, at = np.arange(len(calls)), first[calls] - 1
    while len(active):
        candidates = np.flatnonzero(past.counts[owner[at]] & (prompts.length[at] + responses.length[at] > length[active]))
        candidates = candidates[_goes_on(prompts, responses, at[candidates], first[calls[active[candidates]]])]
        best[active[candidates]] = at[candidates]
        length[active[candidates]] = prompts.length[at[candidates]] + responses.length[at[candidates]]
        at = at - 1
        on = at >= least[active]
        active, at = active[on], at[on]
    return best


def _numbers(past: CallHistory, parent: Indices, goes_on: Mask) -> Indices:
    """Return the branch number of each call."""
    if not len(parent):
        return parent
    rows = np.arange(len(parent))
    same = (parent != NO_CALL) & (goes_on | ~_below_parent(past, parent))
    opener = np.where(same & ~past.counts, parent, rows)
    continuations = np.flatnonzero(same & past.counts)
    continuations = continuations[np.lexsort((continuations, ~_of_one_agent(past, parent[continuations], continuations)))]
    _, at = np.unique(parent[continuations], return_index=True)
    opener[continuations[at]] = parent[continuations[at]]
    while not np.array_equal(further := opener[opener], opener):
        opener = further
    opens = (opener == rows) & past.counts
    opened = np.cumsum(opens) - opens
    return (opened - opened[past.first[past.calls.attempt]])[opener]


def _of_one_agent(past: CallHistory, first_calls: Indices, second_calls: Indices) -> Mask:
    """Return whether two calls belong to one agent or to namesakes in the same enclosing agent, or neither belongs to any."""
    agents, left, right = past.agents, past.calls.agent[first_calls], past.calls.agent[second_calls]
    return (left == right) | ((agents.name[left] == agents.name[right]) & (agents.around[left] == agents.around[right]))


def _below_parent(past: CallHistory, parent: Indices) -> Mask:
    """Return whether each call lies in a tool, or in an agent nested in its parent's, that its parent does not lie in."""
    size, calls, around = past.tree.size, past.calls, past.agents.around
    parent_row = np.maximum(parent, 0)
    below = (calls.tool != size) & (calls.tool != calls.tool[parent_row])
    parent_agent = calls.agent[parent_row]
    enclosing = around[calls.agent]
    while (enclosing != size).any():
        below |= (enclosing == parent_agent) & (parent_agent != size)
        enclosing = around[enclosing]
    return below & (parent != NO_CALL)
