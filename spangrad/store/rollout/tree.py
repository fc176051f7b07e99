"""The spans of a rollout as a tree.

In: spans of the `Record` of one rollout. Out: the children of each span, in order. Invariant: every span occurs once below its parent,
however often it was delivered; spans are ordered by parent links and by the sequence numbers of each process, never by comparing two
clocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import dropwhile

from spangrad.store.rollout.record import Span

Key = tuple[str, str]
"""Trace id and span id of a span."""
_ANY_TRACE = ""


def children(spans: Mapping[Key, Span]) -> Mapping[Key | None, Sequence[Span]]:
    """Return the children of each span, in order; those of None are at the top: the root spans of the attempts, above all."""
    roots = dict[tuple[int, str], Span]()
    for root in sorted((span for span in spans.values() if span.is_root), key=lambda span: span.key):
        for trace in (root.trace, _ANY_TRACE):
            roots.setdefault((root.attempt, trace), root)
    parents = {key: _parent(span, spans, roots) for key, span in spans.items()}
    cyclic = _cyclic(parents)
    below = defaultdict[Key | None, list[Span]](list)
    for key, span in spans.items():
        below[None if key in cyclic else parents[key]].append(span)
    for key, siblings in below.items():
        siblings.sort(key=lambda span, parent=spans[key] if key else None: _order(span, parent))
    return below


def _parent(span: Span, spans: Mapping[Key, Span], roots: Mapping[tuple[int, str], Span]) -> Key | None:
    """Return the span to place this one under: its parent, else the root of its trace or attempt, else none."""
    if (span.trace, span.parent) in spans:
        return span.trace, span.parent
    if span.is_root:
        return None
    nearest = roots.get((span.attempt, span.trace)) or roots.get((span.attempt, _ANY_TRACE))
    return nearest.key if nearest else None


def _cyclic(parents: Mapping[Key, Key | None]) -> set[Key]:
    """Return the spans that are their own ancestors: they are placed at the top of the tree instead of under their parents."""
    cyclic, followed = set[Key](), set[Key]()
    for key in parents:
        path, above = dict[Key, None](), key
        while above is not None and above not in path and above not in followed:
            path[above] = None
            above = parents[above]
        if above in path:
            cyclic.update(dropwhile(lambda ancestor, first=above: ancestor != first, path))
        followed.update(path)  # `|=` with the keys of a dict copies the set
    return cyclic


def _order(span: Span, parent: Span | None) -> tuple[object, ...]:
    """Return a sort key: by attempt, spans of the parent's process before others, then in the order of each process."""
    foreign = parent is None or span.counted_by != parent.counted_by
    return span.attempt, not span.is_root, foreign, span.counted_by, span.place, span.key
