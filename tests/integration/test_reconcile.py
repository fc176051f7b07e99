"""Law 2 on a real store: every call of a rollout that was built is in one place, and a query finds the one that is not."""

from __future__ import annotations

import io
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import replace

import polars as pl
import pytest
from rich.console import Console

from commands.training.build_report import show
from spangrad.settings import BuilderSettings, Selection, Settings, StoreSettings
from spangrad.store.clickhouse import connect
from spangrad.store.names import stored
from tests.support.processes import run_spangrad
from tests.support.servers import running_store, store_settings
from tests.support.spans import SpanFactory
from transition_builder import builder, loop
from transition_builder.frames import Built, Frames
from transition_builder.report import ReconcileReport, Wrong, reconcile_report


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreSettings]:
    """A store of its own: reports are of all that a specification has built."""
    directory = tmp_path_factory.mktemp("reconcile")
    settings = store_settings(directory / "data")
    with running_store(settings, directory / "store.log"):
        yield settings


def post(store: StoreSettings, body: bytes) -> None:
    request = urllib.request.Request(f"{store.otlp_endpoint}/v1/traces", body, {"Content-Type": "application/json"}, method="POST")
    urllib.request.urlopen(request, timeout=30).close()


def settings_of(store: StoreSettings, name: str, **changes: object) -> Settings:
    """A specification of its own."""
    builder = BuilderSettings(selection=Selection(agents=f".*|{name}"), dataset=name, quiet_seconds=0, incomplete_after_seconds=0)
    return Settings(store=store, builder=builder.model_copy(update=changes))


def report(settings: Settings) -> ReconcileReport:
    client = connect(settings.store)
    try:
        return reconcile_report(client, settings.builder.spec)
    finally:
        client.close()


def sums(settings: Settings, run: str) -> list[tuple[object, ...]]:
    client = connect(settings.store)
    columns = "RolloutId, Mode, Calls, Transitions, Drops, Unaccounted, Missing"
    sql = f"SELECT {columns} FROM spangrad.reconcile WHERE RunId = '{run}' AND BuildSpec = '{settings.builder.spec}' ORDER BY RolloutId"
    rows = [tuple(row) for row in client.query(sql).result_rows]
    client.close()
    return rows


def printed(reported: ReconcileReport) -> tuple[int, str]:
    out = io.StringIO()
    code = show(reported, Console(file=out, width=170, color_system=None))
    return code, "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def rollouts(run: str) -> SpanFactory:
    """Three: one of two calls, one with a call of two choices and one without logprobs, one that made no call."""
    spans = SpanFactory(run=run)
    first = spans.root(f"{run}-1", calls=2)
    spans.evaluation(first)
    for _ in range(2):
        spans.call(spans.client(first, rollout=f"{run}-1"), rollout=f"{run}-1")
    second = spans.root(f"{run}-2", calls=2)
    spans.evaluation(second, 0.5)
    spans.call(second, rollout=f"{run}-2", choices=2)
    spans.call(second, rollout=f"{run}-2", Logprobs=[-0.5])
    spans.root(f"{run}-3", calls=0, failure="crash")
    return spans


def test_reconcile_report_lists_late_calls_until_built(own: StoreSettings) -> None:
    spans, settings = rollouts("sum"), settings_of(own, "sum")
    post(own, spans.otlp())
    loop.build_once(settings)
    assert sums(settings, "sum") == [
        ("sum-1", "train", 2, 2, 0, 0, 0),
        ("sum-2", "train", 3, 2, 1, 0, 0),
        ("sum-3", "train", 0, 0, 0, 0, 0),
    ]
    reconciled = report(settings)
    assert reconciled == ReconcileReport(3, 5, 4, {"no_logprobs": 1}, {"attempt_failed": 1}, [])
    assert printed(reconciled) == (
        0,
        """\
What became of the calls of 3 rollouts
                                        calls  remedy
transitions                                 4
dropped as no_logprobs                      1  Have the engine return a logprob for each sampled token: \
the gateway and `spangrad engine` ask for them.
calls                                       5
rollouts without calls, attempt_failed      1  Fix the cause of the failure (the attempt's root span names it), or allow more attempts.
The sum is right: 5 calls = 4 transitions + 1 drop, and the gateway recorded no other.
""",
    )

    late = spans.call(spans.roots[0]["SpanId"], rollout="sum-1")  # type: ignore[arg-type]
    post(own, spans.otlp(late))
    assert sums(settings, "sum")[0] == ("sum-1", "train", 2, 2, 0, 0, 1)
    assert report(settings).wrong == [Wrong("sum", "sum-1", 0, 1)]
    loop.build_once(settings)
    assert report(settings).wrong == []
    assert sums(settings, "sum")[0][2] == 3


def test_reconcile_report_names_call_that_builder_lost(own: StoreSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A builder with a fault: it forgets a transition of every rollout that has several, before anything is counted or written."""
    real = builder.build

    def forgetful(frames: Frames, spec: BuilderSettings, *more: object, **others: object) -> Built:
        built = real(frames, spec, *more, **others)  # type: ignore[arg-type]
        return replace(built, transitions=built.transitions.filter(pl.col("Turn") != 1))

    settings = settings_of(own, "lost")
    post(own, rollouts("lost").otlp())
    monkeypatch.setattr(builder, "build", forgetful)
    loop.build_once(settings)
    assert [row for row in sums(settings, "lost") if row[-2:] != (0, 0)] == [("lost-1", "train", 1, 1, 0, 0, 1)]
    reconciled = report(settings)
    assert not reconciled.is_right
    assert Wrong("lost", "lost-1", 0, 1) in reconciled.wrong
    code, text = printed(reconciled)
    assert code == 1
    assert "THE SUM IS WRONG" in text
    assert "lost-1 of run lost" in text


def test_reconcile_report_names_rows_missing_or_duplicated_after_build(own: StoreSettings) -> None:
    """One row too few, and one call in both tables."""
    client = connect(own)
    same = {"RunId": "astray", "Mode": "train", "BuildSpec": "astray", "GroupId": "g", "Revision": 0, "Content": 7}

    def insert(table: str, rollout: str, **more: object) -> None:
        row = {**same, "RolloutId": rollout, **more}
        client.insert(f"{stored(table)}", [list(row.values())], column_names=list(row))

    insert("builds", "few", Calls=2, Transitions=2)
    insert("transitions", "few", CallId="a")
    insert("builds", "both", Calls=1, Transitions=1)
    insert("transitions", "both", CallId="b")
    insert("drops", "both", CallId="b", Reason="duplicate")
    insert("builds", "whole", Calls=2, Transitions=1, Drops=2)
    insert("transitions", "whole", CallId="c")
    insert("drops", "whole", CallId="d", Reason="duplicate")
    insert("drops", "whole", CallId="", Reason="no_calls")
    reconciled = reconcile_report(client, "astray")
    client.close()
    assert reconciled.wrong == [Wrong("astray", "both", 1, 0), Wrong("astray", "few", 1, 0)]
    assert not reconciled.is_right


def test_reconcile_report_assigns_unnamed_calls_by_trace(own: StoreSettings) -> None:
    """A gateway's calls of a production trace: told by the trace alone, or by a session that another span names."""
    spans, settings = SpanFactory(run=""), settings_of(own, "traces")
    facts = {"RolloutKeySource": "trace", "Mode": ""}
    agent = spans.span("agent", "", rollout="ses-1", trace="traces", **facts, Attributes={"session.id": "ses-1"})
    spans.call(agent, rollout="ses-1", trace="traces")
    for row in spans.spans:
        row |= facts
    post(own, spans.otlp())
    loop.build_once(settings)
    assert sums(settings, "") == [("ses-1", "production", 1, 0, 1, 0, 0)]


def build_all(own: StoreSettings, *more: str) -> subprocess.CompletedProcess[str]:
    """Run `spangrad build --all` on the store."""
    set_ = [f"store.url={own.url}", "builder.dataset=typed", "builder.selection.agents=.*|typed"]
    return run_spangrad("build", "--all", *(word for setting in set_ for word in ("--set", setting)), *more)


def test_build_all_exits_with_reconcile_report(own: StoreSettings) -> None:
    """Nothing is waited for, the table is printed, and the exit code says whether the sum is right."""
    spans = rollouts("typed")
    waits = spans.root("typed-4", calls=2)  # one of its calls never comes
    spans.evaluation(waits)
    (lost, _) = (spans.call(waits, rollout="typed-4") for _ in range(2))
    post(own, spans.otlp(*(str(row["SpanId"]) for row in spans.spans if row["SpanId"] != lost)))
    done = build_all(own)
    assert done.returncode == 0, done.stderr
    client = connect(own)
    of_run = "RunId = 'typed'"
    kept = client.query(f"SELECT RolloutId, count() FROM spangrad.transitions WHERE {of_run} GROUP BY ALL ORDER BY ALL").result_rows
    dropped = client.query(f"SELECT RolloutId, Reason, Detail FROM spangrad.drops WHERE {of_run} ORDER BY ALL").result_rows
    assert kept == [("typed-1", 2), ("typed-2", 2)]
    assert dropped == [
        ("typed-2", "no_logprobs", "1 logprobs for 2 tokens"),
        ("typed-3", "attempt_failed", "crash"),
        ("typed-4", "incomplete", "1 of 2 calls arrived within 0 s"),
    ]
    # The store is shared with the tests above: what was theirs is built by this specification, too.
    (calls,) = client.query(
        "SELECT sum(Calls) FROM spangrad.builds WHERE BuildSpec IN (SELECT BuildSpec FROM spangrad.builds WHERE " + of_run + ")"
    ).result_rows[0]
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[0].startswith("What became of the calls of ")
    assert lines[-1].startswith(f"The sum is right: {calls} calls = ")
    assert any(line.startswith("dropped as incomplete 1 Find the spans that did not arrive") for line in lines)

    again = build_all(own)
    assert (again.returncode, again.stdout.splitlines()[-1]) == (0, done.stdout.splitlines()[-1])

    client.command(f"ALTER TABLE spangrad_internal.drops DELETE WHERE {of_run} AND Reason = 'no_logprobs' SETTINGS mutations_sync = 1")
    client.close()
    wrong = build_all(own)
    printed_text = " ".join(wrong.stdout.split())
    assert wrong.returncode == 1
    assert f"THE SUM IS WRONG: {calls} calls" in printed_text
    assert "Rollouts: typed-2 of run typed." in printed_text

    refused = build_all(own, "--follow")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "spangrad: --follow waits for new spans; --all and --as-of build what has arrived. Leave one out.\n"
