"""Span matching: unlinked spans that describe the same call.

Invariant: nothing depends on the order in which groups are given; a group is hung below one other at most.

The rules by which a group goes below another are those of docs/concepts/calls.md ("One call"), a function each. A remaining group is no
call of its own (`_absorbed`) where, in an attempt that the gateway recorded, it ended in an error, or an unmatched call of the gateway
remains for it; where another group of its process began inside it, or may have (its end is not known); and, for an engine's span, where
a call remains that has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from transition_builder.calls.call_groups import CLIENT, ENGINE, FRAMEWORK, GATEWAY, REQUEST, CallGroups
from transition_builder.calls.forest import Indices, Mask, SpanForest
from transition_builder.calls.order import FOREIGN
from transition_builder.schemas import ATTEMPT, SPAN

_SPAN_FACTS = ["ProcessId", "ServiceName", "Seq", "Timestamp", "Duration", "StatusCode", "Convention", "ScopeName"]
_RESPONSE_FACTS = ["ResponseId", "Model", "InputTokens", "OutputTokens"]

StartKey = tuple[str, int, str]
"""Process, sequence number or time there, trace and span id."""


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
    start_key: StartKey
    """Beginning of its outermost span."""
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


def link(
    nodes: pl.DataFrame, forest: SpanForest, groups: CallGroups, recorded: pl.DataFrame, answers: pl.DataFrame
) -> tuple[SpanForest, CallGroups, Mask]:
    """Hang the groups of one call below each other, in every attempt in which there is anything to match.

    Returns:
        The forest and the groups so linked, and a mask of the outermost spans of groups that were absorbed.
    """
    tops, absorbed = np.flatnonzero(groups.tops), np.zeros(forest.size, dtype=np.bool_)
    unrecorded = ~(groups.above_gateway | groups.gateway)[tops]
    if not unrecorded.any():
        return forest, groups, absorbed
    attempts = nodes.select(ATTEMPT)[tops].with_columns(top=tops, unrecorded=unrecorded)
    # A single unrecorded group needs no matching; beside linked ones it may have ended in an error before it
    # reached the gateway.
    ambiguous = attempts.filter(pl.col("unrecorded").any().over(ATTEMPT) & (pl.len().over(ATTEMPT) > 1))
    known = _call_spans(nodes, forest, groups, recorded, answers, ambiguous["top"].to_numpy())
    below = dict[int, int]()
    for of_attempt in ambiguous.group_by(ATTEMPT, maintain_order=True).agg("top")["top"].to_list():
        ordered = sorted((known[top] for top in of_attempt), key=lambda group: group.start_key)
        pairs = _pairs(ordered)
        below.update({lower: known[upper].innermost for lower, upper in pairs.items()})
        absorbed[list(_absorbed(ordered, pairs))] = True
    if not below:
        return forest, groups, absorbed
    lower, upper = np.array([*below]), np.array([*below.values()])
    return forest.with_parents(lower, upper), groups.with_parents(lower, upper), absorbed


def _call_spans(
    nodes: pl.DataFrame, forest: SpanForest, groups: CallGroups, recorded: pl.DataFrame, answers: pl.DataFrame, tops: Indices
) -> dict[int, CallSpans]:
    """Return the facts of groups that the rules compare, by their outermost spans."""
    at = np.flatnonzero(np.isin(groups.roots, tops))
    spans = nodes.select(*SPAN, *_SPAN_FACTS, *_RESPONSE_FACTS)[at].with_columns(
        pl.col("Duration").cast(pl.Int64, strict=False).fill_null(0),
        Start=pl.col("Timestamp").cast(pl.Int64),
        Node=at,
        Top=groups.roots[at],
        Distance=groups.distance[at],
        Depth=groups.tree.depth[at],
    )
    held = dict[tuple[str, str], list[list[Any]]]()
    for rows, requested in ((answers, pl.lit(None, pl.String)), (recorded, pl.col("Model"))):
        kept = rows.join(spans, on=SPAN, how="semi")
        for trace, span, *answer in kept.select(*SPAN, "ResponseId", "PromptIds", "ResponseIds", requested.alias("Requested")).iter_rows():
            held.setdefault((trace, span), []).append(answer)
    members = dict[int, list[dict[str, Any]]]()
    for row in spans.sort("Depth", *SPAN).iter_rows(named=True):
        members.setdefault(row["Top"], []).append(row | {"Held": held.get((row["TraceId"], row["SpanId"]), [])})
    inside = _inside(forest, groups, tops)
    return {top: _group(rows, inside[top]) for top, rows in members.items()}


def _group(spans: Sequence[Mapping[str, Any]], inside: frozenset[int]) -> CallSpans:
    """Make a group of its spans, the outermost first."""
    top, distances = spans[0], [span["Distance"] for span in spans]
    held = [answer for span in spans for answer in span["Held"]]
    recorded = [answer for span in spans if span["Distance"] == GATEWAY for answer in span["Held"]]
    tokens = [(len(prompt or ()), len(response or ())) for _, prompt, response, _ in recorded]
    counts = [(span["InputTokens"], span["OutputTokens"]) for span in spans]
    tokens += [pair for pair in counts if None not in pair]
    # The model that the agent requested takes precedence over the one that a gateway in between may have set.
    models = [*(span["Model"] for span in spans), *(requested for *_, requested in recorded)]
    nearest = next((kind for kind in (CLIENT, FRAMEWORK) if kind in distances), None)
    reporters = [span for span in spans if span["Distance"] == nearest]
    innermost = min(reporters, key=lambda span: (-span["Depth"], _start_key(span)), default=top)
    return CallSpans(
        name=top["Node"],
        innermost=innermost["Node"],
        top=top["Distance"],
        bottom=min([distance for distance in distances if distance not in (REQUEST, ENGINE)] or distances),
        start_key=_start_key(top),
        start=top["Start"],
        end=top["Start"] + top["Duration"],
        convention=f"{top['Convention']} {top['ScopeName']}",
        failed=top["StatusCode"] == "Error",
        engine=ENGINE in distances,
        responses=frozenset(filter(None, [*(span["ResponseId"] for span in spans), *(response for response, *_ in held)])),
        ids=frozenset((_packed(prompt), _packed(response)) for _, prompt, response, _ in held if prompt and response),
        model=next(filter(None, models), None),
        tokens=next(iter(tokens), None),
        inside=inside,
    )


def _packed(ids: Sequence[int]) -> bytes:
    return np.array(ids, np.uint32).tobytes()


def _start_key(span: Mapping[str, Any]) -> StartKey:
    is_numbered = bool(span["ProcessId"]) and not span["ProcessId"].startswith(FOREIGN)
    process = span["ProcessId"] or f"{FOREIGN}{span['ServiceName']}"
    return process, span["Seq"] if is_numbered else span["Start"], span["TraceId"] + span["SpanId"]


def _inside(forest: SpanForest, groups: CallGroups, tops: Indices) -> dict[int, frozenset[int]]:
    """Return the groups (their outermost spans) that each group lies in, whatever stands between."""
    around = np.append(groups.roots, forest.size)[forest.nearest(groups.member)[forest.parent]]
    enclosing = dict[int, frozenset[int]]()
    for top in tops.tolist():
        at, names = top, set[int]()
        while (at := int(around[at])) != forest.size:
            names.add(at)
        enclosing[top] = frozenset(names)
    return enclosing


def _pairs(groups: Sequence[CallSpans]) -> dict[int, int]:
    """Return the group that each of one attempt, in the order of their places, goes below."""
    below = dict[int, int]()

    def attach(pairs: Iterable[tuple[CallSpans, CallSpans]]) -> None:
        for lower, upper in pairs:
            above = upper.name
            while above in below and above != lower.name:
                above = below[above]
            if lower.name not in below and above != lower.name:
                below[lower.name] = upper.name

    def unpaired() -> list[CallSpans]:
        return [group for group in groups if group.name not in below and group.name not in below.values()]

    attach(_by_response(groups))
    attach(_by_ids(unpaired()))
    for lower in groups:
        if lower.name not in below and (upper := _enclosing_group(lower, groups, set(below.values()))) is not None:
            attach([(lower, upper)])
    attach(_by_tokens(unpaired()))
    return below


def _by_response(groups: Sequence[CallSpans]) -> Iterator[tuple[CallSpans, CallSpans]]:
    """Yield pairs that name one response: each with the nearest one further from the wire."""
    sharing = dict[str, list[CallSpans]]()
    for group in groups:
        for response in sorted(group.responses):
            sharing.setdefault(response, []).append(group)
    for same_response in sharing.values():
        for lower in same_response if len(same_response) > 1 else []:
            candidates = [upper for upper in same_response if _fits(lower, upper)]
            if candidates:
                yield lower, min(candidates, key=lambda group: group.bottom)


def _by_ids(groups: Sequence[CallSpans]) -> Iterator[tuple[CallSpans, CallSpans]]:
    """Yield gateway calls and groups whose answers have the same token ids and name no other response, in the order of each."""
    unmatched = [group for group in groups if group.bottom >= CLIENT and group.ids]
    for lower in [group for group in groups if _of_gateway(group) and group.ids] if unmatched else []:
        upper = next((group for group in unmatched if group.ids == lower.ids and _same(group.responses, lower.responses)), None)
        if upper is not None:
            unmatched.remove(upper)
            yield lower, upper


def _enclosing_group(lower: CallSpans, groups: Sequence[CallSpans], taken: set[int]) -> CallSpans | None:
    """Return the group of the same process in which another began, where models, token counts, response ids and token ids agree.

    Of several one with equal token counts goes first, then one that has nothing below it yet, then the earliest. Two of the same
    distance must both have equal token counts.
    """
    candidates = [upper for upper in groups if _fits(lower, upper) and _began_inside(lower, upper) and _agree(lower, upper)]
    equal = [group for group in candidates if group.tokens is not None and group.tokens == lower.tokens]
    candidates = [group for group in candidates if group.bottom != lower.top] or [group for group in equal if group.bottom == lower.top]

    def preference(group: CallSpans) -> tuple[Any, ...]:
        process, seq, span = group.start_key
        # Where all have something below them already, it is a further retry of the one that began last.
        return group.bottom, group not in equal, group.name in taken, process, -seq if group.name in taken else seq, span

    return min(candidates, key=preference, default=None)


def _by_tokens(groups: Sequence[CallSpans]) -> Iterator[tuple[CallSpans, CallSpans]]:
    """Yield gateway calls and groups with the same token counts and model, in the order of each, where there are as many of both."""
    for tokens in sorted({group.tokens for group in groups if group.top == GATEWAY and group.tokens is not None}):
        recorded = [group for group in groups if group.top == GATEWAY and group.tokens == tokens]
        for bottom in (CLIENT, FRAMEWORK):
            candidates = [group for group in groups if group.bottom == bottom and group.tokens == tokens]
            one_clock = len({group.start_key[0] for group in candidates}) == 1 == len({group.start_key[0] for group in recorded})
            if len(candidates) == len(recorded) and one_clock and all(_same_model(group.model, recorded[0].model) for group in candidates):
                yield from zip(recorded, candidates, strict=True)
                break


def _absorbed(groups: Sequence[CallSpans], below: Mapping[int, int]) -> Iterator[int]:
    """Yield the names of groups that are no calls of their own."""
    taken = set(below.values())
    free = [group for group in groups if group.name not in below]
    gateway = any(group.bottom == GATEWAY for group in groups)
    unmatched = [group for group in free if _of_gateway(group)]
    unlinked = [group for group in free if group.bottom >= REQUEST and group.name not in taken]
    for group in sorted(unlinked, key=lambda group: (abs(group.bottom - CLIENT), group.bottom, group.start_key)):
        if gateway and group.failed:
            yield group.name
        elif matches := [call for call in unmatched if _agree(group, call)]:
            unmatched.remove(matches[0])
            yield group.name
        elif group.bottom == FRAMEWORK and any(_may_be_of(other, group) for other in groups):
            yield group.name
    unmatched_calls = [group for group in free if group.bottom > ENGINE and not group.engine]
    for group in free:
        if group.bottom == ENGINE and (matches := [call for call in unmatched_calls if _agree(group, call)]):
            unmatched_calls.remove(matches[0])
            yield group.name


def _of_gateway(group: CallSpans) -> bool:
    return group.top <= REQUEST and group.bottom == GATEWAY


def _fits(lower: CallSpans, upper: CallSpans) -> bool:
    """Return whether a group may hang below another."""
    if lower is upper or upper.name in lower.inside:
        return False
    same_level = upper.bottom == lower.top >= CLIENT and upper.convention != lower.convention and lower.start_key > upper.start_key
    return upper.bottom >= CLIENT and (lower.top < upper.bottom or same_level)


def _began_inside(lower: CallSpans, upper: CallSpans) -> bool:
    """Return whether a process saw one group begin while another was open; a bare request only in one whose end is known."""
    if upper.name in lower.inside or lower.start_key[0] != upper.start_key[0] or upper.start_key[1] >= lower.start_key[1]:
        return False
    return lower.start <= upper.end if upper.end != upper.start else lower.top != REQUEST


def _may_be_of(other: CallSpans, framework: CallSpans) -> bool:
    """Return whether a client or a request may have been made by a framework's group."""
    if framework.end > framework.start:
        return other.top in (CLIENT, REQUEST) and _began_inside(other, framework)
    return other.top == CLIENT and other.start_key[0] == framework.start_key[0] and framework.name not in other.inside


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
