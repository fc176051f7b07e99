"""Call groups: linked spans that describe the same calls, and the calls among them.

In: the spans of calls, each linked to the nearest one that it lies directly inside of. Out: the calls of each group, by the rules of
`join`. Invariant: every group without a gateway span has at least one call, unless another group covers it.

Numbers here count the spans of calls only; the number one past them stands for none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from transition_builder.calls import span_matching
from transition_builder.calls.lineage import Forest, Indices, Mask


@dataclass(frozen=True, slots=True)
class CallGroups:
    """Spans of calls, linked to call groups."""

    node: Indices
    """Node of each span."""
    number: Indices
    """Number of each node, and of the virtual root."""
    tree: Forest
    """Forest over the numbers."""
    is_gateway: Mask
    client: Mask
    model: Mask
    suspect: Mask
    roots: Indices
    """Outermost span of each span's call group."""
    above_gateway: Mask
    """True where a gateway span lies below the span."""
    below_gateway: Mask
    """True where the span lies below a gateway span."""

    @classmethod
    def of(cls, node: Indices, number: Indices, tree: Forest, gateway: Mask, client: Mask, model: Mask, suspect: Mask) -> CallGroups:
        """Derive the other fields; every span of a call is one of gateway, client, model and suspect, or the engine's."""
        roots = tree.topmost(np.ones(tree.size, dtype=np.bool_))[: tree.size]
        below = tree.nearest(gateway)[tree.parent[: tree.size]] != tree.size
        return cls(node, number, tree, gateway, client, model, suspect, roots, tree.above(gateway), below)

    def linked(self, lower: Indices, upper: Indices) -> CallGroups:
        """Return the same spans with some call groups hung below others."""
        tree = self.tree.with_parents(lower, upper)
        return CallGroups.of(self.node, self.number, tree, self.is_gateway, self.client, self.model, self.suspect)

    @property
    def tops(self) -> Mask:
        """Return a mask of the outermost spans of call groups."""
        return self.tree.parent[: self.tree.size] == self.tree.size

    @property
    def distance(self) -> Indices:
        """Return the distance of each span from the wire, in the ranks of `span_matching`."""
        kinds = [self.is_gateway, self.client, self.model, self.suspect]
        return np.select(
            kinds, [span_matching.GATEWAY, span_matching.CLIENT, span_matching.FRAMEWORK, span_matching.REQUEST], span_matching.ENGINE
        )

    def innermost(self, tops: Indices, places: Callable[[Indices], list[tuple[str, int, str]]]) -> Indices:
        """Return the innermost client span of each group, else the innermost framework span, else the outermost span.

        Args:
            tops: the outermost span of each group.
            places: function that returns where spans of calls began; of several at the same depth the first is taken.
        """
        innermost_spans = list[int]()
        for top in tops.tolist():
            members = np.flatnonzero(self.roots == top)
            for kind in (self.client, self.model):
                of_kind = members[kind[members]]
                if len(of_kind):
                    deepest = of_kind[self.tree.depth[of_kind] == self.tree.depth[of_kind].max()]
                    innermost_spans.append(int(min(zip(places(deepest), deepest, strict=True))[1]) if len(deepest) > 1 else int(deepest[0]))
                    break
            else:
                innermost_spans.append(top)
        return np.array(innermost_spans, dtype=np.int64)

    def inside(self, tree: Forest, tops: Indices) -> dict[int, frozenset[int]]:
        """Return the groups (their outermost spans) that each group lies in, whatever stands between; `tree` is over nodes."""
        call_like = np.zeros(tree.size, dtype=np.bool_)
        call_like[self.node] = True
        above = np.append(self.number[tree.nearest(call_like)[tree.parent[self.node]]], self.tree.size)
        enclosing = dict[int, frozenset[int]]()
        for top in tops[above[tops] != self.tree.size].tolist():
            around, at = set[int](), int(above[top])
            while at != self.tree.size:
                around.add(int(self.roots[at]))
                at = int(above[self.roots[at]])
            enclosing[top] = frozenset(around)
        return enclosing

    def speaker(self, spans: Indices) -> Indices:
        """Return the nearest client span above each span, else the nearest framework span."""
        client = self.tree.nearest(self.client)[spans]
        return np.where(client != self.tree.size, client, self.tree.nearest(self.model)[spans])

    def calls(self, absorbed: Mask, holders: Mask) -> tuple[Indices, Indices]:
        """Return the calls of groups without the gateway: the innermost span of each, and the one that names it.

        Args:
            absorbed: the outermost spans of groups that are no calls of their own.
            holders: mask of the spans that hold token ids.
        """
        size, tree = self.tree.size, self.tree
        free = ~(self.is_gateway | self.above_gateway | self.below_gateway | absorbed[self.roots])
        if not free.any():
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        under_client = tree.nearest(self.client)[tree.parent[:size]] != size
        clients = free & self.client & ~tree.above(self.client)
        models = free & self.model & ~tree.above(self.client | self.model) & ~under_client
        others = free & ~self.client & ~self.model & self.tops
        engines = others & ~self.suspect
        # A request without a recognised span above or below.
        suspects = others & self.suspect & ~tree.above(~self.suspect)
        wrapped = free & ~self.client & ~self.model & ~self.suspect & ~self.tops & self.suspect[self.roots]
        # An engine's span below a bare request is the call.
        engines |= wrapped & ~tree.above(self.client | self.model) & (self.tree.depth[:size] == 2)
        wire = np.flatnonzero(clients | models | engines | suspects)
        return wire, self._named(wire, holders)

    def _named(self, wire: Indices, holders: Mask) -> Indices:
        """Return the innermost span with token ids among those of one call only; the innermost span where none has any."""
        named = wire.copy()
        if not holders.any() or holders[wire].all():
            return named
        many = np.zeros(self.tree.size + 1, dtype=np.int64)
        at = wire.copy()
        while (at != self.tree.size).any():
            np.add.at(many, at, 1)
            at = self.tree.parent[at]
        alone = np.append(holders & (many[: self.tree.size] == 1), False)
        at, is_named = wire.copy(), holders[wire]
        while (~is_named & (at != self.tree.size)).any():
            at = np.where(is_named, at, self.tree.parent[at])
            now = alone[at] & ~is_named
            named[now] = at[now]
            is_named = is_named | now
        return named

    def tried(self, calls: Indices) -> Indices:
        """Return the outermost client span above each call (or the call itself) of which it is one of several retries; size: none."""
        heads = self.tree.topmost(self.client)[calls]
        inner = self.is_gateway[calls] & self.below_gateway[calls]
        heads = np.where(inner, self.tree.size, heads)
        many = np.bincount(np.unique(np.stack([heads, calls]), axis=1)[0], minlength=self.tree.size + 1)
        return np.where((heads != self.tree.size) & (many[heads] > 1), heads, self.tree.size)

    def chained(self, calls: Indices) -> Indices:
        """Return the gateway span above each gateway span; size where there is none."""
        return np.where(self.is_gateway[calls], self.tree.nearest(self.is_gateway)[self.tree.parent[calls]], self.tree.size)

    def owners(self, calls: Indices, retried: Mask, when: Indices) -> Indices:
        """Return the call that each span belongs to: above calls the last used one (`when`: their places); below a call, that one."""
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
