"""Span matching: unlinked spans that describe the same call.

In: call groups (each linked group of spans is one `CallSpans`) of one attempt. Out: the group that each hangs below, and the groups that
are absorbed by others without a definite match. Invariant: nothing depends on the order in which groups are given; a group is hung below
one other at most.

A group goes below another, in whose spans it does not lie, that is further from the wire (framework above client above HTTP request
above gateway and engine), or below one of another convention at the same distance (two instrumentations side by side), where the first of
these holds:

1. they name the same response id;
2. the lower is the gateway's, and their answers' token ids are equal, in the order of each where several have the same;
3. in one process the upper began before the lower, and had not ended when the lower began; models, token counts, response ids and token
   ids agree as far as both have them (a framework or client without an end time counts as not ended, but not for bare
   requests). Of several uppers one with equal token counts goes first, then one that has nothing below it yet, then the earliest. Two of
   the same distance must both have equal token counts;
4. model and token counts are those of a call that the gateway recorded, and as many others have the same as the gateway recorded.

A remaining group is no call of its own (`absorbed`) where, in an attempt that the gateway recorded, it ended in an error, or an unmatched
call of the gateway remains for it; where another group of its process began inside it, or may have (its end is
not known); and, for an engine's span, where a call remains that has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

ENGINE, GATEWAY, REQUEST, CLIENT, FRAMEWORK = range(5)
"""Distances from the wire."""


@dataclass(frozen=True, slots=True)
class CallSpans:
    """Linked group of spans of a call."""

    name: int
    """Unique number of the group."""
    top: int
    """Distance of its outermost span from the wire."""
    bottom: int
    """Distance of its innermost span from the wire; HTTP requests and engines count only where there is nothing else."""
    place: tuple[str, int, str]
    """Process, sequence number or time there, span id: where its outermost span began."""
    start: int
    end: int
    """Start and end by its process's clock, in nanoseconds; equal where the end is not known."""
    convention: str
    failed: bool
    engine: bool
    """True if an engine's span is in the group."""
    responses: frozenset[str] = frozenset()
    ids: frozenset[tuple[bytes, bytes]] = frozenset()
    """Token ids of prompt and response."""
    model: str | None = None
    tokens: tuple[int, int] | None = None
    """Numbers of tokens of prompt and response."""
    inside: frozenset[int] = frozenset()
    """Groups in whose spans it lies, with an agent or a tool between."""


@dataclass(frozen=True, slots=True)
class Paired:
    """Result of matching groups, by their names: the group that each hangs below, and groups that are no calls of their own."""

    below: dict[int, int]
    absorbed: frozenset[int]


def pair(groups: Iterable[CallSpans]) -> Paired:
    """Match the call groups of one attempt."""
    ordered = sorted(groups, key=lambda group: (group.place, group.name))
    below = dict[int, int]()
    for lower, upper in _by_response(ordered):
        _hang(below, lower, upper)
    for lower, upper in _by_ids([group for group in ordered if group.name not in below and group.name not in below.values()]):
        _hang(below, lower, upper)
    for lower in ordered:
        if lower.name not in below and (upper := _around(lower, ordered, below)) is not None:
            _hang(below, lower, upper)
    for lower, upper in _by_tokens([group for group in ordered if group.name not in below and group.name not in below.values()], below):
        _hang(below, lower, upper)
    return Paired(below, frozenset(_absorbed(ordered, below)))


def _hang(below: dict[int, int], lower: CallSpans, upper: CallSpans) -> None:
    above = upper.name
    while above in below and above != lower.name:
        above = below[above]
    if lower.name not in below and above != lower.name:
        below[lower.name] = upper.name


def _fits(lower: CallSpans, upper: CallSpans) -> bool:
    """Return whether a group may hang below another."""
    if lower is upper or upper.name in lower.inside:
        return False
    beside = (
        upper.bottom == lower.top >= CLIENT
        and upper.convention != lower.convention
        and (lower.place, lower.name) > (upper.place, upper.name)
    )
    return upper.bottom >= CLIENT and (lower.top < upper.bottom or beside)


def _by_response(groups: Sequence[CallSpans]) -> Iterator[tuple[CallSpans, CallSpans]]:
    """Yield pairs that name one response: each with the nearest one further from the wire."""
    sharing = dict[str, list[CallSpans]]()
    for group in groups:
        for response in sorted(group.responses):
            sharing.setdefault(response, []).append(group)
    for together in sharing.values():
        for lower in together if len(together) > 1 else []:
            uppers = [upper for upper in together if _fits(lower, upper)]
            if uppers:
                yield lower, min(uppers, key=lambda group: group.bottom)


def _by_ids(groups: Sequence[CallSpans]) -> Iterator[tuple[CallSpans, CallSpans]]:
    """Yield gateway calls and groups whose answers have the same token ids and name no other response."""
    unmatched = [group for group in groups if group.bottom >= CLIENT and group.ids]
    for lower in [group for group in groups if group.top <= REQUEST and group.bottom == GATEWAY and group.ids] if unmatched else []:
        upper = next((group for group in unmatched if group.ids == lower.ids and _same(group.responses, lower.responses)), None)
        if upper is not None:
            unmatched.remove(upper)
            yield lower, upper


def _same(left: frozenset[object], right: frozenset[object]) -> bool:
    """Return whether two sets may be of one call: one of them is empty, or they share something."""
    return not left or not right or not left.isdisjoint(right)


def _around(lower: CallSpans, groups: Sequence[CallSpans], below: dict[int, int]) -> CallSpans | None:
    """Return the group of the same process in which another began."""
    taken = set(below.values())
    candidates = list[CallSpans]()
    for upper in groups:
        if upper.place >= lower.place:
            break
        if _fits(lower, upper) and _began_inside(lower, upper) and _agree(lower, upper):
            candidates.append(upper)
    equal = [group for group in candidates if group.tokens is not None and group.tokens == lower.tokens]
    beside = [group for group in equal if group.bottom == lower.top]
    candidates = [group for group in candidates if group.bottom != lower.top] or beside
    if not candidates:
        return None
    return min(
        candidates,
        key=lambda group: (
            group.bottom,
            group not in equal,
            group.name in taken,
            group.place if group.name not in taken else _latest_first(group),
        ),
    )


def _latest_first(group: CallSpans) -> tuple[str, int, str]:
    # Where all have something below them already, it is a further retry of the one that began last.
    return (group.place[0], -group.place[1], group.place[2])


def _began_inside(lower: CallSpans, upper: CallSpans) -> bool:
    if upper.name in lower.inside or lower.place[0] != upper.place[0] or upper.place[1] >= lower.place[1]:
        return False
    if upper.end == upper.start:
        return lower.top != REQUEST
    return lower.start <= upper.end


def _agree(left: CallSpans, right: CallSpans) -> bool:
    tokens = left.tokens is None or right.tokens is None or left.tokens == right.tokens
    return tokens and _same_model(left.model, right.model) and _same(left.responses, right.responses) and _same(left.ids, right.ids)


def _same_model(left: str | None, right: str | None) -> bool:
    if not left or not right:
        return True
    # A router's prefix (openai/gpt), a dated name for an undated one.
    short, long = sorted((left.rsplit("/", 1)[-1], right.rsplit("/", 1)[-1]), key=len)
    return long.startswith(short)


def _by_tokens(groups: Sequence[CallSpans], below: dict[int, int]) -> Iterator[tuple[CallSpans, CallSpans]]:
    """Yield gateway calls and groups with the same token counts, in the order of each."""
    for tokens in sorted({group.tokens for group in groups if group.top == GATEWAY and group.tokens is not None}):
        recorded = [group for group in groups if group.top == GATEWAY and group.tokens == tokens]
        uppers = [group for group in groups if group.bottom >= CLIENT and group.tokens == tokens and group.name not in below]
        for bottom in (CLIENT, FRAMEWORK):
            uppers_at_bottom = [group for group in uppers if group.bottom == bottom]
            one_clock = len({group.place[0] for group in uppers_at_bottom}) == 1 == len({group.place[0] for group in recorded})
            if (
                len(uppers_at_bottom) == len(recorded)
                and one_clock
                and all(_same_model(group.model, recorded[0].model) for group in uppers_at_bottom)
            ):
                yield from zip(recorded, uppers_at_bottom, strict=True)
                break


def _absorbed(groups: Sequence[CallSpans], below: dict[int, int]) -> Iterator[int]:
    """Yield the names of groups that are no calls of their own."""
    taken = set(below.values())
    gateway = any(group.bottom == GATEWAY for group in groups)
    # Calls of the gateway without a match.
    unmatched = [group for group in groups if group.bottom == GATEWAY and group.top <= REQUEST and group.name not in below]
    loose = [group for group in groups if group.bottom >= REQUEST and group.name not in below and group.name not in taken]
    for group in sorted(loose, key=lambda group: (abs(group.bottom - CLIENT), group.bottom, group.place, group.name)):
        if gateway and group.failed:
            yield group.name
        elif matches := [call for call in unmatched if _agree(group, call)]:
            unmatched.remove(matches[0])
            yield group.name
        elif group.bottom == FRAMEWORK and any(
            other.top in (CLIENT, REQUEST) and _began_inside(other, group) if group.end > group.start else _of_client(other, group)
            for other in groups
        ):
            yield group.name
    without = [group for group in groups if group.bottom > ENGINE and not group.engine and group.name not in below]
    for group in groups:
        if group.bottom == ENGINE and group.name not in below and (matches := [call for call in without if _agree(group, call)]):
            without.remove(matches[0])
            yield group.name


def _of_client(other: CallSpans, group: CallSpans) -> bool:
    return other.top == CLIENT and other.place[0] == group.place[0] and group.name not in other.inside
