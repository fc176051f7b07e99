"""The list of rollouts: its rows page by page, the numbers and the histogram beside it, and its export.

In: a filter and an order. Out: rows as JSON has them. Invariant: a page begins after a row and not at a place, so that rollouts that are
built meanwhile neither repeat nor hide a row.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from page.encoding import csv_line, encode
from page.reading import PageStore
from page.rollouts.filters import HAS_RETURN, KEY, RolloutFilter, RolloutOrder, cursor_of
from page.rollouts.text_search import rollouts_with
from spangrad.store.built_rollouts import last_built_sql, newest_revisions_sql, revisions_sql, trained_versions_sql

PAGE_ROWS = 200
EXPORT_ROWS = 100_000
"""Largest number of rows of an export."""
SEARCH_SECONDS = 0.1
"""Time after which a search returns what it has, in seconds."""
_EXPORT_PAGE = 5000
_WINDOWS_US = tuple(minutes * 60 * 10**6 for minutes in (10, 2 * 60, 24 * 60, 12 * 24 * 60, 144 * 24 * 60))
"""Lengths of the windows of time in which the newest builds are looked for, one before the other, in microseconds; then the rest."""
BINS = 24
_LIST = f"""
SELECT RunId, Mode, TaskId, GroupId, RolloutId, BuildSpec, Attempt, Attempts, Outcome, Return, ReturnsByRole, Calls, Transitions, Drops,
    InputTokens, OutputTokens, ToolCalls, FailedToolCalls, AgentNames, PolicyVersions,
    toUnixTimestamp64Milli(StartedAt) AS StartedMs, Seconds, BuildId,
    toUnixTimestamp64Micro(IngestedAt) AS BuiltUs, {{value}} AS SortValue
FROM {revisions_sql()}
WHERE {{condition}} AND {{after}} AND {{window}}
ORDER BY {{order}}
LIMIT {{{{limit:UInt32}}}}
"""
_WINDOW = "IngestedAt > fromUnixTimestamp64Micro({since:Int64}) AND IngestedAt <= fromUnixTimestamp64Micro({until:Int64})"
_LAST_BUILT = f"SELECT toUnixTimestamp64Micro(max(BuiltAt)) AS Us FROM {last_built_sql()}"
_OF_IDS = "RunId IN {runs:Array(String)} AND RolloutId IN {ids:Array(String)}"
_NEWEST = f"SELECT BuildId, toUnixTimestamp64Micro(BuiltAt) AS BuiltUs FROM {newest_revisions_sql(_OF_IDS)}"
_TRAINED = f"SELECT * FROM {trained_versions_sql(_OF_IDS)}"
_OF_NEWEST = f"{{condition}} AND BuildId IN (SELECT BuildId FROM {newest_revisions_sql()})"
_BOUNDS = f"""
SELECT minIf(assumeNotNull(Return), {HAS_RETURN}) AS Least, maxIf(assumeNotNull(Return), {HAS_RETURN}) AS Largest
FROM {revisions_sql()} WHERE {_OF_NEWEST}
"""
_NUMBERS = f"""
SELECT count() AS Count, countIf(Outcome = 'succeeded') AS Succeeded, avg(Return) AS Mean, avgMap(ReturnsByRole) AS MeanByRole,
    sum(Drops) AS Drops, sumMap([Outcome], [toUInt64(1)]) AS Outcomes, sumMapIf([Bin], [toUInt64(1)], {HAS_RETURN}) AS Bins
FROM (
    SELECT Outcome, Return, ReturnsByRole, Drops, roundDown(assumeNotNull(Return), {{{{begins:Array(Float64)}}}}) AS Bin
    FROM {revisions_sql(once=True)} WHERE {_OF_NEWEST}
)
"""
_CHOICES = f"""
SELECT groupUniqArray(200)(RunId) AS run, groupUniqArray(20)(Mode) AS mode, groupUniqArray(40)(Outcome) AS outcome,
    groupUniqArrayArray(100)(AgentNames) AS agent, groupUniqArray(20)(BuildSpec) AS spec
FROM {revisions_sql()}
"""


def page_of(store: PageStore, rollouts: RolloutFilter, order: RolloutOrder, limit: int = PAGE_ROWS) -> dict[str, Any]:
    """Return a page of the list, and the cursor of what follows it; None: nothing does.

    The columns are those of spangrad.rollouts. That view looks for the newest build of every rollout; here only those of the page are
    looked for, so that a page may have fewer rows than its limit.
    """
    rows = _revisions(store, rollouts, order, limit + 1)
    shown, following = rows[:limit], cursor_of(rows[limit - 1]) if len(rows) > limit else None
    ids = {"runs": list({row["RunId"] for row in shown}), "ids": list({row["RolloutId"] for row in shown})}
    newest = {(row["BuildId"], row["BuiltUs"]) for row in store.rows(_NEWEST, ids)}
    trained = {tuple(row[name] for name in KEY): row["Trained"] for row in store.rows(_TRAINED, ids)}
    kept = [row for row in shown if (row.pop("BuildId"), row["BuiltUs"]) in newest]
    return {"rows": [{**row, "Trained": trained.get(tuple(row[name] for name in KEY), [])} for row in kept], "after": following}


def _revisions(store: PageStore, rollouts: RolloutFilter, order: RolloutOrder, limit: int) -> list[dict[str, Any]]:
    """Return the first revisions of an order. Of the newest it reads windows of time until there are enough, and not the history."""
    condition, parameters = rollouts.condition()
    after, order_by, more = order.clauses()
    parameters |= more
    statement = partial(_LIST.format, value=order.expression, condition=condition, after=after, order=order_by)
    if not order.newest_built:
        return store.rows(statement(window="true"), {**parameters, "limit": limit})
    rows = list[dict[str, Any]]()
    for since, until in _windows(int(order.after[0]) if order.after else store.rows(_LAST_BUILT)[0]["Us"]):
        window = {"since": since, "until": until, "limit": limit - len(rows)}
        rows += store.rows(statement(window=_WINDOW), {**parameters, **window})
        if len(rows) == limit:
            break
    return rows


def _windows(last: int) -> Iterator[tuple[int, int]]:
    """Yield windows of time up to the last one, the newest first: each without its begin, with its end, in microseconds since 1970."""
    for length in _WINDOWS_US:
        if length > last:
            break
        yield last - length, last
        last -= length
    yield -1, last


def search(store: PageStore, rollouts: RolloutFilter, order: RolloutOrder, limit: int = PAGE_ROWS) -> dict[str, Any]:
    """Return a page of the list: of rollouts with a text in their spans as many as `SEARCH_SECONDS` find, with how many were searched.

    Every rollout that meets the rest of the filter is a candidate, so that a page may be empty while more follow.
    """
    if rollouts.contents is None:
        return page_of(store, rollouts, order, limit)
    rows, searched, ends = list[dict[str, Any]](), 0, time.monotonic() + SEARCH_SECONDS
    while True:
        page = page_of(store, rollouts, order, limit)
        matching = rollouts_with(store, {row["RolloutId"] for row in page["rows"]}, rollouts.contents)
        rows += [row for row in page["rows"] if row["RolloutId"] in matching]
        searched += len(page["rows"])
        if page["after"] is None or len(rows) >= limit or time.monotonic() > ends:
            return {"rows": rows, "after": page["after"], "searched": searched}
        order = order.following(page["after"])


def numbers_of(store: PageStore, rollouts: RolloutFilter) -> dict[str, Any]:
    """Return counts and a histogram of the returns of all rollouts of a filter, whatever text it looks for in spans."""
    condition, parameters = rollouts.condition()
    (bounds,) = store.rows(_BOUNDS.format(condition=condition), parameters)
    least, largest = bounds["Least"], bounds["Largest"]
    begins = sorted({least + (largest - least) / BINS * number for number in range(BINS)})
    (numbers,) = store.rows(_NUMBERS.format(condition=condition), {**parameters, "begins": begins})
    outcomes, counts = (dict(zip(*numbers.pop(name), strict=True)) for name in ("Outcomes", "Bins"))
    # Both bounds of a filter are part of it: a bin ends before the next begins, so that its address lists what it counts.
    ends = [*(math.nextafter(begin, -math.inf) for begin in begins[1:]), largest]
    histogram = [{"from": begin, "to": end, "count": counts.get(begin, 0)} for begin, end in zip(begins, ends, strict=True)]
    outcomes = dict(sorted(outcomes.items(), key=lambda item: -item[1]))
    return {**numbers, **bounds, "Outcomes": outcomes, "Histogram": histogram if counts else []}


def choices_of(store: PageStore) -> dict[str, list[str]]:
    """Return the values that filters may name: runs, modes, outcomes, agents and build specifications."""
    (row,) = store.rows(_CHOICES)
    return {name: sorted(values) for name, values in row.items()}


def export(store: PageStore, rollouts: RolloutFilter, order: RolloutOrder, form: str) -> Iterator[bytes]:
    """Yield the list as CSV or as lines of JSON, `EXPORT_ROWS` rows at most."""
    write = _csv_rows if form == "csv" else _json_lines
    left, first = EXPORT_ROWS, True
    while left > 0:
        page = search(store, rollouts, order, min(_EXPORT_PAGE if rollouts.contents is None else PAGE_ROWS, left))
        rows = [{name: value for name, value in row.items() if name != "SortValue"} for row in page["rows"]]
        yield write(rows, first)
        if page["after"] is None:
            return
        left, first = left - len(rows), first and not rows
        order = order.following(page["after"])


def _json_lines(rows: list[dict[str, Any]], first: bool) -> bytes:
    return b"".join(encode(row) + b"\n" for row in rows)


def _csv_rows(rows: list[dict[str, Any]], first: bool) -> bytes:
    head = csv_line(list(rows[0])) if first and rows else b""
    return head + b"".join(csv_line(list(row.values())) for row in rows)
