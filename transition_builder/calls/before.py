"""Preceding calls: the common definition of the call that led to another call or to a tool call.

In: the forest of all spans, and the spans of calls and tools. Out: for any of them the call that led to it. Invariant: only what one
process itself saw end before, or count before, comes before; clocks of two processes are never compared.

Call D *came before* X, where

- D gave something to act upon: it did not fail, it is no unused retry, and it is no duplicate;
- where their paths (`lineage`) first differ inside one process, that process counted D's span before X's and, by its own clock, D's span
  had ended when X's began (a clock that contradicts the count is not believed). The span of a call is its outermost one in the
  process: the framework's before the client's before the HTTP request's. Where one of them came straight to the gateway that took
  both, the gateway's count and clock decide instead;
- D does not lie inside a tool call that X does not lie in.

Of several, the first of these that differs decides:

1. the innermost agent that X lies in and D belongs to (an agent's span; spans of one name directly inside each other are one);
2. D belongs to another span of X's own agent: the same name, inside the same agent;
3. the nearest common ancestor;
4. the latest.

A call whose span encloses X takes precedence over all others, unless `lineage` orders it after X.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from transition_builder.calls.lineage import Clocks, Forest, Indices, Mask, Paths

NO_CALL = -1
"""Row number in place of a call: none came before."""
_ENCLOSING = 3
_NAMESAKE = 2
_OTHER = 1
_WEIGHT = 1 << 32
"""Weight of agent relations over common ancestors; larger than any depth."""


@dataclass(frozen=True, slots=True)
class AnchoredEvents:
    """Calls or tool calls, a row each."""

    node: Indices
    """Outermost spans of the calls."""
    attempt: Indices
    """Number of each call's attempt."""
    where: Paths
    agent: Indices
    """Span of the agent that each lies in; the forest's size where there is none."""
    tool: Indices
    """Tool call that each lies in; the forest's size where there is none."""

    def take(self, rows: Indices) -> AnchoredEvents:
        """Return the given rows."""
        return AnchoredEvents(self.node[rows], self.attempt[rows], self.where.take(rows), self.agent[rows], self.tool[rows])


@dataclass(frozen=True, slots=True)
class Agents:
    """Agents and tools around spans; entries for all nodes and the virtual root above them."""

    agent: Indices
    """Agent's span that each node lies in or is, the outermost of those that are one agent; the forest's size where there is none."""
    around: Indices
    """Agent in which a node's agent lies."""
    name: Indices
    """Number of the agent's name."""
    tool: Indices
    """Tool call that each node lies in or is."""

    @classmethod
    def of(cls, nodes: pl.DataFrame, tree: Forest, call_like: Mask) -> Agents:
        """Find the agents; spans of calls (`call_like`) may name their agent, but are none."""
        size = tree.size
        names = nodes["AgentName"]
        is_agent = names.is_not_null().to_numpy() & ~call_like
        tools = tree.nearest(nodes["IsTool"].to_numpy())
        nearest = tree.nearest(is_agent)
        name = np.full(size + 1, -1, dtype=np.int64)
        if is_agent.any():
            agent_names = names.filter(pl.Series(is_agent))
            name[:size][is_agent] = agent_names.cast(pl.Enum(agent_names.unique().sort())).to_physical().cast(pl.Int64).to_numpy()
        all_nodes = np.arange(size + 1)
        outside = nearest[tree.parent]
        nested = (name >= 0) & (name[outside] == name) & (tools[outside] == tools)
        jump = np.where(nested, outside, all_nodes)
        while not np.array_equal(further := jump[jump], jump):
            jump = further
        agent = jump[nearest]
        return cls(agent, agent[tree.parent[agent]], name, tools)

    def things(self, tree: Forest, span_clocks: Clocks, node: Indices, attempt: Indices, where: Paths) -> AnchoredEvents:
        """Make things whose outermost spans are `node`, and whose own spans' paths are `where`."""
        above = tree.parent[node]
        return AnchoredEvents(node, attempt, _outermost(tree, span_clocks, node, where), self.agent[above], self.tool[above])


def _outermost(tree: Forest, span_clocks: Clocks, node: Indices, where: Paths) -> Paths:
    """Replace the last step of each path by the outermost span of its thing in that process."""
    inside = tree.above_process(span_clocks.process[:-1])
    depth, above = np.zeros(len(node), dtype=np.int64), inside[node]
    while (above != tree.size).any():
        depth += above != tree.size
        above = inside[above]
    rows = np.arange(len(node))
    seq, start, end = where.seq.copy(), where.start.copy(), where.end.copy()
    seq[rows, depth], start[rows, depth], end[rows, depth] = span_clocks.seq[node], span_clocks.start[node], span_clocks.end[node]
    return Paths(where.process, seq, start, end)


@dataclass(frozen=True, slots=True)
class CallHistory:
    """Index of the calls of all attempts, in the order of attempts and of `lineage.order`, for lookups of the call that came before."""

    tree: Forest
    agents: Agents
    calls: AnchoredEvents
    counts: Mask
    """True for calls that gave something to act upon."""
    first: Indices
    """Row at which each attempt's calls begin; one entry an attempt."""
    _ancestor_with_two_things: Indices
    """Nearest of each node and its ancestors with at least two things, calls or tools, at or below it."""
    _ancestor_with_two_calls: Indices
    """Nearest of each node and its ancestors with at least two calls at or below it."""
    _ancestor_with_call: Indices
    """Nearest of each node and its ancestors with at least one call at or below it."""
    _enclosing: Indices
    """Row of the call whose span is the nearest of each node and its ancestors, NO_CALL where there is none."""
    _earliest: Indices
    """First call that belongs to the agent at each node."""
    _active: Indices
    """Nearest agent with calls among each node and its ancestors."""

    @classmethod
    def of(cls, tree: Forest, agents: Agents, calls: AnchoredEvents, counts: Mask, attempts: int, tools: Indices) -> CallHistory:
        """Index sorted calls; `tools` are the spans of tool calls whose causes will be looked up."""
        many = np.bincount(calls.attempt, minlength=attempts)
        below, both = _below(tree, calls.node), _below(tree, np.concatenate([calls.node, tools]))
        rows = np.arange(len(calls.node))
        earliest = np.full(tree.size + 1, len(rows), dtype=np.int64)
        np.minimum.at(earliest, calls.agent, rows)
        row = np.full(tree.size + 1, NO_CALL, dtype=np.int64)
        row[calls.node[counts]] = rows[counts]
        return cls(
            tree,
            agents,
            calls,
            counts,
            np.cumsum(many) - many,
            tree.nearest(both >= 2),
            tree.nearest(below >= 2),
            tree.nearest(below >= 1),
            row[tree.nearest((row != NO_CALL)[: tree.size])],
            earliest,
            tree.nearest((earliest < len(rows))[: tree.size]),
        )

    def latest(self, things: AnchoredEvents, until: Indices, *, ended: bool) -> Indices:
        """Return the row of the call that came before each thing, or NO_CALL.

        Args:
            things: any.
            until: number of leading calls (rows of `calls`) to consider; those beyond certainly came later.
            ended: whether the call must have ended before (False, for tools: begun; one may run while the rest of a response arrives).
        """
        best, score = self._enclosing[self.tree.parent[things.node]], np.full(len(until), -1, dtype=np.int64)
        best = np.where(best < until, best, NO_CALL)
        first = self.first[things.attempt]
        enough = self._score_bound(things, until, self._ancestor_with_two_calls if ended else self._ancestor_with_call)
        active = np.flatnonzero((until > first) & (best == NO_CALL))
        at = until[active] - 1
        while len(active):
            able = self.counts[at] & (self.calls.node[at] != things.node[active])
            rows, calls = active[able], at[able]
            before = _before(self.calls.where, calls, things.where, rows, ended)
            rows, calls = rows[before], calls[before]
            common = self._common(calls, things, rows)
            outside = self.tree.depth[self.calls.tool[calls]] <= common
            rows, calls, common = rows[outside], calls[outside], common[outside]
            candidate_score = self._agent_score(calls, things, rows) * _WEIGHT + common
            better = candidate_score > score[rows]
            best[rows[better]], score[rows[better]] = calls[better], candidate_score[better]
            at = at - 1
            on = (at >= first[active]) & (score[active] < enough[active])
            active, at = active[on], at[on]
        return best

    def _score_bound(self, things: AnchoredEvents, until: Indices, ancestor_of: Indices) -> Indices:
        """Return an upper bound on the score of any call for each thing."""
        size, depth = self.tree.size, self.tree.depth
        own = self._active[things.agent]
        while (late := (own != size) & (self._earliest[own] >= until)).any():
            own = np.where(late, self._active[self.agents.around[own]], own)
        within = own != size
        named = np.where(things.agent != size, _NAMESAKE, _OTHER)
        return np.where(within, _ENCLOSING + depth[own], named) * _WEIGHT + depth[ancestor_of[things.node]]

    def _common(self, calls: Indices, things: AnchoredEvents, rows: Indices) -> Indices:
        """Return the depths of the nearest common ancestors."""
        left, right = self.calls.node[calls], things.node[rows]
        ancestor = self._ancestor_with_two_things[right]
        # A common ancestor below this one would have two things below it as well.
        common = self.tree.depth[ancestor]
        apart = self._ancestor_with_two_things[left] != ancestor
        common[apart] = self.tree.common_depth(left[apart], right[apart])
        return common

    def _agent_score(self, calls: Indices, things: AnchoredEvents, rows: Indices) -> Indices:
        size, agents = self.tree.size, self.agents
        call_agent, thing_agent = self.calls.agent[calls], things.agent[rows]
        in_agents = (call_agent != size) & (thing_agent != size)
        namesakes = (
            in_agents & (agents.name[call_agent] == agents.name[thing_agent]) & (agents.around[call_agent] == agents.around[thing_agent])
        )
        score = np.where(namesakes, _NAMESAKE, _OTHER)
        enclosing = np.where(in_agents, thing_agent, size)
        while (enclosing != size).any():
            score = np.where((enclosing == call_agent) & in_agents, _ENCLOSING + self.tree.depth[call_agent], score)
            enclosing = np.where(enclosing == call_agent, size, agents.around[enclosing])
        return score


def _below(tree: Forest, spans: Indices) -> Indices:
    """Count the spans that are at or below each node."""
    many = np.zeros(tree.size + 1, dtype=np.int64)
    np.add.at(many, spans, 1)
    own = many[: tree.size] > 0
    above = np.flatnonzero(tree.above(own) | own)
    # The deepest first, a level at a time.
    above = above[np.argsort(-tree.depth[above], kind="stable")]
    bounds = np.flatnonzero(np.diff(tree.depth[above], prepend=-1))
    for begin, end in zip(bounds, np.append(bounds, len(above))[1:], strict=True):
        level = above[begin:end]
        np.add.at(many, tree.parent[level], many[level])
    return many[: tree.size]


def _before(calls: Paths, left: Indices, things: Paths, right: Indices, ended: bool) -> Mask:
    """Return whether a process recorded each call before each thing."""
    width = max(calls.process.shape[1], things.process.shape[1])
    call_paths, thing_paths = _wide(calls, left, width), _wide(things, right, width)
    differ = (call_paths.process != thing_paths.process) | (call_paths.seq != thing_paths.seq)
    rows, at = np.arange(len(left)), np.argmax(differ, axis=1)
    same = call_paths.process[rows, at] == thing_paths.process[rows, at]
    seen = differ[rows, at] & same & _earlier(call_paths, at, thing_paths, at, ended)
    # One path goes through a process, the other comes straight to the gateway that recorded both.
    call_leaf, thing_leaf = call_paths.length - 1, thing_paths.length - 1
    straight = (
        ~same & ((call_leaf == at) | (thing_leaf == at)) & (call_paths.process[rows, call_leaf] == thing_paths.process[rows, thing_leaf])
    )
    if straight.any():
        seen |= straight & _earlier(call_paths, call_leaf, thing_paths, thing_leaf, ended)
    return seen


def _earlier(earlier: Paths, at: Indices, later: Paths, to: Indices, ended: bool) -> Mask:
    rows = np.arange(len(at))
    counted = earlier.seq[rows, at] < later.seq[rows, to]
    if not ended:
        return counted
    began = later.start[rows, to]
    return counted & ((earlier.end[rows, at] <= began) | (earlier.start[rows, at] > began))


def _wide(paths: Paths, rows: Indices, width: int) -> Paths:
    more = width - paths.process.shape[1]
    taken = paths.take(rows)
    if not more:
        return taken
    return Paths(*(np.pad(part, ((0, 0), (0, more)), constant_values=-1) for part in (taken.process, taken.seq, taken.start, taken.end)))
