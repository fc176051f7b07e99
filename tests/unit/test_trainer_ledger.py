"""The ledger: law 4, crash by crash."""

from __future__ import annotations

from pathlib import Path

import pytest
from crash import crashes

from spangrad.errors import LedgerError
from spangrad.types import PolicyVersion, VersionStatus
from trainer import ledger as ledger_module
from trainer.eligibility import ExpiryReason
from trainer.ledger import Ledger
from trainer.source import BatchRollout, Group

FACTS = {"checksum": "float32:01", "path": "/v1", "tokenizer_hash": "tokenizer", "metrics": {"loss": 0.5}}


def group(name: str, mode: str = "train", spec: str = "spec") -> Group:
    return Group("run", mode, spec, name)


def rollouts(*names: str, of: str = "g") -> list[BatchRollout]:
    return [BatchRollout(group(of), name, 0, 0) for name in names]


def opened(directory: Path) -> Ledger:
    return Ledger(directory, "policy", "main")


def begun(directory: Path) -> Ledger:
    ledger = opened(directory)
    ledger.register_initial(PolicyVersion("policy", 0, None, None, "float32:00", "/v0"), "tokenizer", "run")
    return ledger


def test_the_whole_story_of_a_batch(tmp_path: Path):
    ledger = begun(tmp_path)
    lease = ledger.begin(rollouts("a", "b"))
    assert (lease.version, lease.parent) == (1, 0)
    assert [(one.version, one.status) for one in ledger.versions()] == [(0, VersionStatus.COMMITTED), (1, None)]
    ledger.commit(lease, **FACTS)
    newest = ledger.frontier()
    assert newest
    assert newest.policy_version == PolicyVersion("policy", 1, 0, lease.batch_id, "float32:01", "/v1")
    assert (newest.status, newest.metrics, newest.modes, newest.run_id) == (VersionStatus.COMMITTED, {"loss": 0.5}, "train", "run")
    ledger.add_metrics(1, {"seconds_publish": 0.25})
    assert ledger.versions()[1].metrics == {"loss": 0.5, "seconds_publish": 0.25}
    assert ledger.batch(lease.batch_id) == rollouts("a", "b")
    assert ledger.finished_groups("run", "any other spec") == {("train", "g")}


def test_a_rollout_is_never_in_two_batches(tmp_path: Path):
    ledger = begun(tmp_path)
    ledger.commit(ledger.begin(rollouts("a", "b")), **FACTS)
    # Another group, another revision: the same attempt of the same rollout all the same.
    with pytest.raises(LedgerError, match="already in another batch of policy/main"):
        ledger.begin([*rollouts("c", of="other"), BatchRollout(group("other"), "b", 0, 7)])
    assert [one.version for one in ledger.versions()] == [0, 1], "the refused batch left nothing"
    assert ledger.finished_groups("run", "spec") == {("train", "g")}
    assert ledger.begin([BatchRollout(group("other"), "b", 1, 0)]).version == 2, "another attempt is another key"


def test_a_crash_orphans_the_number_and_frees_the_rollouts(tmp_path: Path):
    ledger = begun(tmp_path)
    lost = ledger.begin(rollouts("a"))
    ledger.close()
    ledger = opened(tmp_path)
    assert ledger.recover() == [1]
    assert ledger.recover() == []
    assert ledger.versions()[1].status is VersionStatus.ORPHANED
    assert ledger.finished_groups("run", "spec") == set()
    again = ledger.begin(rollouts("a"))
    assert (again.version, again.parent) == (2, 0)
    with pytest.raises(LedgerError, match="is gone"):
        ledger.commit(lost, **FACTS)
    ledger.commit(again, **FACTS)
    assert ledger.committed_versions() == [0, 2]


def test_every_boundary_of_begin_and_commit_is_a_safe_place_to_die(tmp_path: Path):
    """Law 4: whatever instruction is the last, recovery leaves all of a batch or nothing, and the next run does the rest once."""

    def train(boundary: int, groups: tuple[str, ...] = ("g1",)) -> None:
        ledger = opened(tmp_path / str(boundary))
        ledger.recover()
        if ledger.frontier() is None:
            ledger.register_initial(PolicyVersion("policy", 0, None, None, "float32:00", "/v0"), "tokenizer", "run")
        for name in groups:
            if ("train", name) not in ledger.finished_groups("run", "spec"):
                ledger.commit(ledger.begin(rollouts(f"{name}-a", f"{name}-b", of=name)), **FACTS)
        ledger.close()

    def trained(boundary: int) -> tuple[list[str], list[VersionStatus | None]]:
        """What is trained, after checking that each version is whole or nothing, and that numbers and parents make one line."""
        ledger = opened(tmp_path / str(boundary))
        ledger.recover()
        versions, parent, found = ledger.versions(), None, []
        assert [one.version for one in versions] == list(range(len(versions))), "a number was used twice or skipped"
        for one in versions:
            rows = [row.rollout_id for row in ledger.batch(one.policy_version.batch_id or "")]
            if one.status is VersionStatus.ORPHANED:
                assert rows == []
            else:
                assert one.policy_version.parent == parent
                assert len(rows) == (0 if parent is None else 2)
                parent = one.version
            found += rows
        assert ledger.finished_groups("run", "spec") == {("train", name[:2]) for name in found}
        ledger.close()
        return found, [one.status for one in versions]

    whole = ["g1-a", "g1-b", "g2-a", "g2-b"]
    seen: set[tuple[int, int]] = set()
    for boundary in crashes(train, Path(ledger_module.__file__), {"begin", "commit", "recover"}):
        found, statuses = trained(boundary)
        assert found == whole[: len(found)], "a rollout was repeated or skipped"
        seen.add((len(found), statuses.count(VersionStatus.ORPHANED)))
        train(boundary, ("g1", "g2"))
        assert trained(boundary)[0] == whole
    assert seen == {(0, 0), (0, 1), (2, 0)}, "deaths fell before, within and after the batch"


def test_expired_groups_stay_out_and_are_counted(tmp_path: Path):
    ledger = begun(tmp_path)
    ledger.expire([group("x"), group("y")], ExpiryReason.STALE)
    ledger.expire([group("x")], ExpiryReason.GREEDY)
    assert ledger.expired() == {group("x"): ExpiryReason.STALE, group("y"): ExpiryReason.STALE}
    assert ledger.finished_groups("run", "spec") == {("train", "x"), ("train", "y")}
    assert ledger.finished_groups("run", "another specification may do better") == set()
    assert ledger.finished_groups("another run", "spec") == set()


def test_branches_have_their_own_versions_and_leases(tmp_path: Path):
    main = begun(tmp_path)
    main.begin(rollouts("a"))
    other = Ledger(tmp_path, "policy", "other")
    assert (other.recover(), other.versions(), other.finished_groups("run", "spec")) == ([], [], set())
    other.register_initial(PolicyVersion("policy", 0, None, None, "float32:00", "/v0"), "tokenizer", "run")
    assert other.begin(rollouts("a")).version == 1
    assert main.recover() == [1]
    assert other.finished_groups("run", "spec") == {("train", "g")}


def test_two_trainers_of_one_branch_are_refused(tmp_path: Path):
    first = opened(tmp_path)
    with pytest.raises(LedgerError, match="another process trains policy/main"):
        opened(tmp_path)
    first.close()
    opened(tmp_path).close()


def test_weights_to_begin_with_come_first_and_once(tmp_path: Path):
    with pytest.raises(LedgerError, match="no weights to train"):
        opened(tmp_path / "empty").begin(rollouts("a"))
    ledger = begun(tmp_path)
    with pytest.raises(LedgerError, match="already has versions"):
        ledger.register_initial(PolicyVersion("policy", 0, None, None, "float32:00", "/v0"), "tokenizer", "run")
