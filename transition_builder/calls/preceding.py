"""Preceding calls: the call that led to another call or to a tool call, by the rules of docs/concepts/calls.md ("Parent calls").

Invariant: only what one process itself saw end before, or count before, comes before; clocks of two processes are never compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from transition_builder.calls.agents import Agents
from transition_builder.calls.forest import Indices, Mask, SpanForest, chains
from transition_builder.calls.order import Clocks

NO_CALL = -1
"""Row number in place of a call: none came before."""
_ENCLOSING, _NAMESAKE, _OTHER = 3, 2, 1
_WEIGHT = 1 << 32
"""Weight of agent relations over common ancestors; larger than any depth."""


@dataclass(frozen=True, slots=True)
class Events:
    """Calls and tool calls, a row each, sorted by attempt and by place in it."""

    node: Indices
    """Outermost span of each."""
    path: Indices
    """Path of each, in which the outermost span stands for the step in its process."""
    is_call: Mask
    useful: Mask
    """True for calls that gave something to act upon."""
    agent: Indices
    """Span of the agent that each lies in; the forest's size where there is none."""
    tool: Indices
    """Tool call that each lies in; the forest's size where there is none."""
    first: Indices
    """First row of each one's attempt."""

    @classmethod
    def of(
        cls, forest: SpanForest, clocks: Clocks, agents: Agents, path: Indices, node: Indices, attempt: Indices, is_call: Mask, useful: Mask
    ) -> Events:
        """Describe sorted events; `path` are those of their own spans, `node` their outermost spans."""
        outermost_path, path, rows = clocks.paths(node), path.copy(), np.arange(len(node))
        at = clocks.last_steps(outermost_path)
        path[rows, at] = outermost_path[rows, at]
        agent, tool = (around[forest.parent[node]] for around in (agents.agent, agents.tool))
        return cls(node, path, is_call, useful, agent, tool, np.searchsorted(attempt, attempt))


def came_before(forest: SpanForest, clocks: Clocks, agents: Agents, events: Events) -> Indices:
    """Return the row of the call that came before each event, or NO_CALL."""
    rows = np.arange(len(events.node))
    # The next useful call that stands before each event; from there on to the next one before that.
    earlier = np.append(NO_CALL, np.maximum.accumulate(np.where(events.useful, rows, NO_CALL)))[:-1]
    earlier[earlier < events.first] = NO_CALL
    call_at = np.full(forest.size + 1, NO_CALL, dtype=np.int64)
    call_at[events.node[events.useful]] = rows[events.useful]
    best = call_at[forest.enclosing(call_at[:-1] != NO_CALL)[events.node]]
    best[(best >= rows) | (best < events.first)] = NO_CALL

    bound, score = _bound(forest, agents, events), np.full(len(rows), -1, dtype=np.int64)
    active = np.flatnonzero((earlier != NO_CALL) & (best == NO_CALL))
    call = earlier[active]
    while len(active):
        before = (events.node[call] != events.node[active]) & _before(clocks, events, call, active)
        later, calls = active[before], call[before]
        common = forest.common_depth(events.node[calls], events.node[later])
        outside = forest.depth[events.tool[calls]] <= common
        later, calls = later[outside], calls[outside]
        new = _relation(forest, agents, events.agent[calls], events.agent[later]) * _WEIGHT + common[outside]
        better = new > score[later]
        best[later[better]], score[later[better]] = calls[better], new[better]
        call = earlier[call]
        further = (call != NO_CALL) & (score[active] < bound[active])
        active, call = active[further], call[further]
    return best


def _relation(forest: SpanForest, agents: Agents, of_call: Indices, of_event: Indices) -> Indices:
    """Return a number for how near a call's agent is to an event's: the larger, the nearer."""
    in_agents = (of_call != forest.size) & (of_event != forest.size)
    encloses = (chains(of_event, agents.around) == of_call[:, None]).any(axis=1)
    relation = np.where(encloses, _ENCLOSING + forest.depth[of_call], np.where(agents.alike(of_call, of_event), _NAMESAKE, _OTHER))
    return np.where(in_agents, relation, _OTHER)


def _bound(forest: SpanForest, agents: Agents, events: Events) -> Indices:
    """Return an upper bound on the score of any call for each event, so that a search ends early."""
    size, rows, calls = forest.size, np.arange(len(events.node)), np.flatnonzero(events.is_call)
    earliest = np.full(size + 1, len(rows), dtype=np.int64)
    np.minimum.at(earliest, events.agent[calls], calls)
    own = events.agent
    while (late := (own != size) & (earliest[own] >= rows)).any():
        own = np.where(late, agents.around[own], own)
    relation = np.where(own != size, _ENCLOSING + forest.depth[own], np.where(events.agent != size, _NAMESAKE, _OTHER))
    return relation * _WEIGHT + forest.depth[forest.nearest_below(events.node, forest.least_below(events.node[calls], calls), rows)]


def _before(clocks: Clocks, events: Events, calls: Indices, later: Indices) -> Mask:
    """Return whether a process recorded each call before each event."""
    left, right, rows = events.path[calls], events.path[later], np.arange(len(calls))
    processes, seqs = [clocks.process[path] for path in (left, right)], [clocks.seq[path] for path in (left, right)]
    differ = (processes[0] != processes[1]) | (seqs[0] != seqs[1])
    at = np.argmax(differ, axis=1)
    same = processes[0][rows, at] == processes[1][rows, at]
    # One path goes through a process, the other comes straight to the gateway that recorded both.
    left_last, right_last = clocks.last_steps(left), clocks.last_steps(right)
    from_one_process = ~same & ((left_last == at) | (right_last == at)) & (processes[0][rows, left_last] == processes[1][rows, right_last])
    call, event = left[rows, np.where(from_one_process, left_last, at)], right[rows, np.where(from_one_process, right_last, at)]
    counted = clocks.seq[call] < clocks.seq[event]
    ended = (clocks.end[call] <= clocks.latest_start(event)) | (clocks.start[call] > clocks.start[event])
    return differ[rows, at] & (same | from_one_process) & counted & (ended | ~events.is_call[later])
