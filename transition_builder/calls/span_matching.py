"""Spans that tell of one call and are not linked: which goes with which.

In: families of call spans (each linked family is one `Kin`) of one attempt. Out: which family hangs below which, and which ones are told
of by others without it being clear by whom. Invariant: nothing depends on the order in which families are given; a family is hung below
one other at most.

A family goes below another, in whose spans it does not lie, that is further from the wire (framework above client above HTTP request
above gateway and engine), or below one of another convention at the same distance (two instrumentations side by side), where the first of
these holds:

1. they name the same response id;
2. the lower is the gateway's, and their answers' token ids are equal, in the order of each where several have the same;
3. in one process the upper began before the lower, and had not ended when the lower began; models, token counts, response ids and token
   ids agree as far as both say them (a framework or client that does not say when it ended is taken for one that had not, but not by bare
   requests). Of several uppers one with equal token counts goes first, then one that has nothing below it yet, then the earliest. Two of
   the same distance must both say equal token counts;
4. model and token counts are those of a call that the gateway recorded, and as many others say the same as the gateway recorded.

What is left over is no call of its own (`told`) where, in an attempt that the gateway recorded, it ended in an error, or calls of the
gateway remain that nobody else speaks for, as many as there are; where another family of its process began inside it, or may have (it
does not say when it ended); and, for an engine's span, where a call remains that has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

ENGINE, GATEWAY, REQUEST, CLIENT, FRAMEWORK = range(5)
"""Distances from the wire."""


@dataclass(frozen=True, slots=True)
class Kin:
    """A linked family of call spans."""

    name: int
    """Any number of its own."""
    top: int
    """How far its outermost span is from the wire."""
    bottom: int
    """How far its innermost one is; HTTP requests and engines count only where there is nothing else."""
    place: tuple[str, int, str]
    """Process, sequence number or time there, span id: where its outermost span began."""
    start: int
    end: int
    """By its process's clock, in nanoseconds; equal where it is not known when it ended."""
    convention: str
    failed: bool
    engine: bool
    """Whether an engine's span is among them."""
    responses: frozenset[str] = frozenset()
    ids: frozenset[tuple[bytes, bytes]] = frozenset()
    """Token ids of prompt and response."""
    model: str | None = None
    tokens: tuple[int, int] | None = None
    """Of prompt and response."""
    inside: frozenset[int] = frozenset()
    """The families in whose spans it lies, with an agent or a tool between."""


@dataclass(frozen=True, slots=True)
class Paired:
    """What became of them, by their names."""

    below: dict[int, int]
    told: frozenset[int]


def pair(kin: Iterable[Kin]) -> Paired:
    """Pair the families of one attempt."""
    some = sorted(kin, key=lambda one: (one.place, one.name))
    below = dict[int, int]()
    for lower, upper in _by_response(some):
        _hang(below, lower, upper)
    for lower, upper in _by_ids([one for one in some if one.name not in below and one.name not in below.values()]):
        _hang(below, lower, upper)
    for lower in some:
        if lower.name not in below and (upper := _around(lower, some, below)) is not None:
            _hang(below, lower, upper)
    for lower, upper in _by_tokens([one for one in some if one.name not in below and one.name not in below.values()], below):
        _hang(below, lower, upper)
    return Paired(below, frozenset(_told(some, below)))


def _hang(below: dict[int, int], lower: Kin, upper: Kin) -> None:
    above = upper.name
    while above in below and above != lower.name:
        above = below[above]
    if lower.name not in below and above != lower.name:
        below[lower.name] = upper.name


def _fits(lower: Kin, upper: Kin) -> bool:
    """Whether one may hang below the other."""
    if lower is upper or upper.name in lower.inside:
        return False
    beside = (
        upper.bottom == lower.top >= CLIENT
        and upper.convention != lower.convention
        and (lower.place, lower.name) > (upper.place, upper.name)
    )
    return upper.bottom >= CLIENT and (lower.top < upper.bottom or beside)


def _by_response(kin: Sequence[Kin]) -> Iterator[tuple[Kin, Kin]]:
    """Pairs that name one response: each with the nearest one further from the wire."""
    sharing = dict[str, list[Kin]]()
    for one in kin:
        for response in sorted(one.responses):
            sharing.setdefault(response, []).append(one)
    for together in sharing.values():
        for lower in together if len(together) > 1 else []:
            uppers = [upper for upper in together if _fits(lower, upper)]
            if uppers:
                yield lower, min(uppers, key=lambda one: one.bottom)


def _by_ids(kin: Sequence[Kin]) -> Iterator[tuple[Kin, Kin]]:
    """Calls of the gateway, and those whose answers have the same token ids and name no other response."""
    left = [one for one in kin if one.bottom >= CLIENT and one.ids]
    for lower in [one for one in kin if one.top <= REQUEST and one.bottom == GATEWAY and one.ids] if left else []:
        upper = next((one for one in left if one.ids == lower.ids and _same(one.responses, lower.responses)), None)
        if upper is not None:
            left.remove(upper)
            yield lower, upper


def _same(one: frozenset[object], other: frozenset[object]) -> bool:
    """Whether two sets may be of one call: each says nothing, or they share something."""
    return not one or not other or not one.isdisjoint(other)


def _around(lower: Kin, kin: Sequence[Kin], below: dict[int, int]) -> Kin | None:
    """The family of the same process in which one began."""
    taken = set(below.values())
    found = list[Kin]()
    for upper in kin:
        if upper.place >= lower.place:
            break
        if _fits(lower, upper) and _began_inside(lower, upper) and _agree(lower, upper):
            found.append(upper)
    equal = [one for one in found if one.tokens is not None and one.tokens == lower.tokens]
    beside = [one for one in equal if one.bottom == lower.top]
    found = [one for one in found if one.bottom != lower.top] or beside
    if not found:
        return None
    return min(found, key=lambda one: (one.bottom, one not in equal, one.name in taken, one.place if one.name not in taken else _late(one)))


def _late(one: Kin) -> tuple[str, int, str]:
    # Where all have something below them already, it is a further try of the one that began last.
    return (one.place[0], -one.place[1], one.place[2])


def _began_inside(lower: Kin, upper: Kin) -> bool:
    if upper.name in lower.inside or lower.place[0] != upper.place[0] or upper.place[1] >= lower.place[1]:
        return False
    if upper.end == upper.start:
        return lower.top != REQUEST
    return lower.start <= upper.end


def _agree(one: Kin, other: Kin) -> bool:
    tokens = one.tokens is None or other.tokens is None or one.tokens == other.tokens
    return tokens and _same_model(one.model, other.model) and _same(one.responses, other.responses) and _same(one.ids, other.ids)


def _same_model(one: str | None, other: str | None) -> bool:
    if not one or not other:
        return True
    # A router's prefix (openai/gpt), a dated name for an undated one.
    short, long = sorted((one.rsplit("/", 1)[-1], other.rsplit("/", 1)[-1]), key=len)
    return long.startswith(short)


def _by_tokens(kin: Sequence[Kin], below: dict[int, int]) -> Iterator[tuple[Kin, Kin]]:
    """Calls of the gateway, and those that say as many tokens, in the order of each."""
    for tokens in sorted({one.tokens for one in kin if one.top == GATEWAY and one.tokens is not None}):
        recorded = [one for one in kin if one.top == GATEWAY and one.tokens == tokens]
        uppers = [one for one in kin if one.bottom >= CLIENT and one.tokens == tokens and one.name not in below]
        for bottom in (CLIENT, FRAMEWORK):
            some = [one for one in uppers if one.bottom == bottom]
            one_clock = len({one.place[0] for one in some}) == 1 == len({one.place[0] for one in recorded})
            if len(some) == len(recorded) and one_clock and all(_same_model(one.model, recorded[0].model) for one in some):
                yield from zip(recorded, some, strict=True)
                break


def _told(kin: Sequence[Kin], below: dict[int, int]) -> Iterator[int]:
    """Families that are no calls of their own."""
    taken = set(below.values())
    gateway = any(one.bottom == GATEWAY for one in kin)
    # Calls of the gateway for which nobody speaks.
    left = [one for one in kin if one.bottom == GATEWAY and one.top <= REQUEST and one.name not in below]
    loose = [one for one in kin if one.bottom >= REQUEST and one.name not in below and one.name not in taken]
    for one in sorted(loose, key=lambda one: (abs(one.bottom - CLIENT), one.bottom, one.place, one.name)):
        if gateway and one.failed:
            yield one.name
        elif mine := [call for call in left if _agree(one, call)]:
            left.remove(mine[0])
            yield one.name
        elif one.bottom == FRAMEWORK and any(
            other.top in (CLIENT, REQUEST) and _began_inside(other, one) if one.end > one.start else _of_client(other, one) for other in kin
        ):
            yield one.name
    without = [one for one in kin if one.bottom > ENGINE and not one.engine and one.name not in below]
    for one in kin:
        if one.bottom == ENGINE and one.name not in below and (mine := [call for call in without if _agree(one, call)]):
            without.remove(mine[0])
            yield one.name


def _of_client(other: Kin, one: Kin) -> bool:
    return other.top == CLIENT and other.place[0] == one.place[0] and one.name not in other.inside
