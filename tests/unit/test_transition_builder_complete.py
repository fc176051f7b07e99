"""Completeness of a rollout: none is built in part, and none waits forever."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import polars as pl
import pytest

from spangrad.settings import BuilderSettings
from tests.support.spans import SpanFactory
from transition_builder.completeness.complete import decide
from transition_builder.completeness.resolve import owners_at_hand, resolve
from transition_builder.frames import Facts, empty
from transition_builder.schemas import COUNTS, NAMES, OWNERS, PRESENCE, ROOTS

SPEC = BuilderSettings(incomplete_after_seconds=600, quiet_seconds=30)


class Arrivals:
    """Facts that have arrived of one rollout, the root at second 0 of the store's clock."""

    def __init__(self) -> None:
        self.roots: list[dict[str, Any]] = []
        self.presence: list[dict[str, Any]] = []
        self.counts: list[dict[str, Any]] = []

    def root(self, attempt: int = 0, *, final: bool = True, **facts: Any) -> Arrivals:
        named = {"RunId": "run", "Mode": "train", "RolloutId": "r", "Attempt": attempt, "GroupId": "g", "GroupSize": 2, "TaskId": "t"}
        arrived = {"TraceId": f"t{attempt}", "SpanId": f"root{attempt}", "IngestedAt": SpanFactory.time(0)}
        self.roots.append(named | arrived | {"Calls": None, "Final": final, "Failure": ""} | facts)
        return self.present(attempt, 0)

    def present(self, attempt: int, seconds: float, evaluations: int = 0, **facts: Any) -> Arrivals:
        self.presence.append(
            {"RunId": "run", "RolloutKey": "r", "RolloutKeySource": "rollout", "Attempt": attempt, "TraceId": f"t{attempt}"}
            | {"Evaluations": evaluations, "LastArrival": SpanFactory.time(seconds)}
            | facts
        )
        return self

    def calls(self, attempt: int, count: int, **facts: Any) -> Arrivals:
        named = {"RunId": "run", "RolloutKey": "r", "RolloutKeySource": "rollout", "Attempt": attempt, "TraceId": f"t{attempt}"}
        self.counts.append(named | {"Calls": count} | facts)
        return self

    def decided(self, at: float, spec: BuilderSettings = SPEC) -> pl.DataFrame:
        facts = Facts(
            pl.DataFrame(self.roots, schema=dict(ROOTS)),
            pl.DataFrame(self.presence, schema=dict(PRESENCE)),
            pl.DataFrame(self.counts, schema=dict(COUNTS)),
        )
        return decide(facts, SpanFactory.time(at), spec)

    def verdict(self, at: float, spec: BuilderSettings = SPEC) -> tuple[str, str]:
        (row,) = self.decided(at, spec).select("Verdict", "Detail").rows()
        return row

    def changes_at(self, at: float) -> datetime | None:
        return self.decided(at)["ChangesAt"].item()


def test_decide_complete_with_counted_calls_and_reward() -> None:
    arrivals = Arrivals().root(Calls=3).calls(0, 2)
    assert arrivals.verdict(1) == ("waiting", "")
    arrivals.calls(0, 1)
    assert arrivals.verdict(1) == ("waiting", "")
    arrivals.present(0, 1, evaluations=1)
    assert arrivals.verdict(1) == ("complete", "")


def test_decide_more_calls_than_counted_is_complete() -> None:
    assert Arrivals().root(Calls=1).calls(0, 2).present(0, 0, 1).verdict(1) == ("complete", "")


@pytest.mark.parametrize("changes", [{"rewards_from": "rules"}, {"sql_rewards": ("brevity",)}])
def test_decide_with_rule_or_sql_rewards_waits_for_no_reward(changes: dict[str, Any]) -> None:
    spec = SPEC.model_copy(update=changes)
    arrivals = Arrivals().root(Calls=2).calls(0, 1)
    assert arrivals.verdict(1, spec) == ("waiting", "")
    arrivals.calls(0, 1)
    assert arrivals.verdict(1, spec) == ("complete", "")
    assert arrivals.verdict(1) == ("waiting", "")


def test_decide_failed_attempt_needs_calls_and_no_reward() -> None:
    arrivals = Arrivals().root(Calls=1, Failure="crash")
    assert arrivals.verdict(1) == ("waiting", "")
    assert arrivals.calls(0, 1).verdict(1) == ("complete", "")


def test_decide_after_wait_missing_calls_are_incomplete_and_missing_reward_complete() -> None:
    short = Arrivals().root(Calls=3).calls(0, 2).present(0, 1, 1)
    assert short.verdict(599.9) == ("waiting", "")
    assert short.verdict(600) == ("incomplete", "2 of 3 calls arrived within 600 s")
    assert Arrivals().root(Calls=1, Failure="crash").verdict(600) == (
        "incomplete",
        "0 of 1 calls arrived within 600 s; the attempt failed: crash",
    )
    mute = Arrivals().root(Calls=1).calls(0, 1)
    assert mute.verdict(599.9) == ("waiting", "")
    assert mute.verdict(600) == ("complete", "")


def test_decide_without_call_count_is_complete_when_quiet() -> None:
    arrivals = Arrivals().root().present(0, 0, 1)
    assert arrivals.verdict(29.9) == ("waiting", "")
    assert arrivals.verdict(30) == ("complete", "")
    arrivals.present(0, 20)
    assert arrivals.verdict(30) == ("waiting", "")
    assert arrivals.verdict(50) == ("complete", "")
    assert Arrivals().root().verdict(599) == ("waiting", "")
    assert Arrivals().root().verdict(600) == ("complete", "")


def test_decide_waiting_rollout_has_time_at_which_its_age_decides() -> None:
    lacking = Arrivals().root(Calls=1)
    assert lacking.changes_at(1) == SpanFactory.time(600)
    lacking.calls(0, 1).present(0, 1, 1)
    assert lacking.changes_at(1) is None
    uncounted = Arrivals().root().present(0, 20)
    assert uncounted.changes_at(20) == SpanFactory.time(50)  # quiet by then
    assert uncounted.changes_at(50) == SpanFactory.time(600)  # its reward is awaited until then


def test_decide_calls_of_earlier_attempts_are_awaited_but_not_required() -> None:
    arrivals = Arrivals().root(0, final=False, Calls=2, Failure="crash").calls(0, 1).root(1, Calls=1).calls(1, 1).present(1, 1, 1)
    assert arrivals.verdict(1) == ("waiting", "")
    assert arrivals.verdict(600) == ("complete", "")
    assert arrivals.calls(0, 1).verdict(1) == ("complete", "")


def test_decide_root_of_earlier_attempt_is_awaited() -> None:
    arrivals = Arrivals().root(1, Calls=0).present(1, 0, 1)
    assert arrivals.verdict(1) == ("waiting", "")
    assert arrivals.verdict(600) == ("complete", "")
    assert arrivals.root(0, final=False, Calls=0).verdict(1) == ("complete", "")


def test_decide_two_roots_of_attempt_uses_final_one() -> None:
    """A worker wrote its attempt's and died; then the rollout was cancelled."""
    arrivals = Arrivals().root(Calls=1, final=False, Failure="exception").calls(0, 1)
    arrivals.root(Calls=1, Failure="cancelled", IngestedAt=SpanFactory.time(60))
    assert arrivals.verdict(60) == ("complete", "")


def test_decide_rewards_of_earlier_attempt_do_not_count() -> None:
    arrivals = Arrivals().root(0, final=False, Calls=0).present(0, 0, 1).root(1, Calls=0)
    assert arrivals.verdict(1) == ("waiting", "")


def test_decide_rollout_without_final_root_has_no_verdict() -> None:
    facts = Facts(
        pl.DataFrame(Arrivals().root(final=False, Calls=0).roots, schema=dict(ROOTS)),
        pl.DataFrame(schema=dict(PRESENCE)),
        pl.DataFrame(schema=dict(COUNTS)),
    )
    assert decide(facts, SpanFactory.time(1e6), SPEC).rows() == []


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        ({"RunId": ""}, "complete"),  # it names its rollout, not its run
        ({"RunId": "other run"}, "waiting"),
    ],
)
def test_decide_calls_of_other_run_do_not_count(facts: dict[str, Any], verdict: str) -> None:
    assert Arrivals().root(Calls=1).present(0, 0, 1).calls(0, 1, **facts).verdict(1) == (verdict, "")


@pytest.mark.parametrize(("shared", "owner"), [(False, [("run", "r", 1)]), (True, [])])
def test_resolve_trace_shared_by_attempts_gives_no_owner(shared: bool, owner: list[tuple[str, str, int]]) -> None:
    arrivals = Arrivals().present(1, 0)
    if shared:
        arrivals.present(0, 0, TraceId="t1")
    foreign = arrivals.calls(9, 1, RunId="", RolloutKeySource="trace", RolloutKey="t1", TraceId="t1").counts
    rollouts = pl.DataFrame({"RunId": ["run"], "RolloutId": ["r"]})
    calls = pl.DataFrame(foreign, schema=dict(COUNTS))
    rows = pl.concat(
        [frame.select(*NAMES, RowKind=pl.lit("span")) for frame in (calls, pl.DataFrame(arrivals.presence, schema=dict(PRESENCE)))]
    )
    resolved = resolve(calls, owners_at_hand(rows, empty(OWNERS)), rollouts)
    assert resolved.select("RunId", "RolloutId", "Attempt").rows() == owner
