"""`spangrad rollout`: one rollout as the store knows it."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from commands.options import ConfigFile, Overrides, resolve
from commands.stopped_store import answering_store
from spangrad import semconv
from spangrad.errors import StoreError

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

    from commands.rollout_tree import Build, Record

_PIPE_WIDTH = 160
_NEAREST = 5

rollout = App(name="rollout", help="Look at one rollout.")


@rollout.command(name="show")
def _show(
    id_: Annotated[str, Parameter(name="ID")],
    /,
    *,
    attempt: int | None = None,
    width: int | None = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Print a rollout's tree of spans: durations, status, tokens, policy versions, rewards, and what the builder made of it.

    Asks the store at store.url. When nobody answers there, the data of a store that has stopped (store.path, else the last
    demo's) is opened for the time of the question.

    Args:
        id_: of the rollout; of a session, conversation or trace that no runner announced.
        attempt: show this attempt alone.
        width: columns of the terminal.
    """
    from rich.console import Console

    from commands.rollout_tree import draw
    from spangrad.clickhouse import connect, store_errors

    with answering_store(resolve(config, set_).store) as store:
        client = connect(store)
        with store_errors(store.url):
            record = _read(client, id_, attempt)
            near = "" if record.spans else _near(client, id_, attempt)
        client.close()
    if not record.spans:
        what = f"rollout {id_!r}" if attempt is None else f"attempt {attempt} of rollout {id_!r}"
        raise StoreError(f"the store at {store.url} holds no span of {what}. {near}")
    Console(width=width or (None if sys.stdout.isatty() else _PIPE_WIDTH)).print(draw(record))


_ROWS = """
SELECT RunId, Mode, RolloutKeySource = 'rollout' AS Named, Attempt, toUnixTimestamp64Nano(Timestamp) AS Started, TraceId, SpanId,
    ParentSpanId, RowKind, ProcessId, Seq, SpanName, ServiceName, ScopeName, Duration, StatusCode, StatusMessage, Attributes
FROM otel.rollout_spans FINAL
WHERE {where}
"""
_NAMED = "RolloutKey = {id:String}"
_INHERITED = """RolloutKeySource != 'rollout' AND RolloutKey != {id:String} AND TraceId IN {traces:Array(String)} AND RolloutKey IN (
    SELECT arrayJoin([TraceId, SessionId, ConversationId]) FROM otel.trace_rollouts WHERE TraceId IN {traces:Array(String)})"""
_CALLS = """
SELECT TraceId, SpanId, Choice, Policy, VersionStart, VersionEnd, length(PromptIds), length(ResponseIds), FinishReason, ErrorType,
    HttpStatus, Aborted
FROM otel.calls FINAL
WHERE RolloutKey IN {keys:Array(String)}
"""
# By rollout and newest revision; v_transitions and v_drops would work that out for all rollouts.
_BUILDS = """
WITH (SELECT max(Revision) FROM otel.{table} WHERE RolloutId = {{id:String}}) AS newest
SELECT BuildSpec, {what}, count() FROM otel.{table} FINAL
WHERE RolloutId = {{id:String}} AND Revision = newest
GROUP BY ALL
"""
_GIVEN = """
SELECT TraceId, SpanId, Name, toString(Value), Source
FROM otel.rewards FINAL
WHERE RolloutId = {id:String} AND Source IN ('sql', 'air')
"""
_KEYS = "SELECT RolloutKey FROM otel.rollout_spans WHERE {where} GROUP BY RolloutKey ORDER BY max(IngestedAt) DESC LIMIT {most:UInt8}"


def _read(client: Client, id_: str, attempt: int | None) -> Record:
    """What is known of a rollout, or of one of its attempts."""
    from commands.rollout_tree import Call, Record, Reward, Span

    def rows(sql: str, **parameters: Any) -> list[Any]:
        return list(client.query(sql, parameters={"id": id_, **parameters}).result_rows)

    found = rows(_ROWS.replace("{where}", _NAMED))
    traces = sorted({row[5] for row in found} - {""})
    found += rows(_ROWS.replace("{where}", _INHERITED), traces=traces) if traces else []
    spans = [Span(*row[:8], *row[9:]) for row in found if row[8] == "span"]
    if attempt is not None:
        mine = {span.trace for span in spans if span.names_rollout and span.attempt == attempt}
        spans = [span for span in spans if (span.attempt == attempt if span.names_rollout else span.trace in mine)]
    kept = {span.key for span in spans}
    rewards = [
        Reward(
            row[5],
            row[6],
            row[17].get(semconv.EVALUATION_NAME) or semconv.REWARD_NAME,
            row[17][semconv.EVALUATION_SCORE],
            "event" if row[8] == "evaluation_event" else "log",
        )
        for row in found
        if row[8] != "span" and semconv.EVALUATION_SCORE in row[17] and (attempt is None or row[3] == attempt)
    ]
    calls = [Call(*row) for row in rows(_CALLS, keys=[id_, *traces])]
    given = [Reward(*row) for row in rows(_GIVEN)]
    return Record(
        id_,
        spans,
        [call for call in calls if (call.trace, call.span) in kept],
        rewards + [reward for reward in given if (reward.trace, reward.span) in kept],
        _builds(rows(_BUILDS.format(table="transitions", what="'', ''")), rows(_BUILDS.format(table="drops", what="Reason, Detail"))),
    )


def _builds(kept: list[Any], dropped: list[Any]) -> list[Build]:
    from commands.rollout_tree import Build

    transitions = Counter[str]()
    drops: dict[str, dict[tuple[str, str], int]] = {}
    for spec, _, _, count in kept:
        transitions[spec] += count
    for spec, reason, detail, count in dropped:
        drops.setdefault(spec, {})[reason, detail] = count
    return [Build(spec, transitions[spec], drops.get(spec, {})) for spec in sorted({*transitions, *drops})]


def _near(client: Client, id_: str, attempt: int | None) -> str:
    """What to ask for instead."""

    def keys(where: str) -> list[str]:
        parameters = {"id": id_, "start": id_[:6], "most": _NEAREST}
        return [str(row[0]) for row in client.query(_KEYS.replace("{where}", where), parameters=parameters).result_rows]

    if attempt is not None and keys(_NAMED):
        return "Leave --attempt out to see those that it had."
    if alike := keys("startsWith(RolloutKey, {start:String}) OR TraceId = {id:String} OR SpanId = {id:String}"):
        return f"Did you mean {' or '.join(alike)}?"
    newest = keys("RolloutKeySource = 'rollout' AND SpanName = 'rollout'")
    return f"The newest rollouts are {', '.join(newest)}." if newest else "It holds no rollouts at all: is store.url the right one?"
