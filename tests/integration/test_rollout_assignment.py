"""Assignment of rows to rollouts: the store's view and the builder agree, whichever rollouts are built together."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spangrad.settings import BuilderSettings, Settings, StoreSettings
from tests.support.built_rollouts import outcome, post, settings_of
from tests.support.servers import client_of
from tests.support.spans import SpanFactory
from transition_builder.completeness.resolve import claim, owners_at_hand, resolve
from transition_builder.loop import build_once
from transition_builder.schemas import ROOTLESS
from transition_builder.source.discovery import Discovery
from transition_builder.source.queries import StoreReader
from transition_builder.source.rollouts import RolloutReader

ROLLOUTS = ("ra", "rb", "rb-2")
_ROW = ["TraceId", "SpanId", "EventIndex", "RowKind"]
_KEYS = ["RolloutId", "Attempt"]


@dataclass(frozen=True)
class Row:
    """A span or an evaluation log, and what it names."""

    trace: int
    rollout: str | None
    attempt: int
    session: str | None
    conversation: str | None
    names_run: bool
    evaluated: bool
    is_log: bool

    def attributes(self, prefix: str) -> dict[str, str]:
        facts = {
            "spangrad.rollout.id": self.rollout and f"{prefix}{self.rollout}",
            "spangrad.rollout.attempt": str(self.attempt) if self.rollout else None,
            "spangrad.run.id": f"{prefix}run" if self.names_run else None,
            "session.id": self.session and f"{prefix}{self.session}",
            "gen_ai.conversation.id": self.conversation and f"{prefix}{self.conversation}",
        }
        return {name: value for name, value in facts.items() if value}


ROWS = st.lists(
    st.builds(
        Row,
        trace=st.integers(0, 2),
        rollout=st.sampled_from([None, None, None, *ROLLOUTS]),
        attempt=st.integers(0, 1),
        session=st.sampled_from([None, None, "s1", "s2"]),
        conversation=st.sampled_from([None, None, "c1"]),
        names_run=st.booleans(),
        evaluated=st.booleans(),
        is_log=st.sampled_from([False, False, False, True]),
    ),
    min_size=1,
    max_size=14,
)


def insert(client: Any, prefix: str, rows: list[tuple[int, Row]]) -> None:
    """Put rows into the stock tables, as any collector does."""
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    spans, logs = list[list[Any]](), list[list[Any]]()
    for number, row in rows:
        trace = f"{uuid.uuid5(uuid.NAMESPACE_OID, prefix).hex[:30]}{row.trace:02}"
        fixed = [begin + timedelta(seconds=number), trace, f"{number:016x}"]
        score = {"gen_ai.evaluation.score.value": "1"}
        if row.is_log:
            logs.append([*fixed, "gen_ai.evaluation.result", row.attributes(prefix) | score])
        else:
            events = ["gen_ai.evaluation.result"] if row.evaluated else []
            spans.append([*fixed, "step", row.attributes(prefix), [begin for _ in events], events, [score for _ in events]])
    if spans:
        names = ["Timestamp", "TraceId", "SpanId", "SpanName", "SpanAttributes", "Events.Timestamp", "Events.Name", "Events.Attributes"]
        client.insert("otel.otel_traces", spans, column_names=names)
    if logs:
        client.insert("otel.otel_logs", logs, column_names=["Timestamp", "TraceId", "SpanId", "EventName", "LogAttributes"])


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=ROWS, cut=st.integers(0, 14), again=st.integers(0, 14))
def test_rollout_spans_of_random_traces_agrees_with_the_builder_row_by_row(
    store: StoreSettings, rows: list[Row], cut: int, again: int
) -> None:
    prefix, client = f"{uuid.uuid4().hex[:8]}-", client_of(store)
    numbered = list(enumerate(rows))
    for delivery in (numbered[:cut], numbered[cut:], numbered[again:]):
        insert(client, prefix, delivery)
    traces = f"TraceId LIKE '{uuid.uuid5(uuid.NAMESPACE_OID, prefix).hex[:30]}%'"

    def frame(sql: str) -> pl.DataFrame:
        table = client.query_arrow(sql, use_strings=True)
        return pl.DataFrame(pl.from_arrow(table))

    view = frame(f"SELECT {', '.join([*_ROW, 'RunId', 'Mode', *_KEYS, 'RolloutKeySource'])} FROM spangrad.rollout_spans WHERE {traces}")
    assert view.select(_ROW).is_unique().all(), "a row delivered twice counts once"
    own = "RunId, Mode, RolloutKey, RolloutKeySource, Attempt, toUnixTimestamp64Micro(IngestedAt) AS IngestedAt"
    raw = frame(f"SELECT {', '.join(_ROW)}, {own} FROM spangrad_internal.rollout_spans FINAL WHERE {traces}")
    raw = raw.with_columns(pl.col(name).cast(dtype) for name, dtype in ROOTLESS.items())

    reader = StoreReader(client, Settings(store=store))
    owners = Discovery(reader).owners(raw["TraceId"])
    past = Settings(store=store, builder=BuilderSettings(as_of=reader.now()))
    then = Discovery(StoreReader(client, past)).owners(raw["TraceId"])
    assert then.sort("TraceId").equals(owners.sort("TraceId"))

    nobodys = pl.col("RolloutKeySource") != "rollout"
    claimed = claim(raw, owners).with_columns(
        RolloutId=pl.when(nobodys).then(pl.lit("")).otherwise("RolloutKey"), Attempt=pl.when(nobodys).then(0).otherwise("Attempt")
    )
    columns = [*_ROW, "RunId", "Mode", *_KEYS]
    as_text = pl.all().cast(pl.String)
    assert claimed.select(columns).select(as_text).sort(_ROW).equals(view.select(columns).select(as_text).sort(_ROW))

    named = {f"{prefix}{row.rollout}" for row in rows if row.rollout and not row.is_log}
    source = RolloutReader(client, Settings(store=store))
    for chosen in ([*named], *([name] for name in named)):
        rollouts = pl.DataFrame({"RunId": [f"{prefix}run"] * len(chosen), "RolloutId": chosen, "TraceId": [""] * len(chosen)})
        if not chosen:
            continue
        arrivals = source.arrivals(rollouts)
        resolved = resolve(arrivals, owners_at_hand(arrivals, source.owners(arrivals)), rollouts)
        ours = view.filter(pl.col("RolloutId").is_in(chosen)).select([*_ROW, *_KEYS]).select(as_text)
        assert resolved.select([*_ROW, *_KEYS]).unique().select(as_text).sort(_ROW).equals(ours.sort(_ROW))
        assert resolved["RunId"].unique().to_list() in ([f"{prefix}run"], [])


def test_rollout_of_a_span_that_names_none_is_that_of_its_resource(store: StoreSettings) -> None:
    prefix, client, begin = uuid.uuid4().hex, client_of(store), datetime(2026, 1, 1, tzinfo=UTC)

    def identity(rollout: str, attempt: str) -> dict[str, str]:
        of_run = {"spangrad.run.id": f"run of {rollout}", "spangrad.rollout.mode": "train"}
        return {**of_run, "spangrad.rollout.id": f"{prefix}-{rollout}", "spangrad.rollout.attempt": attempt}

    resource = identity("process", "2")
    spans = {
        "nothing": {},
        "session": {"session.id": "s"},
        "itself": identity("span", "1"),
        "no attempt": {"spangrad.rollout.id": f"{prefix}-span"},
    }
    names = ["Timestamp", "TraceId", "SpanId", "SpanName", "SpanAttributes", "ResourceAttributes"]
    rows = [[begin, f"{prefix}-{name}", f"{number:016x}", name, own, resource] for number, (name, own) in enumerate(spans.items())]
    client.insert("otel.otel_traces", rows, column_names=names)
    score = {"gen_ai.evaluation.score.value": "1"}
    log = [begin, f"{prefix}-log", f"{9:016x}", "gen_ai.evaluation.result", score, resource]
    client.insert(
        "otel.otel_logs", [log], column_names=["Timestamp", "TraceId", "SpanId", "EventName", "LogAttributes", "ResourceAttributes"]
    )

    columns = "SpanName, RolloutId, Attempt, RunId, Mode"
    selected = f"SELECT {columns} FROM spangrad.rollout_spans WHERE startsWith(TraceId, '{prefix}') ORDER BY SpanId"
    assert client.query(selected).result_rows == [
        ("nothing", f"{prefix}-process", 2, "run of process", "train"),
        ("session", f"{prefix}-process", 2, "run of process", "train"),
        ("itself", f"{prefix}-span", 1, "run of span", "train"),
        ("no attempt", f"{prefix}-span", 0, "", ""),
        ("gen_ai.evaluation.result", f"{prefix}-process", 2, "run of process", "train"),
    ]


def test_rollout_assignment_of_nameless_spans_is_the_same_in_any_set_of_builds(store: StoreSettings) -> None:
    """An agent's own span of a trace of two rollouts belongs to neither, also where only one of them is built."""

    def spans_of(run: str) -> SpanFactory:
        spans = SpanFactory(run=run)
        for rollout in (f"{run}-1", f"{run}-2"):
            root = spans.root(rollout, trace=run, calls=1)
            spans.evaluation(root)
            spans.call(root, rollout=rollout, trace=run)
        nobodys = spans.span("search", root, kind="TOOL", rollout=f"{run}-2", trace=run)
        row = next(row for row in spans.spans if row["SpanId"] == nobodys)
        row |= {"RunId": "", "Mode": "", "RolloutKey": row["TraceId"], "RolloutKeySource": "trace"}
        return spans

    def tools(run: str) -> list[Any]:
        sql = f"SELECT RolloutId, ToolCalls FROM spangrad.rollouts WHERE RunId = '{run}' ORDER BY RolloutId"
        return [tuple(row) for row in client_of(store).query(sql).result_rows]

    together, apart = spans_of("beside"), spans_of("apart")
    post(store, together.otlp())
    build_once(settings_of(store, "beside"))
    assert tools("beside") == [("beside-1", 0), ("beside-2", 0)]

    second = [str(row["SpanId"]) for row in apart.spans if row["RolloutKey"] != "apart-1"]
    first = [str(row["SpanId"]) for row in apart.spans if row["RolloutKey"] == "apart-1"]
    call = next(row["SpanId"] for row in apart.calls if row["RolloutKey"] == "apart-1")
    post(store, apart.otlp(*(span for span in first if span == call), *second))  # the first rollout has not ended
    build_once(settings_of(store, "apart"))
    assert tools("apart") == [("apart-2", 0)]
    assert [row[0] for row in outcome(store, "apart")[0]] == ["apart-2"]
