"""The ledger: law 4, crash by crash."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spangrad.errors import LedgerError
from spangrad.types import PolicyVersion, VersionStatus
from tests.support.policies import skip
from tests.support.processes import crashes
from tests.support.trainers import Place
from trainer.data.source import BatchRollout, Group
from trainer.ledger import ledger as ledger_module
from trainer.ledger.file_batches import BatchFile, FileBatch, file_batch_of, last_of, trained_attempts
from trainer.ledger.ledger import Ledger
from trainer.ledger.policies import overview, skipped_by
from trainer.ledger.skips import SkipReason

BASE = {"checksum": "float32:00", "path": "/v0", "tokenizer_hash": "tokenizer", "run_id": "run"}
FACTS: dict[str, Any] = {"checksum": "float32:01", "path": "/v1", "tokenizer_hash": "tokenizer", "metrics": {"loss": 0.5}}


def group(name: str, mode: str = "train", spec: str = "spec") -> Group:
    return Group("run", mode, spec, name)


def rollouts(*names: str, of: str = "g") -> list[BatchRollout]:
    return [BatchRollout(group(of), name, 0, 0) for name in names]


def opened(place: Place, name: object = "", **changes: Any) -> Ledger:
    return Ledger(place(name) if name != "" else place(), "policy", "main", **changes)


def begun(place: Place) -> Ledger:
    ledger = opened(place)
    ledger.register_initial(**BASE)
    return ledger


def test_ledger_batch_lifecycle_from_begin_to_commit(place: Place):
    ledger = begun(place)
    lease = ledger.begin(rollouts("a", "b"))
    assert (lease.version, lease.parent) == (1, 0)
    assert [(version.version, version.status) for version in ledger.versions()] == [(0, VersionStatus.COMMITTED), (1, None)]
    ledger.commit(lease, **FACTS)
    newest = ledger.frontier()
    assert newest
    assert newest.policy_version == PolicyVersion("policy", 1, 0, lease.batch_id, "float32:01", "/v1")
    assert (newest.status, newest.metrics, newest.modes, newest.run_id) == (VersionStatus.COMMITTED, {"loss": 0.5}, "train", "run")
    ledger.add_metrics(1, {"seconds_publish": 0.25})
    assert ledger.versions()[1].metrics == {"loss": 0.5, "seconds_publish": 0.25}
    assert ledger.batch(lease.batch_id) == rollouts("a", "b")
    assert set.union(*ledger.finished_groups("run", "any other spec")) == {("train", "g")}


def test_ledger_begin_with_rollout_of_another_batch_raises(place: Place):
    ledger = begun(place)
    ledger.commit(ledger.begin(rollouts("a", "b")), **FACTS)
    # Another group, another revision: the same attempt of the same rollout all the same.
    with pytest.raises(LedgerError, match="already in another batch of policy/main"):
        ledger.begin([*rollouts("c", of="other"), BatchRollout(group("other"), "b", 0, 7)])
    assert [version.version for version in ledger.versions()] == [0, 1], "the refused batch left nothing"
    assert set.union(*ledger.finished_groups("run", "spec")) == {("train", "g")}
    assert ledger.begin([BatchRollout(group("other"), "b", 1, 0)]).version == 2, "another attempt is another key"


def test_ledger_recover_after_crash_orphans_version_and_frees_rollouts(place: Place):
    ledger = begun(place)
    lost = ledger.begin(rollouts("a"))
    ledger.close()
    ledger = opened(place)
    assert ledger.recover() == [1]
    assert ledger.recover() == []
    assert ledger.versions()[1].status is VersionStatus.ORPHANED
    assert set.union(*ledger.finished_groups("run", "spec")) == set()
    again = ledger.begin(rollouts("a"))
    assert (again.version, again.parent) == (2, 0)
    with pytest.raises(LedgerError, match="is gone"):
        ledger.commit(lost, **FACTS)
    ledger.commit(again, **FACTS)
    assert ledger.committed_versions() == [0, 2]


@pytest.mark.parametrize("place", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True)
def test_ledger_killed_at_any_boundary_of_begin_and_commit_recovers(place: Place):
    """Law 4: whatever instruction is the last, recovery leaves all of a batch or nothing, and the next run does the rest once."""

    def train(boundary: int, groups: tuple[str, ...] = ("g1",)) -> None:
        ledger = opened(place, boundary)
        ledger.recover()
        if ledger.frontier() is None:
            ledger.register_initial(**BASE)
        for name in groups:
            if ("train", name) not in set.union(*ledger.finished_groups("run", "spec")):
                ledger.commit(ledger.begin(rollouts(f"{name}-a", f"{name}-b", of=name)), **FACTS)
        ledger.close()

    def trained(boundary: int) -> tuple[list[str], list[VersionStatus | None]]:
        """Return the rollouts trained and the versions' statuses; check that versions are whole or nothing, and make one line."""
        ledger = opened(place, boundary)
        ledger.recover()
        versions, parent, rollout_ids = ledger.versions(), None, []
        assert [version.version for version in versions] == list(range(len(versions))), "a number was used twice or skipped"
        for version in versions:
            rows = [row.rollout_id for row in ledger.batch(version.policy_version.batch_id or "")]
            if version.status is VersionStatus.ORPHANED:
                assert rows == []
            else:
                assert (version.policy_version.parent, version.parent_branch) == (parent, "" if parent is None else "main")
                assert len(rows) == (0 if parent is None else 2)
                parent = version.version
            rollout_ids += rows
        assert set.union(*ledger.finished_groups("run", "spec")) == {("train", name[:2]) for name in rollout_ids}
        ledger.close()
        return rollout_ids, [version.status for version in versions]

    whole = ["g1-a", "g1-b", "g2-a", "g2-b"]
    seen: set[tuple[int, int]] = set()
    for boundary in crashes(train, {ledger_module.__file__: {"begin", "commit", "recover"}}):
        rollout_ids, statuses = trained(boundary)
        assert rollout_ids == whole[: len(rollout_ids)], "a rollout was repeated or skipped"
        seen.add((len(rollout_ids), statuses.count(VersionStatus.ORPHANED)))
        train(boundary, ("g1", "g2"))
        assert trained(boundary)[0] == whole
    assert seen == {(0, 0), (0, 1), (2, 0)}, "deaths fell before, within and after the batch"


def test_ledger_skipped_groups_are_finished_and_counted(place: Place):
    ledger = begun(place)
    skip(ledger, [group("x"), group("y")], SkipReason.STALE)
    skip(ledger, [group("x")], SkipReason.GREEDY)
    assert skipped_by(ledger.database, group("x")) == [("policy", "main", "stale", "")]
    assert skipped_by(ledger.database, group("z")) == []
    assert ledger.skips.reasons() == {group("x"): SkipReason.STALE, group("y"): SkipReason.STALE}
    assert set.union(*ledger.finished_groups("run", "spec")) == {("train", "x"), ("train", "y")}
    assert set.union(*ledger.finished_groups("run", "another specification may do better")) == set()
    assert set.union(*ledger.finished_groups("another run", "spec")) == set()


def test_failures_are_counted_among_groups_of_their_own_run(place: Place):
    """Other runs of the branch, and runs over files, train none of its groups."""
    ledger = begun(place)
    skip(ledger, [group(name) for name in "abcd"], SkipReason.NOT_FINITE)
    for number in range(8):
        ledger.commit(ledger.begin(rollouts(f"r{number}", of=f"g{number}")), **FACTS)
    assert ledger.skips.failures("run", 8).count == 0
    for number in range(8):
        ledger.commit(ledger.begin([BatchRollout(replace(group("g"), run_id="another run"), f"other-{number}", 0, 0)]), **FACTS)
    assert ledger.skips.failures("run", 8).count == 0
    for number in range(8):
        ledger.commit(ledger.begin(rollouts("a"), files=FileBatch("sft", "one", number, 8, "examples", ())), **FACTS)
    assert ledger.skips.failures("run", 8).count == 0


def test_overview_is_read_while_another_process_writes(place: Place):
    """A read that took the write lock would fail once SQLite's time limit for it is over."""
    ledger, reader = begun(place), opened(place)
    skip(ledger, [group("a")], SkipReason.STALE)
    batch = FileBatch("sft", "one", 1, 2, "examples", ())
    ledger.commit(ledger.begin(rollouts("r"), files=batch), **FACTS)
    with ledger.database.transaction():
        assert [version.version for version in overview(reader.database).versions] == [0, 1]
        assert skipped_by(reader.database, group("a")) == [("policy", "main", "stale", "")]
        assert last_of(reader.database, "policy", "main", "one", [0, 1]) == (1, batch)
        assert trained_attempts(reader.database, "policy", "main", None) == {("run", "r", 0)}


def test_ledger_branches_have_own_versions_and_leases(place: Place):
    main = begun(place)
    main.begin(rollouts("a"))
    other = Ledger(place(), "policy", "other")
    assert (other.recover(), other.versions(), set.union(*other.finished_groups("run", "spec"))) == ([], [], set())
    other.register_initial(**BASE)
    assert other.begin(rollouts("a")).version == 2, "1 is taken by main"
    assert main.recover() == [1]
    assert set.union(*other.finished_groups("run", "spec")) == {("train", "g")}


def test_ledger_register_initial_is_required_and_once(place: Place):
    with pytest.raises(LedgerError, match="no weights to train"):
        opened(place, "empty").begin(rollouts("a"))
    ledger = begun(place)
    with pytest.raises(LedgerError, match="already has versions"):
        ledger.register_initial(**BASE)


def test_ledger_branch_begins_at_version_with_its_weights(place: Place):
    main = begun(place)
    for number in (1, 2, 3):
        facts = {**FACTS, "checksum": f"float32:0{number}", "path": f"/v{number}"}
        main.commit(main.begin(rollouts(f"r{number}")), **facts)
    brevity = Ledger(place(), "policy", "brevity")
    brevity.register_initial(checksum="float32:02", path="/a copy of v2", tokenizer_hash="tokenizer", run_id="run")
    (first,) = brevity.versions()
    assert first.policy_version == PolicyVersion("policy", 2, 2, None, "float32:02", "/a copy of v2")
    assert (first.branch, first.parent_branch, first.modes, first.metrics) == ("brevity", "main", "", {})
    assert (brevity.lineage(), brevity.committed_versions()) == ([0, 1, 2], [2]), "3 came after the fork"
    assert (main.parents_of_other_branches(), brevity.parents_of_other_branches()) == ({2}, set())

    lease = brevity.begin(rollouts("r1", "r2"))
    assert (lease.version, lease.parent) == (4, 2), "3 is main's; what main trained on may be trained here"
    brevity.commit(lease, **{**FACTS, "checksum": "float32:04", "path": "/v4"})
    assert [(version.version, version.policy_version.parent, version.parent_branch) for version in brevity.versions()] == [
        (2, 2, "main"), (4, 2, "brevity"),
    ]  # fmt: skip
    assert brevity.lineage() == [0, 1, 2, 4]
    assert main.parents_of_other_branches() == {2}, "the optimizer's state of brevity may begin there"
    assert (main.begin(rollouts("r5")).version, main.lineage()) == (5, [0, 1, 2, 3])

    again = Ledger(place(), "policy", "a branch of a branch")
    again.register_initial(checksum="float32:04", path="/v4", tokenizer_hash="tokenizer", run_id="run")
    assert (again.lineage(), again.versions()[0].parent_branch) == ([0, 1, 2, 4], "brevity")


def test_ledger_version_is_lent_to_every_branch_at_it(place: Place):
    main = begun(place)
    main.commit(main.begin(rollouts("a")), **FACTS)
    first, second = (Ledger(place(), "policy", name) for name in ("a sibling", "second"))
    for branch in (first, second):
        branch.register_initial(**{**BASE, "checksum": "float32:01", "path": "/v1"})
        if branch is first:
            first.commit(first.begin(rollouts("a")), **{**FACTS, "checksum": "float32:02", "path": "/v2"})
    assert second.versions()[0].parent_branch == "a sibling", "whose beginning it is, too; but the files are main's"
    main.commit(main.begin(rollouts("b")), **{**FACTS, "checksum": "float32:03", "path": "/v3"})
    assert main.parents_of_other_branches() == {1}
    second.commit(second.begin(rollouts("a")), **{**FACTS, "checksum": "float32:04", "path": "/v4"})
    assert main.parents_of_other_branches() == {1}
    elsewhere = Ledger(place(), "another policy", "second")
    elsewhere.register_initial(**BASE)
    assert main.parents_of_other_branches() == {1}, "another policy's 0 is another version"


def test_ledger_branch_of_uncommitted_weights_has_own_past(place: Place):
    main = begun(place)
    main.commit(main.begin(rollouts("a")), **FACTS)
    lost = main.begin(rollouts("b"))
    for name, changes in {"other weights": {"checksum": "float32:99"}, "other tokenizer": {"tokenizer_hash": "t"}}.items():
        branch = Ledger(place(), "policy", name)
        branch.register_initial(**{**BASE, **changes})
        number = {"other weights": 3, "other tokenizer": 4}[name]
        assert (branch.lineage(), branch.versions()[0].policy_version.parent, branch.versions()[0].parent_branch) == ([number], None, "")
    assert lost.version == 2
    policy = Ledger(place(), "another policy", "main")
    policy.register_initial(**BASE)
    assert policy.lineage() == [0], "each policy counts from 0"


def test_ledger_branch_of_equal_weights_begins_at_version_with_its_path(place: Place):
    main = begun(place)
    for number in (1, 2):  # steps in which every advantage was 0
        main.commit(main.begin(rollouts(f"r{number}")), **{**FACTS, "checksum": BASE["checksum"], "path": f"/v{number}"})
    for name, path, number in (("one", "/v1", 1), ("elsewhere", "/copy", 2)):
        branch = Ledger(place(), "policy", name)
        branch.register_initial(**{**BASE, "path": path})
        assert branch.lineage() == list(range(number + 1))


def test_ledger_file_batch_names_rollouts_and_claims_none(place: Place):
    ledger = Ledger(place(), "policy", "main")
    ledger.register_initial(checksum="float32:00", path="/v0", tokenizer_hash="t", run_id="run")
    facts: dict[str, Any] = {"checksum": "float32:01", "path": "/v1", "tokenizer_hash": "t", "metrics": {}}
    rollouts = [BatchRollout(Group("run", "train", "spec", "g"), name, 0, 0) for name in ("a", "b")]
    batches = [FileBatch("sft", "one", step, 2, "digest", (BatchFile("f.jsonl", "00", 7, 2),)) for step in (1, 2)]
    for batch in batches:
        lease = ledger.begin(rollouts, files=batch)
        assert lease
        assert ledger.begin(rollouts, files=batch) is None, "one step of a branch at a time, of whatever kind"
        ledger.commit(lease, **facts)
    assert [ledger.batch(version.policy_version.batch_id or "") for version in ledger.versions()[1:]] == [rollouts, rollouts]
    assert last_of(ledger.database, "policy", "main", "one", ledger.lineage()) == (2, batches[1])
    assert last_of(ledger.database, "policy", "main", "one", [0, 1]) == (1, batches[0])
    assert last_of(ledger.database, "policy", "main", "two", ledger.lineage()) is None
    assert trained_attempts(ledger.database, "policy", "main", None) == {("run", "a", 0), ("run", "b", 0)}
    assert trained_attempts(ledger.database, "policy", "main", batches[0]) == set()
    for changes in ({"run": "two"}, {"examples": "other"}):
        another = replace(batches[0], **changes)
        assert trained_attempts(ledger.database, "policy", "main", another) == {("run", "a", 0), ("run", "b", 0)}
    assert trained_attempts(ledger.database, "policy", "other", None) == set()
    nothing = ledger.begin([], files=FileBatch("dpo", "two", 1, 1, "digest", ()))
    assert nothing
    assert ledger.recover() == [3]
    assert file_batch_of(ledger.database, nothing.batch_id) is None
