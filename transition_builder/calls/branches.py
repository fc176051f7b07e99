"""A rollout's calls as a tree: which call came before each on its branch, and the numbers of the branches.

In: calls in order, what came before them (`before`), their token ids. Out: ParentCallId and Branch. Invariant: a call's parent stands
before it in `lineage.order`, so that there are no cycles; choices of one call share parent and branch.

*Parent*. The call that came before, by `before`, where the call's prompt begins with its prompt and response; else the call of the
attempt, earlier in order, whose prompt and response are the longest beginning of the prompt (the latest of several); else the one that
came before; else none. It is named by the choice that the prompt goes on from, or else by the first. So a sub-agent's first call has the
call that caused its tool call or handed over for parent, parallel calls have one parent, and two conversations that one agent leads at
once stay apart.

*Branch*. Of a call's children that are no *sub-calls* the first one of its own agent goes on its branch, or, where none is of its own
agent, the first (a hand-over). Any other, and a call without a parent, opens the next number of its attempt, in order, from 0. A sub-call
lies in a tool call that its parent does not lie in, or in an agent inside its parent's agent, and its prompt does not go on from its
parent's response. So a branch is one agent's thread: sub-agents and all but the first of parallel calls branch off. Calls that gave
nothing to act upon (failed, unused, duplicates) are nobody's parents and open nothing: one stands on its parent's branch, or, where it
would have opened one, has the number that opens next.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from transition_builder.calls.before import NOBODY, Past
from transition_builder.calls.lineage import Indices, Mask


@dataclass(frozen=True, slots=True)
class Lists:
    """A column of lists as one array."""

    values: np.ndarray
    first: Indices
    length: Indices

    @classmethod
    def of(cls, column: pl.Series) -> Lists:
        """Without a copy where the column lies in one piece."""
        array = column.rechunk().to_arrow()
        bounds = array.offsets.to_numpy().astype(np.int64)
        return cls(array.values.to_numpy(zero_copy_only=False), bounds[:-1], np.diff(bounds))

    def take(self, rows: Indices) -> Lists:
        """Some of the lists."""
        return Lists(self.values, self.first[rows], self.length[rows])

    @property
    def bytes(self) -> memoryview:
        """Of all values."""
        return np.ascontiguousarray(self.values).data.cast("B")


@dataclass(frozen=True, slots=True)
class Tree:
    """Of calls, by their rows in `Past.calls`."""

    parent: Indices
    """NOBODY for none."""
    choice: Indices
    """The place of the parent's choice among all choices (see `grow`); NOBODY for none."""
    branch: Indices


def grow(past: Past, prompts: Lists, responses: Lists, first: Indices) -> Tree:
    """Find parents and number branches.

    Args:
        past: all calls.
        prompts: token ids of their choices, in the order of calls, then of choices.
        responses: of the same.
        first: the place in those of each call's first choice.
    """
    many = len(first)
    rows = np.arange(many)
    parent = past.latest(past.calls, rows, ended=True)
    last = np.append(first, len(prompts.length))[1:]
    goes_on = np.zeros(many, dtype=np.bool_)
    choice = np.where(parent == NOBODY, NOBODY, first[parent]) if many else parent

    asked = np.flatnonzero(parent != NOBODY)
    width = int((last - first).max(initial=1))
    for step in range(width):
        some = asked[~goes_on[asked] & (first[parent[asked]] + step < last[parent[asked]])]
        from_choice = first[parent[some]] + step
        fits = _goes_on(prompts, responses, from_choice, first[some])
        goes_on[some[fits]], choice[some[fits]] = True, from_choice[fits]

    searching = np.flatnonzero(~goes_on & (prompts.length[first] > 0) & (rows > past.first[past.calls.attempt])) if many else rows
    found = _longest(past, prompts, responses, first, searching)
    better = found != NOBODY
    some = searching[better]
    choice[some], goes_on[some] = found[better], True
    parent[some] = np.searchsorted(first, found[better], side="right") - 1
    return Tree(parent, choice, _numbers(past, parent, goes_on))


def _goes_on(prompts: Lists, responses: Lists, earlier: Indices, later: Indices) -> Mask:
    """Whether each later prompt begins with the earlier prompt and response."""
    before, said = prompts.length[earlier], responses.length[earlier]
    fits = (said > 0) & (before + said <= prompts.length[later])
    at = np.flatnonzero(fits)
    # The last token tells most of them apart; the rest is compared as bytes.
    end = prompts.first[later[at]] + before[at] + said[at] - 1
    same = prompts.values[end] == responses.values[responses.first[earlier[at]] + said[at] - 1]
    fits[at[~same]] = False
    at = at[same]
    asked, answered = prompts.bytes, responses.bytes
    width = prompts.values.itemsize
    new, old = (prompts.first[rows[at]] * width for rows in (later, earlier))
    places = (at, new, old, before[at] * width, responses.first[earlier[at]] * width, said[at] * width)
    for row, here, there, size, reply, more in zip(*(one.tolist() for one in places), strict=True):
        middle = here + size
        fits[row] = asked[here:middle].tobytes() == asked[there : there + size].tobytes() and (
            asked[middle : middle + more].tobytes() == answered[reply : reply + more].tobytes()
        )
    return fits


def _longest(past: Past, prompts: Lists, responses: Lists, first: Indices, calls: Indices) -> Indices:
    """For each of the calls the choice, of earlier calls, that its prompt goes on from the furthest; NOBODY where it does from none."""
    best, length = np.full(len(calls), NOBODY, dtype=np.int64), np.zeros(len(calls), dtype=np.int64)
    owner = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(prompts.length))))
    least = first[past.first[past.calls.attempt[calls]]]
    active, at = np.arange(len(calls)), first[calls] - 1
    while len(active):
        some = np.flatnonzero(past.counts[owner[at]] & (prompts.length[at] + responses.length[at] > length[active]))
        some = some[_goes_on(prompts, responses, at[some], first[calls[active[some]]])]
        best[active[some]] = at[some]
        length[active[some]] = prompts.length[at[some]] + responses.length[at[some]]
        at = at - 1
        on = at >= least[active]
        active, at = active[on], at[on]
    return best


def _numbers(past: Past, parent: Indices, goes_on: Mask) -> Indices:
    """The branch of each call."""
    if not len(parent):
        return parent
    rows = np.arange(len(parent))
    same = (parent != NOBODY) & (goes_on | ~_below_parent(past, parent))
    opener = np.where(same & ~past.counts, parent, rows)
    heirs = np.flatnonzero(same & past.counts)
    heirs = heirs[np.lexsort((heirs, ~_of_one_agent(past, parent[heirs], heirs)))]
    _, at = np.unique(parent[heirs], return_index=True)
    opener[heirs[at]] = parent[heirs[at]]
    while not np.array_equal(further := opener[opener], opener):
        opener = further
    opens = (opener == rows) & past.counts
    opened = np.cumsum(opens) - opens
    return (opened - opened[past.first[past.calls.attempt]])[opener]


def _of_one_agent(past: Past, one: Indices, other: Indices) -> Mask:
    """Whether calls belong to the same agent, or to spans of the same agent inside the same one; or both to none."""
    agents, left, right = past.agents, past.calls.agent[one], past.calls.agent[other]
    return (left == right) | ((agents.name[left] == agents.name[right]) & (agents.around[left] == agents.around[right]))


def _below_parent(past: Past, parent: Indices) -> Mask:
    """Whether each call lies in a tool, or in an agent inside its parent's, that its parent does not lie in."""
    size, calls, around = past.tree.size, past.calls, past.agents.around
    old = np.maximum(parent, 0)
    below = (calls.tool != size) & (calls.tool != calls.tool[old])
    theirs = calls.agent[old]
    enclosing = around[calls.agent]
    while (enclosing != size).any():
        below |= (enclosing == theirs) & (theirs != size)
        enclosing = around[enclosing]
    return below & (parent != NOBODY)
