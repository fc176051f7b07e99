"""The spans of a rollout as a tree.

In: spans of the `Record` of one rollout. Out: the children of each span, in order. Invariant: every span occurs once below its parent,
however often it was delivered; spans are ordered by parent links and by the sequence numbers of each process, never by comparing two
clocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from spangrad.store.rollout.record import Span

Key = tuple[str, str]
"""Trace id and span id of a span."""


def children(spans: Mapping[Key, Span]) -> Mapping[Key | None, Sequence[Span]]:
    """Return the children of each span, in order; those of None are at the top: the root spans of the attempts, above all."""
    parents = {key: _parent(span, spans) for key, span in spans.items()}
    below = defaultdict[Key | None, list[Span]](list)
    for key, span in spans.items():
        below[parents[key] if _has_acyclic_parent(key, parents) else None].append(span)
    for key, siblings in below.items():
        siblings.sort(key=lambda span, parent=spans[key] if key else None: _order(span, parent))
    return below


def _parent(span: Span, spans: Mapping[Key, Span]) -> Key | None:
    """Return the span to place this one under: its parent, else the root of its trace or attempt, else none."""
    if (span.trace, span.parent) in spans:
        return span.trace, span.parent
    if span.is_root:
        return None
    roots = [root for root in spans.values() if root.is_root and root.attempt == span.attempt]
    nearest = min(roots, key=lambda root: (root.trace != span.trace, root.key), default=None)
    return nearest.key if nearest else None


def _has_acyclic_parent(key: Key, parents: Mapping[Key, Key | None]) -> bool:
    """Return False for a span that is its own ancestor: it is placed at the top of the tree instead of under its parent."""
    seen = {key}
    above = parents[key]
    while above is not None:
        if above in seen:
            return above != key
        seen.add(above)
        above = parents[above]
    return True


def _order(span: Span, parent: Span | None) -> tuple[object, ...]:
    """Return a sort key: by attempt, spans of the parent's process before others, then in the order of each process."""
    foreign = parent is None or span.counted_by != parent.counted_by
    return span.attempt, not span.is_root, foreign, span.counted_by, span.place, span.key
