"""Which call came before a thing that happened: the one definition behind branches and the causes of tool calls.

In: the forest of all spans, and the spans of calls and tools. Out: for any of them the call that led to it. Invariant: only what one
process itself saw end before, or count before, comes before; clocks of two processes are never compared.

Call D *came before* X, where

- D gave something to act upon: it did not fail, it is no try that was not used, and it is no duplicate;
- where their paths (`lineage`) first differ inside one process, that process counted D's span before X's and, by its own clock, D's span
  had ended when X's began (a clock that contradicts the count is not believed). The span of a call is its outermost one in the
  process: the framework's before the client's before the HTTP request's. Where one of them came straight to the gateway that took
  both, the gateway's count and clock tell instead;
- D does not lie inside a tool call that X does not lie in.

Of several, the first of these that tells them apart decides:

1. the innermost agent that X lies in and D belongs to (an agent's span; spans of one name directly inside each other are one);
2. D belongs to another span of X's own agent: the same name, inside the same agent;
3. the nearest common ancestor;
4. the latest.

A call whose span encloses X is X's, whatever else came before, unless `lineage` has it later.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from transition_builder.calls.lineage import Clocks, Forest, Indices, Mask, Paths

NOBODY = -1
"""In place of a call: none came before."""
_ENCLOSING = 3
_NAMESAKE = 2
_OTHER = 1
_WEIGHT = 1 << 32
"""More than any depth: what the agents say goes before what the common ancestor says."""


@dataclass(frozen=True, slots=True)
class Things:
    """Calls or tool calls, a row each."""

    node: Indices
    """Their outermost spans."""
    attempt: Indices
    """The number of their attempt."""
    where: Paths
    agent: Indices
    """The span of the agent that they lie in; the forest's size where there is none."""
    tool: Indices
    """The tool call that they lie in; the same."""

    def take(self, rows: Indices) -> Things:
        """Some of them."""
        return Things(self.node[rows], self.attempt[rows], self.where.take(rows), self.agent[rows], self.tool[rows])


@dataclass(frozen=True, slots=True)
class Agents:
    """The agents and tools around spans; entries for all nodes and the one above them."""

    agent: Indices
    """The agent's span that each node lies in or is, the outermost of those that are one; the forest's size where there is none."""
    around: Indices
    """The agent in which a node's agent lies."""
    name: Indices
    """The number of its name."""
    tool: Indices
    """The tool call that each node lies in or is."""

    @classmethod
    def of(cls, nodes: pl.DataFrame, tree: Forest, call_like: Mask) -> Agents:
        """Find them; spans of calls (`call_like`) may name their agent, but are none."""
        size = tree.size
        names = nodes["AgentName"]
        is_agent = names.is_not_null().to_numpy() & ~call_like
        tools = tree.nearest(nodes["IsTool"].to_numpy())
        nearest = tree.nearest(is_agent)
        name = np.full(size + 1, -1, dtype=np.int64)
        if is_agent.any():
            some = names.filter(pl.Series(is_agent))
            name[:size][is_agent] = some.cast(pl.Enum(some.unique().sort())).to_physical().cast(pl.Int64).to_numpy()
        everybody = np.arange(size + 1)
        outside = nearest[tree.parent]
        one = (name >= 0) & (name[outside] == name) & (tools[outside] == tools)
        jump = np.where(one, outside, everybody)
        while not np.array_equal(further := jump[jump], jump):
            jump = further
        agent = jump[nearest]
        return cls(agent, agent[tree.parent[agent]], name, tools)

    def things(self, tree: Forest, said: Clocks, node: Indices, attempt: Indices, where: Paths) -> Things:
        """Things whose outermost spans are `node`, and whose own spans' paths are `where`."""
        above = tree.parent[node]
        return Things(node, attempt, _outermost(tree, said, node, where), self.agent[above], self.tool[above])


def _outermost(tree: Forest, said: Clocks, node: Indices, where: Paths) -> Paths:
    """The same paths, told by the outermost spans of the things in the processes that these belong to."""
    inside = tree.above_process(said.process[:-1])
    depth, above = np.zeros(len(node), dtype=np.int64), inside[node]
    while (above != tree.size).any():
        depth += above != tree.size
        above = inside[above]
    rows = np.arange(len(node))
    seq, start, end = where.seq.copy(), where.start.copy(), where.end.copy()
    seq[rows, depth], start[rows, depth], end[rows, depth] = said.seq[node], said.start[node], said.end[node]
    return Paths(where.process, seq, start, end)


@dataclass(frozen=True, slots=True)
class Past:
    """The calls of all attempts, in the order of attempts and of `lineage.order`, and how to find which of them came before."""

    tree: Forest
    agents: Agents
    calls: Things
    counts: Mask
    """Whether a call gave something to act upon."""
    first: Indices
    """Where each attempt's calls begin; one entry an attempt."""
    _crowd: Indices
    """For all nodes the nearest one among them and their ancestors with at least two things, calls or tools, at or below it."""
    _roof: Indices
    """The same with at least two calls."""
    _roof_of_tools: Indices
    """The same with at least one."""
    _enclosing: Indices
    """For all nodes the row of the call whose span is the nearest among them and their ancestors, NOBODY where there is none."""
    _earliest: Indices
    """For all nodes the first call that belongs to that agent."""
    _active: Indices
    """For all nodes the nearest agent among them and their ancestors that calls belong to."""

    @classmethod
    def of(cls, tree: Forest, agents: Agents, calls: Things, counts: Mask, attempts: int, tools: Indices) -> Past:
        """Over sorted calls; `tools` are the spans of tool calls whose causes will be asked for."""
        many = np.bincount(calls.attempt, minlength=attempts)
        below, both = _below(tree, calls.node), _below(tree, np.concatenate([calls.node, tools]))
        rows = np.arange(len(calls.node))
        earliest = np.full(tree.size + 1, len(rows), dtype=np.int64)
        np.minimum.at(earliest, calls.agent, rows)
        row = np.full(tree.size + 1, NOBODY, dtype=np.int64)
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
            row[tree.nearest((row != NOBODY)[: tree.size])],
            earliest,
            tree.nearest((earliest < len(rows))[: tree.size]),
        )

    def latest(self, things: Things, until: Indices, *, ended: bool) -> Indices:
        """The row of the call that came before each thing, or NOBODY.

        Args:
            things: any.
            until: how many of the calls (rows of `calls`) are to be looked at; those beyond certainly came later.
            ended: whether the call must have ended before (False, for tools: begun; one may run while the rest of an answer arrives).
        """
        best, score = self._enclosing[self.tree.parent[things.node]], np.full(len(until), -1, dtype=np.int64)
        best = np.where(best < until, best, NOBODY)
        first = self.first[things.attempt]
        enough = self._ceiling(things, until, self._roof if ended else self._roof_of_tools)
        active = np.flatnonzero((until > first) & (best == NOBODY))
        at = until[active] - 1
        while len(active):
            able = self.counts[at] & (self.calls.node[at] != things.node[active])
            rows, calls = active[able], at[able]
            before = _before(self.calls.where, calls, things.where, rows, ended)
            rows, calls = rows[before], calls[before]
            common = self._common(calls, things, rows)
            outside = self.tree.depth[self.calls.tool[calls]] <= common
            rows, calls, common = rows[outside], calls[outside], common[outside]
            found = self._kinship(calls, things, rows) * _WEIGHT + common
            better = found > score[rows]
            best[rows[better]], score[rows[better]] = calls[better], found[better]
            at = at - 1
            on = (at >= first[active]) & (score[active] < enough[active])
            active, at = active[on], at[on]
        return best

    def _ceiling(self, things: Things, until: Indices, roof: Indices) -> Indices:
        """No call can be nearer to a thing than this."""
        size, depth = self.tree.size, self.tree.depth
        own = self._active[things.agent]
        while (late := (own != size) & (self._earliest[own] >= until)).any():
            own = np.where(late, self._active[self.agents.around[own]], own)
        within = own != size
        named = np.where(things.agent != size, _NAMESAKE, _OTHER)
        return np.where(within, _ENCLOSING + depth[own], named) * _WEIGHT + depth[roof[things.node]]

    def _common(self, calls: Indices, things: Things, rows: Indices) -> Indices:
        """Depths of nearest common ancestors."""
        left, right = self.calls.node[calls], things.node[rows]
        crowd = self._crowd[right]
        # Were there another common ancestor below the one that they share here, it would be crowded as well.
        common = self.tree.depth[crowd]
        apart = self._crowd[left] != crowd
        common[apart] = self.tree.common_depth(left[apart], right[apart])
        return common

    def _kinship(self, calls: Indices, things: Things, rows: Indices) -> Indices:
        size, agents = self.tree.size, self.agents
        theirs, own = self.calls.agent[calls], things.agent[rows]
        real = (theirs != size) & (own != size)
        namesakes = real & (agents.name[theirs] == agents.name[own]) & (agents.around[theirs] == agents.around[own])
        kinship = np.where(namesakes, _NAMESAKE, _OTHER)
        enclosing = np.where(real, own, size)
        while (enclosing != size).any():
            kinship = np.where((enclosing == theirs) & real, _ENCLOSING + self.tree.depth[theirs], kinship)
            enclosing = np.where(enclosing == theirs, size, agents.around[enclosing])
        return kinship


def _below(tree: Forest, spans: Indices) -> Indices:
    """How many of the spans are at or below each node."""
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
    """Whether a process saw each call before each thing."""
    width = max(calls.process.shape[1], things.process.shape[1])
    one, other = _wide(calls, left, width), _wide(things, right, width)
    differ = (one.process != other.process) | (one.seq != other.seq)
    rows, at = np.arange(len(left)), np.argmax(differ, axis=1)
    same = one.process[rows, at] == other.process[rows, at]
    seen = differ[rows, at] & same & _earlier(one, at, other, at, ended)
    # One went through a process, the other came straight to the gateway that took both.
    one_leaf, other_leaf = one.length - 1, other.length - 1
    straight = ~same & ((one_leaf == at) | (other_leaf == at)) & (one.process[rows, one_leaf] == other.process[rows, other_leaf])
    if straight.any():
        seen |= straight & _earlier(one, one_leaf, other, other_leaf, ended)
    return seen


def _earlier(one: Paths, at: Indices, other: Paths, to: Indices, ended: bool) -> Mask:
    rows = np.arange(len(at))
    counted = one.seq[rows, at] < other.seq[rows, to]
    if not ended:
        return counted
    began = other.start[rows, to]
    return counted & ((one.end[rows, at] <= began) | (one.start[rows, at] > began))


def _wide(paths: Paths, rows: Indices, width: int) -> Paths:
    more = width - paths.process.shape[1]
    taken = paths.take(rows)
    if not more:
        return taken
    return Paths(*(np.pad(part, ((0, 0), (0, more)), constant_values=-1) for part in (taken.process, taken.seq, taken.start, taken.end)))
