"""Families of spans that tell of calls: which of them are calls, and which span speaks for which.

In: the spans of calls, each linked to the nearest one that it lies directly inside of. Out: the calls of each family, by the rules of
`join`. Invariant: every family without the gateway's span has at least one call, unless others tell of it.

Numbers here are of the spans of calls alone; the number one past them stands for none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from transition_builder.calls import span_matching
from transition_builder.calls.lineage import Forest, Indices, Mask


@dataclass(frozen=True, slots=True)
class Families:
    """Spans of calls."""

    node: Indices
    """The node of each."""
    number: Indices
    """The number of each node, and of the one above all."""
    tree: Forest
    """Over numbers."""
    is_gateway: Mask
    client: Mask
    model: Mask
    suspect: Mask
    roots: Indices
    """The outermost span of each one's family."""
    above_gateway: Mask
    """Whether one of the gateway's spans lies below."""
    below_gateway: Mask
    """Whether it lies below one."""

    @classmethod
    def of(cls, node: Indices, number: Indices, tree: Forest, gateway: Mask, client: Mask, model: Mask, suspect: Mask) -> Families:
        """Derive the rest; every span of a call is one of gateway, client, model and suspect, or the engine's."""
        roots = tree.topmost(np.ones(tree.size, dtype=np.bool_))[: tree.size]
        below = tree.nearest(gateway)[tree.parent[: tree.size]] != tree.size
        return cls(node, number, tree, gateway, client, model, suspect, roots, tree.above(gateway), below)

    def linked(self, lower: Indices, upper: Indices) -> Families:
        """The same with some families below others."""
        tree = self.tree.with_parents(lower, upper)
        return Families.of(self.node, self.number, tree, self.is_gateway, self.client, self.model, self.suspect)

    @property
    def tops(self) -> Mask:
        """Which are the outermost of their families."""
        return self.tree.parent[: self.tree.size] == self.tree.size

    @property
    def distance(self) -> Indices:
        """How far each is from the wire, as `twins` counts."""
        kinds = [self.is_gateway, self.client, self.model, self.suspect]
        return np.select(
            kinds, [span_matching.GATEWAY, span_matching.CLIENT, span_matching.FRAMEWORK, span_matching.REQUEST], span_matching.ENGINE
        )

    def innermost(self, tops: Indices, places: Callable[[Indices], list[tuple[str, int, str]]]) -> Indices:
        """Of each of these families the innermost client, else framework's span, else the outermost of all.

        Args:
            tops: the outermost span of each.
            places: where spans of calls began; of several that are as deep the first is taken.
        """
        found = list[int]()
        for top in tops.tolist():
            members = np.flatnonzero(self.roots == top)
            for kind in (self.client, self.model):
                some = members[kind[members]]
                if len(some):
                    deepest = some[self.tree.depth[some] == self.tree.depth[some].max()]
                    found.append(int(min(zip(places(deepest), deepest, strict=True))[1]) if len(deepest) > 1 else int(deepest[0]))
                    break
            else:
                found.append(top)
        return np.array(found, dtype=np.int64)

    def inside(self, tree: Forest, tops: Indices) -> dict[int, frozenset[int]]:
        """The families (their outermost spans) in whose spans others lie, whatever stands between; `tree` is over nodes."""
        call_like = np.zeros(tree.size, dtype=np.bool_)
        call_like[self.node] = True
        above = np.append(self.number[tree.nearest(call_like)[tree.parent[self.node]]], self.tree.size)
        found = dict[int, frozenset[int]]()
        for top in tops[above[tops] != self.tree.size].tolist():
            around, at = set[int](), int(above[top])
            while at != self.tree.size:
                around.add(int(self.roots[at]))
                at = int(above[self.roots[at]])
            found[top] = frozenset(around)
        return found

    def speaker(self, spans: Indices) -> Indices:
        """The nearest client above each, else the nearest framework's span."""
        client = self.tree.nearest(self.client)[spans]
        return np.where(client != self.tree.size, client, self.tree.nearest(self.model)[spans])

    def calls(self, told: Mask, holders: Mask) -> tuple[Indices, Indices]:
        """Calls of families without the gateway: the innermost span of each, and the one that names it.

        Args:
            told: the outermost spans of families that are no calls of their own.
            holders: which spans hold token ids.
        """
        size, tree = self.tree.size, self.tree
        free = ~(self.is_gateway | self.above_gateway | self.below_gateway | told[self.roots])
        if not free.any():
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        under_client = tree.nearest(self.client)[tree.parent[:size]] != size
        clients = free & self.client & ~tree.above(self.client)
        models = free & self.model & ~tree.above(self.client | self.model) & ~under_client
        others = free & ~self.client & ~self.model & self.tops
        engines = others & ~self.suspect
        # A request that nobody recognises, above or below.
        suspects = others & self.suspect & ~tree.above(~self.suspect)
        wrapped = free & ~self.client & ~self.model & ~self.suspect & ~self.tops & self.suspect[self.roots]
        # An engine's span below a bare request is the call.
        engines |= wrapped & ~tree.above(self.client | self.model) & (self.tree.depth[:size] == 2)
        wire = np.flatnonzero(clients | models | engines | suspects)
        return wire, self._named(wire, holders)

    def _named(self, wire: Indices, holders: Mask) -> Indices:
        """The innermost span with token ids of those that tell of each call alone; the innermost span where none has any."""
        named = wire.copy()
        if not holders.any() or holders[wire].all():
            return named
        many = np.zeros(self.tree.size + 1, dtype=np.int64)
        at = wire.copy()
        while (at != self.tree.size).any():
            np.add.at(many, at, 1)
            at = self.tree.parent[at]
        alone = np.append(holders & (many[: self.tree.size] == 1), False)
        at, found = wire.copy(), holders[wire]
        while (~found & (at != self.tree.size)).any():
            at = np.where(found, at, self.tree.parent[at])
            now = alone[at] & ~found
            named[now] = at[now]
            found = found | now
        return named

    def tried(self, calls: Indices) -> Indices:
        """The outermost client above each call (or the call itself) of which it is one of several tries; none: no such."""
        heads = self.tree.topmost(self.client)[calls]
        inner = self.is_gateway[calls] & self.below_gateway[calls]
        heads = np.where(inner, self.tree.size, heads)
        many = np.bincount(np.unique(np.stack([heads, calls]), axis=1)[0], minlength=self.tree.size + 1)
        return np.where((heads != self.tree.size) & (many[heads] > 1), heads, self.tree.size)

    def chained(self, calls: Indices) -> Indices:
        """The gateway's span above each of the gateway's spans; none where there is none."""
        return np.where(self.is_gateway[calls], self.tree.nearest(self.is_gateway)[self.tree.parent[calls]], self.tree.size)

    def owners(self, calls: Indices, retried: Mask, when: Indices) -> Indices:
        """The call that each span tells of: above calls the last one (`when`: their places) that was used; below one, it."""
        size = self.tree.size
        owner = np.full(size + 1, size, dtype=np.int64)
        order = np.lexsort((calls, when, -self.tree.depth[calls], ~retried))
        at = calls[order]
        names = at.copy()
        while len(at):
            owner[at] = names
            at = self.tree.parent[at]
            on = at != size
            at, names = at[on], names[on]
        owner[calls] = calls
        return owner[self.tree.nearest((owner != size)[:size])][:size]
