"""Call groups: linked spans that describe the same calls, and the calls among them.

Invariant: every group without a gateway span has at least one call, unless another group covers it; every span of a call is part of one.

Spans of calls that lie directly inside each other (no agent's and no tool's span between) are one group: the framework's above the
client's above the HTTP request's above the gateway's and the engine's, often with one or two missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from transition_builder.calls.forest import Indices, Mask, SpanForest

ENGINE, GATEWAY, REQUEST, CLIENT, FRAMEWORK = range(5)
"""Distances from the wire. A request of an unknown convention is a REQUEST."""
_NOT_OF_CALL = -1


@dataclass(frozen=True)
class CallGroups:
    """Call groups as a forest over all spans, in which only those of calls are linked."""

    tree: SpanForest
    distance: Indices
    """Distance of each span from the wire."""
    absorbed: Mask
    """Outermost spans of groups that are no calls of their own."""

    @classmethod
    def of(cls, nodes: pl.DataFrame, forest: SpanForest, recorded: Indices) -> CallGroups:
        """Link the spans of calls; `recorded` are the gateway's."""
        kinds = nodes.select("IsClient", "IsModel", "IsEngine", "IsSuspect", "IsTool", pl.col("AgentName").is_not_null())
        *calls, tool, agent = (kind.to_numpy() for kind in kinds)
        distances = [GATEWAY, CLIENT, FRAMEWORK, ENGINE, REQUEST]
        distance = np.select([forest.mask(recorded), *calls], distances, _NOT_OF_CALL)
        member = distance != _NOT_OF_CALL
        above = forest.enclosing(member | tool | agent)[:-1]
        tree = SpanForest.of(np.where(member & np.append(member, False)[above], above, forest.size))
        return cls(tree, distance, np.zeros(forest.size, dtype=np.bool_))

    @cached_property
    def member(self) -> Mask:
        """Return a mask of the spans of calls."""
        return self.distance != _NOT_OF_CALL

    @cached_property
    def roots(self) -> Indices:
        """Return the outermost span of each span's group; the forest's size for those of no call."""
        return self.tree.outermost(self.member)

    @cached_property
    def clients(self) -> Indices:
        """Return the outermost client span above each span, or the span itself; the forest's size where there is none."""
        return self.tree.outermost(self.distance == CLIENT)

    def outermost(self, calls: Indices) -> Indices:
        """Return the outermost span of each call: that of its group, but no framework span around several calls; retries are one."""
        heads = self.tree.outermost(self.member & (self.distance != FRAMEWORK))[calls]
        heads = np.unique(np.where(heads == self.tree.size, calls, heads))
        several = (self.distance == FRAMEWORK) & (self.tree.count_below(heads) > 1)
        return self.tree.outermost(self.member & ~several)[calls]

    @property
    def tops(self) -> Mask:
        """Return a mask of the outermost spans of groups."""
        return self.member & (self.tree.depth[:-1] == 1)

    def _below(self, kind: Mask) -> Mask:
        return self.tree.enclosing(kind)[:-1] != self.tree.size

    def calls(self) -> Indices:
        """Return the innermost span of each call without the gateway.

        Each innermost client span is a call, else each innermost framework span, else the engine's, else the outermost suspect.
        """
        engine, gateway, suspect, client, framework = (self.distance == kind for kind in range(5))
        above_asked = self.tree.above(client | framework)
        clients = client & ~self.tree.above(client)
        frameworks = framework & ~above_asked & ~self._below(client)
        # An engine's span directly below a bare request is the call.
        below_suspect = np.append(suspect, False)[self.roots[:-1]] & (self.tree.depth[:-1] == 2) & ~above_asked
        engines = engine & (self.tops | below_suspect)
        suspects = suspect & self.tops & ~self.tree.above(self.member & ~suspect)
        covered = self.tree.above(gateway) | self._below(gateway) | np.append(self.absorbed, False)[self.roots[:-1]]
        return np.flatnonzero((clients | frameworks | engines | suspects) & ~covered)

    def id_spans(self, innermost: Indices, holds_ids: Mask) -> Indices:
        """Return the span that names each call: the innermost with token ids among those of this call alone, else the innermost."""
        alone = self.tree.nearest(holds_ids & (self.tree.count_below(innermost) == 1))[innermost]
        return np.where(holds_ids[innermost] | (alone == self.tree.size), innermost, alone)

    def representatives(self, spans: Indices) -> Indices:
        """Return the nearest client span above each span, else the nearest framework span."""
        client, framework = (self.tree.nearest(self.distance == kind)[spans] for kind in (CLIENT, FRAMEWORK))
        return np.where(client != self.tree.size, client, framework)

    def retried(self, calls: Indices) -> Indices:
        """Return the outermost client span above each call (or the call itself) of which it is one of several retries; size: none."""
        heads = np.where(self.chained(calls) != self.tree.size, self.tree.size, self.clients[calls])
        several = np.bincount(heads, minlength=self.tree.size + 1) > 1
        return np.where(several[heads], heads, self.tree.size)

    def chained(self, calls: Indices) -> Indices:
        """Return the gateway span above each gateway span; size where there is none."""
        gateway = self.distance == GATEWAY
        return np.where(gateway[calls], self.tree.enclosing(gateway)[calls], self.tree.size)

    def owners(self, calls: Indices, used: Mask) -> Indices:
        """Return the call that each span belongs to: above calls (which are in order) the last used one; below a call, that one."""
        owner = np.full(self.tree.size + 1, self.tree.size, dtype=np.int64)
        names = at = np.append(calls[~used], calls[used])
        while len(at):
            owner[at] = names
            at = self.tree.parent[at]
            names, at = names[at != self.tree.size], at[at != self.tree.size]
        owner[calls] = calls
        return owner[self.tree.nearest(owner[:-1] != self.tree.size)]
