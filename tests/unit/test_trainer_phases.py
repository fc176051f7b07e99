"""Policies that are trained in phases: no version is served before all are updated, and no group of two phases is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from spangrad.errors import LedgerError, SettingsError
from tests.support.phases import PLAYERS, PhaseTable
from tests.support.policies import trainer_settings
from tests.support.trainers import group, write_base
from trainer.data import planning
from trainer.data.plan import GroupOutcome, TrainPlan
from trainer.ledger.skips import Skip, SkipReason
from trainer.phases import Phases, check


@pytest.fixture
def table(tmp_path: Path) -> PhaseTable:
    table = PhaseTable(write_base(tmp_path / "base"), tmp_path / "policies")
    for policy in PLAYERS:
        assert not table.turn(policy), "nothing is played yet"
    return table


def test_phases_version_is_served_once_all_policies_are_updated(table: PhaseTable) -> None:
    table.play("a", "b")
    assert table.turn("black")
    assert (table.heads(), table.served()) == ({"black": 1, "white": 0}, {"black": 0, "white": 0})
    assert not table.turn("black")
    assert table.served() == {"black": 0, "white": 0}
    assert table.turn("white")
    assert table.served() == {"black": 0, "white": 1}, "the last to be updated is served at once"
    table.play("mixed-1", "mixed-2")
    assert not table.turn("white"), "black is not served"
    assert not table.turn("black")
    assert table.served() == {"black": 1, "white": 1}
    table.play("c", "d")
    assert [table.turn(policy) for policy in PLAYERS] == [True, True]
    skipped = {skipped.group_id: reason for skipped, reason in table.trainers["white"].ledger.skips.reasons().items()}
    assert skipped == dict.fromkeys(("mixed-1", "mixed-2"), SkipReason.OTHER_PHASE)
    phases = [version.metrics.get("phase") for version in table.trainers["black"].ledger.versions()]
    assert phases == [None, 0, 1]


def test_phases_demand_waits_until_all_policies_are_served(table: PhaseTable, monkeypatch: pytest.MonkeyPatch) -> None:
    black, white = (table.trainers[policy] for policy in PLAYERS)
    demanded: list[int] = []
    monkeypatch.setattr(black.demand, "call", lambda ready=0: demanded.append(black.phases.number))
    table.play("a", "b")
    black.run(follow=False)
    assert (set(demanded), black.phases.number) == ({0}, 1), "nothing is demanded of the phase that has not begun"
    white.run(follow=False)
    black.run(follow=False)
    assert set(demanded) == {0, 1}


def test_plan_in_phases_equals_trained_groups(table: PhaseTable, monkeypatch: pytest.MonkeyPatch) -> None:
    black = table.trainers["black"]
    monkeypatch.setattr(planning, "GroupReader", lambda _client, _settings: table.source)

    def plan() -> TrainPlan:
        return planning.plan_of(black.settings, None, black.ledger)  # type: ignore[arg-type]

    table.source.play("other", {"black": 0, "white": 7})
    table.play("a", "b")
    outcomes = {row.group_id: (row.outcome, row.batch, row.reason) for row in plan().groups}
    trained = (GroupOutcome.BATCH, 1, None)
    assert outcomes == {"other": (GroupOutcome.SKIPPED, None, SkipReason.OTHER_PHASE), "a": trained, "b": trained}
    assert table.turn("black")
    table.play("c", "d")
    closed = plan()
    assert [row.group_id for row in closed.with_outcome(GroupOutcome.PHASE)] == ["c", "d"]
    assert (closed.batches, table.turn("black")) == (0, False)
    assert closed.summary.startswith(
        "there is nothing to train: the phase begins once white is updated and served (trainer.phase_policies)"
    )
    assert planning.plan_of(black.settings, None, None).batches == 0, "without a ledger no policy is served"  # type: ignore[arg-type]


@pytest.mark.parametrize("killed", [("black",), ("white",), PLAYERS])
def test_phases_kill_between_two_updates_resumes_the_phase(table: PhaseTable, killed: tuple[str, ...]) -> None:
    table.play("a", "b")
    assert table.turn("black")
    for policy in killed:
        table.kill(policy)
    for policy in killed:
        table.start(policy)
    assert table.served() == {"black": 0, "white": 0}, "a start serves no version whose phase has not begun"
    assert not table.turn("black")
    assert table.turn("white")
    assert not table.turn("black")
    assert (table.heads(), table.served()) == (dict.fromkeys(PLAYERS, 1), dict.fromkeys(PLAYERS, 1))
    table.play("c", "d")
    assert [table.turn(policy) for policy in PLAYERS] == [True, True]


def test_phases_policy_that_lacks_groups_gets_them_from_the_same_versions(table: PhaseTable) -> None:
    table.play("a", "b")
    assert table.turn("black")
    table.trainers["white"].ledger.skips.enter({group("a"): Skip(SkipReason.NOT_FINITE)}, 0)
    assert not table.turn("white")
    table.play("more")
    assert table.turn("white"), "both still play by version 0"
    assert not table.turn("black")
    assert table.served() == dict.fromkeys(PLAYERS, 1)
    table.play("c", "d")
    assert table.turn("black"), "the group of the last phase is stale for it"


def test_phases_read_other_ledgers_again_where_their_database_was_away(table: PhaseTable) -> None:
    ledger = table.trainers["black"].ledger
    errors, failures = list[BaseException](), [OperationalError("BEGIN", None, Exception("database is locked"))]

    def repeat(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except LedgerError as error:
            errors.append(error)
            return work()

    def fail(_: object) -> None:
        if failures:
            raise failures.pop()

    ledger.database.retries = repeat
    phases = Phases(ledger, table.trainers["black"].settings.trainer)
    event.listen(phases._others["white"].database.engine, "begin", fail)
    assert phases.versions() == {"white": 0}
    assert len(errors) == 1
    phases.close()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"phase_policies": ("policy",)}, "phase_policies"),
        ({"max_staleness": 1}, "max_staleness"),
        ({"checkpoint__after_crash": "orphan", "checkpoint__every": 2}, "after_crash"),
        ({"evaluation__every": 1, "evaluation__command": ("true",)}, "evaluation"),
    ],
)
def test_check_of_settings_that_break_phases_raises(changes: dict[str, object], named: str) -> None:
    check(trainer_settings(**{**changes, "phase_policies": ()}))
    with pytest.raises(SettingsError, match=named):
        check(trainer_settings(**{"phase_policies": ("other",), **changes}))
