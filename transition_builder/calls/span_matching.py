"""Span matching: unlinked spans that describe the same call.

Invariant: nothing depends on the order in which groups are given; a group is hung below one other at most.

The rules by which a group goes below another are those of docs/concepts/calls.md ("One call"), a function each. A remaining group is no
call of its own (`_absorbed`) where, in an attempt that the gateway recorded, it ended in an error, or an unmatched call of the gateway
remains for it; where another group of its process began inside it, or may have (its end is not known); and, for an engine's span, where
a call remains that has none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, groupby, islice, takewhile
from typing import Any

import numpy as np
import polars as pl

from transition_builder.calls.call_groups import CLIENT, ENGINE, FRAMEWORK, GATEWAY, REQUEST, CallGroups
from transition_builder.calls.forest import Indices, SpanForest, chains
from transition_builder.calls.order import times
from transition_builder.schemas import ATTEMPT, SPAN

_SPAN_FACTS = ["ProcessId", "ServiceName", "Seq", "Timestamp", "Duration", "StatusCode", "Convention", "ScopeName"]
_RESPONSE_FACTS = ["ResponseId", "Model", "InputTokens", "OutputTokens"]
_HELD = [*SPAN, "ResponseId", "PromptIds", "ResponseIds"]


@dataclass(frozen=True, slots=True, eq=False)
class CallSpans:
    """Linked group of spans of a call."""

    name: int
    """Node of its outermost span."""
    innermost: int
    """Node of its innermost client span, else of its innermost framework span, else of the outermost: where others hang below it."""
    top: int
    """Distance of its outermost span from the wire."""
    bottom: int
    """Distance of its innermost span from the wire; HTTP requests and engines count only where there is nothing else."""
    start_key: tuple[str, int, str]
    """Beginning of its outermost span: process, sequence number or time there, distance from the farthest, trace and span id."""
    start: int
    end: int
    """Start and end by its process's clock, in nanoseconds; equal where the end is not known."""
    convention: str
    failed: bool
    engine: bool
    """True if an engine's span is in the group."""
    responses: frozenset[str]
    ids: frozenset[tuple[bytes, bytes]]
    """Token ids of prompt and response."""
    model: str | None
    tokens: tuple[int, int] | None
    """Numbers of tokens of prompt and response."""
    inside: frozenset[int]
    """Groups in whose spans it lies, with an agent or a tool between."""


Pairs = Iterator[tuple[CallSpans, CallSpans]]
Links = Mapping[int, int]
"""Names of groups, and of those that they go below."""


def link(
    nodes: pl.DataFrame, forest: SpanForest, groups: CallGroups, recorded: pl.DataFrame, answers: pl.DataFrame
) -> tuple[SpanForest, CallGroups]:
    """Return the forest and the groups with those of one call hung below each other, in every attempt that has anything to match."""
    tops = np.flatnonzero(groups.tops)
    unrecorded = ~np.isin(tops, groups.roots[:-1][groups.distance == GATEWAY])
    if not unrecorded.any():
        return forest, groups
    attempts = nodes[ATTEMPT][tops].with_columns(top=tops, unrecorded=unrecorded).group_by(ATTEMPT).agg("top", "unrecorded")
    # A single unrecorded group needs no matching; beside linked ones it may have ended in an error before it reached the gateway.
    ambiguous = attempts.filter(pl.col("unrecorded").list.any() & (pl.col("top").list.len() > 1))["top"]
    known = _call_spans(nodes, forest, groups, recorded, answers, ambiguous.explode().to_numpy())
    below, absorbed = dict[int, int](), list[int]()
    for of_attempt in ambiguous.to_list():
        ordered = sorted((known[top] for top in of_attempt), key=lambda group: group.start_key)
        links = _links(ordered)
        below |= {lower: known[upper].innermost for lower, upper in links.items()}
        absorbed += _absorbed(ordered, links)
    if below:
        lower, upper = np.array([*below.items()]).T
        forest, groups = forest.with_parents(lower, upper), replace(groups, tree=groups.tree.with_parents(lower, upper))
    return forest, replace(groups, absorbed=forest.mask(np.array(absorbed, dtype=np.int64)))


def _call_spans(
    nodes: pl.DataFrame, forest: SpanForest, groups: CallGroups, recorded: pl.DataFrame, answers: pl.DataFrame, tops: Indices
) -> dict[int, CallSpans]:
    """Return the facts of groups that the rules compare, by their outermost spans."""
    at = np.flatnonzero(np.isin(groups.roots[:-1], tops))
    spans = nodes[[*SPAN, *_SPAN_FACTS, *_RESPONSE_FACTS]][at]
    spans = spans.with_columns(
        *times(spans), Node=at, Top=groups.roots[at], Distance=groups.distance[at], Depth=groups.tree.depth[at]
    ).sort("Depth", *SPAN)
    rows = pl.concat([answers.select(*_HELD, Requested=pl.lit(None, pl.String)), recorded.select(*_HELD, Requested="Model")])
    held = rows.join(spans, on=SPAN, how="semi").rows_by_key(SPAN)
    # The groups (their outermost spans) that each group lies in, whatever stands between.
    around = groups.roots[forest.enclosing(groups.member)]
    inside = dict(zip(tops.tolist(), chains(around[tops], around).tolist(), strict=True))
    return {top: _group(members, held, inside[top]) for top, members in spans.rows_by_key("Top", named=True).items()}


def _group(spans: Sequence[Mapping[str, Any]], held: Mapping[Any, Sequence[tuple[Any, ...]]], inside: Sequence[int]) -> CallSpans:
    """Make a group of its spans, the outermost first, and of the responses that each span holds."""
    top, distances = spans[0], {span["Distance"] for span in spans}
    answers = [(span["Distance"], *answer) for span in spans for answer in held.get((span["TraceId"], span["SpanId"]), ())]
    recorded = [answer for answer in answers if answer[0] == GATEWAY]
    tokens = [(len(prompt or ()), len(response or ())) for *_, prompt, response, _ in recorded]
    tokens += [(span["InputTokens"], span["OutputTokens"]) for span in spans if None not in (span["InputTokens"], span["OutputTokens"])]
    # The model that the agent requested takes precedence over the one that a gateway in between may have set.
    models = [*(span["Model"] for span in spans), *(requested for *_, requested in recorded)]
    reporters = [span for span in spans if span["Distance"] >= CLIENT]
    return CallSpans(
        name=top["Node"],
        innermost=min(reporters, key=lambda span: (span["Distance"], -span["Depth"], _start_key(span)), default=top)["Node"],
        top=top["Distance"],
        bottom=min(distances - {REQUEST, ENGINE} or distances),
        start_key=_start_key(top),
        start=top["Start"],
        end=top["End"],
        convention=f"{top['Convention']} {top['ScopeName']}",
        failed=top["StatusCode"] == "Error",
        engine=ENGINE in distances,
        responses=frozenset(filter(None, [*(span["ResponseId"] for span in spans), *(answer[1] for answer in answers)])),
        ids=frozenset((_packed(prompt), _packed(response)) for *_, prompt, response, _ in answers if prompt and response),
        model=next(filter(None, models), None),
        tokens=next(iter(tokens), None),
        inside=frozenset(inside),
    )


def _packed(ids: Sequence[int]) -> bytes:
    return np.array(ids, np.uint32).tobytes()


def _start_key(span: Mapping[str, Any]) -> tuple[str, int, str]:
    # Spans that started at once, as in a millisecond of JavaScript's clock: those further from the wire first.
    return span["Process"], span["Seq"], f"{FRAMEWORK - span['Distance']}{span['TraceId']}{span['SpanId']}"


def _links(groups: Sequence[CallSpans]) -> dict[int, int]:
    """Return the group that each of one attempt, in the order of their places, goes below, by the first rule that holds."""
    below = dict[int, int]()
    for rule in (_by_response, _by_ids, _by_start, _by_tokens):
        for lower, upper in rule(groups, below):
            above = upper.name
            while above in below and above != lower.name:
                above = below[above]
            if lower.name not in below and above != lower.name:
                below[lower.name] = upper.name
    return below


def _unlinked(groups: Sequence[CallSpans], below: Links) -> list[CallSpans]:
    linked = {*below, *below.values()}
    return [group for group in groups if group.name not in linked]


def _by_response(groups: Sequence[CallSpans], _: Links) -> Pairs:
    """Yield pairs that name one response: each with the nearest one further from the wire."""
    sharing = dict[str, list[CallSpans]]()
    for group in groups:
        for response in sorted(group.responses):
            sharing.setdefault(response, []).append(group)
    for same_response in sharing.values():
        by_kind = dict[tuple[int, str], list[CallSpans]]()
        for group in same_response:
            if group.bottom >= CLIENT:
                by_kind.setdefault((group.bottom, group.convention), []).append(group)
        for lower in same_response:
            if upper := _nearest(lower, by_kind):
                yield lower, upper


def _nearest(lower: CallSpans, by_kind: Mapping[tuple[int, str], Sequence[CallSpans]]) -> CallSpans | None:
    """Return the nearest group, by distance and convention, that another may hang below, of several the first; some servers repeat ids."""
    nearest = list[CallSpans]()
    for (bottom, convention), groups in by_kind.items():
        if lower.top < bottom:
            nearest += [*islice((group for group in groups if _fits(lower, group)), 1)]
        elif lower.top == bottom and lower.convention != convention:
            earlier = takewhile(lambda group: group.start_key < lower.start_key, groups)
            nearest += [*islice((group for group in earlier if _fits(lower, group)), 1)]
    return min(nearest, key=lambda group: (group.bottom, group.start_key), default=None)


def _by_ids(groups: Sequence[CallSpans], below: Links) -> Pairs:
    """Yield gateway calls and groups whose answers have the same token ids and name no other response, in the order of each."""
    identified = [group for group in _unlinked(groups, below) if group.ids]
    unmatched = dict[frozenset[tuple[bytes, bytes]], list[CallSpans]]()
    for group in identified:
        if group.bottom >= CLIENT:
            unmatched.setdefault(group.ids, []).append(group)
    for lower in filter(_of_gateway, identified):
        same_ids = unmatched.get(lower.ids, [])
        if upper := next((group for group in same_ids if _same(lower.responses, group.responses)), None):
            same_ids.remove(upper)
            yield lower, upper


def _by_start(groups: Sequence[CallSpans], below: Links) -> Pairs:
    """Yield each group with the one of its process in which it began."""
    taken = set(below.values())
    for of_process, next_starts in _by_process(groups).values():
        begun = _BegunGroups()
        for lower, next_start in zip(of_process, next_starts, strict=True):
            if lower.name not in below and (upper := _enclosing_group(lower, begun.candidates(lower, next_start), taken)):
                yield lower, upper
                if lower.name in below:
                    taken.add(upper.name)
            if lower.bottom >= CLIENT:
                begun.add(lower)


class _BegunGroups:
    """Groups of a process that began and may not have ended, by distance and convention, and by token counts, which have to agree."""

    def __init__(self) -> None:
        self._groups = dict[tuple[int, str], dict[tuple[int, int] | None, list[CallSpans]]]()

    def add(self, group: CallSpans) -> None:
        self._groups.setdefault((group.bottom, group.convention), {}).setdefault(group.tokens, []).append(group)

    def candidates(self, lower: CallSpans, next_start: int) -> Iterator[CallSpans]:
        """Yield those that another may hang below, and forget those that ended before everything that is left began."""
        for (bottom, convention), by_tokens in self._groups.items():
            if lower.top < bottom or (lower.top == bottom and lower.convention != convention):
                for tokens in [*by_tokens] if lower.tokens is None else (lower.tokens, None):
                    if groups := [group for group in by_tokens.pop(tokens, ()) if group.end == group.start or group.end >= next_start]:
                        by_tokens[tokens] = groups
                        yield from groups


def _by_process(groups: Iterable[CallSpans]) -> dict[str, tuple[list[CallSpans], list[int]]]:
    """Return the groups of each process, in order, and the earliest start of each and those after it: a clock may be set back."""
    processes = dict[str, tuple[list[CallSpans], list[int]]]()
    for process, of_process in groupby(groups, key=lambda group: group.start_key[0]):
        ordered = list(of_process)
        processes[process] = ordered, [*accumulate((group.start for group in reversed(ordered)), min)][::-1]
    return processes


def _enclosing_group(lower: CallSpans, groups: Iterable[CallSpans], taken: set[int]) -> CallSpans | None:
    """Return the group among those of its process in which another began, where models, token counts, response ids and token ids agree.

    The nearest one to the wire goes first, then one with equal token counts, then one that has nothing below it yet, then the earliest.
    Two of the same distance must both have equal token counts.
    """
    candidates = [upper for upper in groups if _fits(lower, upper) and _began_inside(lower, upper) and _agree(lower, upper)]
    equal = {upper.name for upper in candidates if upper.tokens is not None and upper.tokens == lower.tokens}
    candidates = [upper for upper in candidates if upper.bottom != lower.top] or [upper for upper in candidates if upper.name in equal]

    def preference(upper: CallSpans) -> tuple[Any, ...]:
        process, seq, span = upper.start_key
        # Where all have something below them already, it is a further retry of the one that began last.
        return upper.bottom, upper.name not in equal, upper.name in taken, process, -seq if upper.name in taken else seq, span

    return min(candidates, key=preference, default=None)


def _by_tokens(groups: Sequence[CallSpans], below: Links) -> Pairs:
    """Yield gateway calls and groups with the same token counts and model, in the order of each, where there are as many of both."""
    by_tokens = dict[tuple[int, int], list[CallSpans]]()
    for group in _unlinked(groups, below):
        if group.tokens is not None:
            by_tokens.setdefault(group.tokens, []).append(group)
    for _, alike in sorted(by_tokens.items()):
        recorded = [*filter(_of_gateway, alike)]
        for bottom in (CLIENT, FRAMEWORK):
            candidates = [group for group in alike if group.bottom == bottom]
            one_clock = len({group.start_key[0] for group in candidates}) == 1 == len({group.start_key[0] for group in recorded})
            if len(candidates) == len(recorded) and one_clock and all(_same_model(group.model, recorded[0].model) for group in candidates):
                yield from zip(recorded, candidates, strict=True)
                break


def _absorbed(groups: Sequence[CallSpans], below: Links) -> Iterator[int]:
    """Yield the names of groups that are no calls of their own."""
    taken = set(below.values())
    free = [group for group in groups if group.name not in below]
    gateway = any(group.bottom == GATEWAY for group in groups)
    unmatched = _UntakenGroups(filter(_of_gateway, free))
    unlinked = [group for group in free if group.bottom >= REQUEST and group.name not in taken]
    requests = _by_process(group for group in groups if group.top in (CLIENT, REQUEST))
    for group in sorted(unlinked, key=lambda group: (abs(group.bottom - CLIENT), group.bottom, group.start_key)):
        if (
            (gateway and group.failed)
            or unmatched.take(group)
            or (group.bottom == FRAMEWORK and _has_requests(group, *requests.get(group.start_key[0], ([], []))))
        ):
            yield group.name
    without_engine = _UntakenGroups(group for group in free if group.bottom > ENGINE and not group.engine)
    for group in free:
        if group.bottom == ENGINE and without_engine.take(group):
            yield group.name


class _UntakenGroups:
    """Groups that are taken once each, in order; looked up by token counts, which have to agree."""

    def __init__(self, groups: Iterable[CallSpans]) -> None:
        self._all = dict(enumerate(groups))
        self._by_tokens = dict[tuple[int, int] | None, dict[int, CallSpans]]()
        for place, group in self._all.items():
            self._by_tokens.setdefault(group.tokens, {})[place] = group

    def take(self, other: CallSpans) -> bool:
        """Remove the first group that agrees with another; return whether there was one."""
        candidates = [self._all] if other.tokens is None else [self._by_tokens.get(tokens, {}) for tokens in (other.tokens, None)]
        agreeing = (islice((place for place, group in groups.items() if _agree(other, group)), 1) for groups in candidates)
        first = min(chain.from_iterable(agreeing), default=None)
        if first is not None:
            del self._by_tokens[self._all.pop(first).tokens][first]
        return first is not None


def _of_gateway(group: CallSpans) -> bool:
    return group.top <= REQUEST and group.bottom == GATEWAY


def _fits(lower: CallSpans, upper: CallSpans) -> bool:
    """Return whether a group may hang below another."""
    if lower is upper or upper.name in lower.inside:
        return False
    same_level = upper.bottom == lower.top and upper.convention != lower.convention and lower.start_key > upper.start_key
    return upper.bottom >= CLIENT and (lower.top < upper.bottom or same_level)


def _began_inside(lower: CallSpans, upper: CallSpans) -> bool:
    """Return whether a process saw one group begin while another was open; a bare request only in one whose end is known."""
    if lower.start_key[0] != upper.start_key[0] or upper.start_key > lower.start_key:
        return False
    return lower.start <= upper.end if upper.end != upper.start else lower.top != REQUEST


def _has_requests(framework: CallSpans, requests: Sequence[CallSpans], next_starts: Sequence[int]) -> bool:
    """Return whether any of its process's clients and requests may have been made by a framework's group."""
    if framework.end == framework.start:
        return any(_may_be_of(request, framework) for request in requests)
    later = range(bisect_right(requests, framework.start_key, key=lambda request: request.start_key), len(requests))
    return any(_may_be_of(requests[at], framework) for at in takewhile(lambda at: next_starts[at] <= framework.end, later))


def _may_be_of(other: CallSpans, framework: CallSpans) -> bool:
    """Return whether a client or a request may have been made by a framework's group."""
    if framework.name in other.inside:
        return False
    if framework.end > framework.start:
        return other.top in (CLIENT, REQUEST) and _began_inside(other, framework)
    return other.top == CLIENT and other.start_key[0] == framework.start_key[0]


def _agree(left: CallSpans, right: CallSpans) -> bool:
    """Return whether nothing that both say differs."""
    tokens = left.tokens is None or right.tokens is None or left.tokens == right.tokens
    return tokens and _same_model(left.model, right.model) and _same(left.responses, right.responses) and _same(left.ids, right.ids)


def _same(left: frozenset[object], right: frozenset[object]) -> bool:
    """Return whether two sets may be of one call: one of them is empty, or they share something."""
    return not left or not right or not left.isdisjoint(right)


def _same_model(left: str | None, right: str | None) -> bool:
    if not left or not right:
        return True
    # A router's prefix (openai/gpt), a dated name for an undated one.
    short, long = sorted((left.rsplit("/", 1)[-1], right.rsplit("/", 1)[-1]), key=len)
    return long.startswith(short)
