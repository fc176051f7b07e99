"""Call groups: linked spans that describe the same calls, and the calls among them.

Invariant: every group without a gateway span has at least one call, unless another group covers it; every span of a call is part of one.

Spans of calls that lie directly inside each other (no agent's and no tool's span between) are one group: the framework's above the
client's above the HTTP request's above the gateway's and the engine's, often with one or two missing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import polars as pl

from transition_builder.calls.forest import Indices, Mask, SpanForest

ENGINE, GATEWAY, REQUEST, CLIENT, FRAMEWORK = range(5)
"""Distances from the wire."""


@dataclass(frozen=True)
class CallGroups:
    """Call groups as a forest over all spans, in which only those of calls are linked; all masks have an entry a node."""

    tree: SpanForest
    member: Mask
    """Spans of calls; each of them is one of the following, or the engine's."""
    gateway: Mask
    client: Mask
    framework: Mask
    suspect: Mask

    @classmethod
    def of(cls, nodes: pl.DataFrame, forest: SpanForest, recorded: Indices) -> CallGroups:
        """Link the spans of calls; `recorded` are the gateway's."""
        kinds = nodes.select("IsClient", "IsModel", "IsEngine", "IsSuspect", "IsTool", pl.col("AgentName").is_not_null())
        client, framework, engine, suspect, tool, agent = (kind.to_numpy() for kind in kinds)
        gateway = np.zeros(forest.size, dtype=np.bool_)
        gateway[recorded] = True
        member = client | framework | engine | suspect | gateway
        above = forest.nearest(member | tool | agent)[forest.parent[:-1]]
        tree = SpanForest.of(np.where(member & np.append(member, False)[above], above, forest.size))
        client, framework = client & ~gateway, framework & ~client & ~gateway
        return cls(tree, member, gateway, client, framework, suspect & ~(client | framework | engine | gateway))

    def with_parents(self, lower: Indices, upper: Indices) -> CallGroups:
        """Return the same spans with some groups hung below spans of others."""
        return replace(self, tree=self.tree.with_parents(lower, upper))

    @cached_property
    def roots(self) -> Indices:
        """Return the outermost span of each span's group; the forest's size for those of no call."""
        return self.tree.outermost(self.member)[:-1]

    @cached_property
    def above_gateway(self) -> Mask:
        """Return a mask of the spans with a gateway's below them."""
        return self.tree.above(self.gateway)

    @property
    def tops(self) -> Mask:
        """Return a mask of the outermost spans of groups."""
        return self.member & (self.tree.parent[:-1] == self.tree.size)

    @property
    def distance(self) -> Indices:
        """Return the distance of each span of a call from the wire."""
        return np.select([self.gateway, self.client, self.framework, self.suspect], [GATEWAY, CLIENT, FRAMEWORK, REQUEST], ENGINE)

    def _below(self, kind: Mask) -> Mask:
        return self.tree.nearest(kind)[self.tree.parent[:-1]] != self.tree.size

    def calls(self, absorbed: Mask) -> Indices:
        """Return the innermost span of each call without the gateway; `absorbed` marks the tops of groups that are no calls.

        Each innermost client span is a call, else each innermost framework span, else the engine's, else the outermost suspect.
        """
        asked = self.client | self.framework
        free = self.member & ~(self.gateway | self.above_gateway | self._below(self.gateway) | np.append(absorbed, False)[self.roots])
        clients = self.client & ~self.tree.above(self.client)
        frameworks = self.framework & ~self.tree.above(asked) & ~self._below(self.client)
        others = ~asked & self.tops
        suspects = others & self.suspect & ~self.tree.above(self.member & ~self.suspect)
        below_suspect = ~asked & ~self.suspect & ~self.tops & np.append(self.suspect, False)[self.roots]
        # An engine's span below a bare request is the call.
        engines = (others & ~self.suspect) | (below_suspect & ~self.tree.above(asked) & (self.tree.depth[:-1] == 2))
        return np.flatnonzero(free & (clients | frameworks | engines | suspects))

    def id_spans(self, innermost: Indices, holds_ids: Mask) -> Indices:
        """Return the span that names each call: the innermost with token ids among those of this call alone, else the innermost."""
        alone = self.tree.nearest(holds_ids & (self.tree.count_below(innermost) == 1))[innermost]
        return np.where(holds_ids[innermost] | (alone == self.tree.size), innermost, alone)

    def representatives(self, spans: Indices) -> Indices:
        """Return the nearest client span above each span, else the nearest framework span."""
        client = self.tree.nearest(self.client)[spans]
        return np.where(client != self.tree.size, client, self.tree.nearest(self.framework)[spans])

    def retried(self, calls: Indices) -> Indices:
        """Return the outermost client span above each call (or the call itself) of which it is one of several retries; size: none."""
        size = self.tree.size
        heads = np.where(self.gateway[calls] & self._below(self.gateway)[calls], size, self.tree.outermost(self.client)[calls])
        several = np.bincount(heads, minlength=size + 1) > 1
        return np.where(several[heads], heads, size)

    def chained(self, calls: Indices) -> Indices:
        """Return the gateway span above each gateway span; size where there is none."""
        return np.where(self.gateway[calls], self.tree.nearest(self.gateway)[self.tree.parent[calls]], self.tree.size)

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
