"""`spangrad policy` over a real ledger and real files; the gateway is a server that keeps what it is asked."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from commands.changes import versions
from commands.training.policy import policy as command
from spangrad.errors import CheckpointError, GatewayError, LedgerError
from spangrad.types import VersionStatus
from tests.support.scripted_servers import AdminGateway
from tests.support.trainers import FakeSource, settings, wired, write_base
from trainer.ledger.recovery import prune
from trainer.loop import Trainer, newest_version
from trainer.publish import checkpoint


@pytest.fixture
def gateway() -> Iterator[AdminGateway]:
    with AdminGateway() as gateway:
        yield gateway


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    """One that made versions 1 and 2, and has a third group."""
    wired_trainer = wired(
        settings(write_base(tmp_path / "base"), tmp_path / "policies", groups_per_batch=1, checkpoint__keep=2), FakeSource(["a", "b"])
    )
    wired_trainer.run(follow=False)
    wired_trainer.source = FakeSource(["c"], changes={"c": wired_trainer.source.changes["a"]})  # type: ignore[attr-defined]
    yield wired_trainer
    wired_trainer.ledger.close()


@pytest.fixture
def ask(trainer: Trainer, gateway: AdminGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs a command on the trainer's ledger, and gives what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPANGRAD_GATEWAY__URL", gateway.url)
    monkeypatch.setenv("SPANGRAD_TRAINER__DIRECTORY", str(tmp_path / "policies"))

    def run(*words: str) -> list[str]:
        capsys.readouterr()
        command(list(words), result_action="return_value")
        return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]

    return run


def path(trainer: Trainer, version: int) -> Path:
    return Path(trainer.ledger.version(version).policy_version.path)


def test_policy_list_marks_head_served_pinned_and_leased_versions(ask, trainer: Trainer) -> None:
    trainer.ledger.pin(1)
    lost = trainer.ledger.begin(trainer.source.load(trainer.source.ready()).rollouts)  # type: ignore[arg-type]
    assert lost
    listed = ask("list")
    holder = trainer.ledger.holder()
    assert listed == [
        "policy branch version status from return kept",
        f"policy main 3 under way 2 - no {holder}",
        "policy main 2 committed 1 +0.50 yes head",
        "policy main 1 committed 0 +0.50 yes pinned",
        "policy main 0 committed the beginning - yes",
    ]
    assert ask("list", "policy") == listed
    with pytest.raises(LedgerError, match=r"knows no policy 'other'\. It knows policy\."):
        ask("list", "other")


@pytest.mark.parametrize(("shown", "line"), [(1, "2 older versions: --all shows them"), (2, "1 older version: --all shows it")])
def test_policy_list_counts_versions_that_it_leaves_out(ask, monkeypatch: pytest.MonkeyPatch, shown: int, line: str) -> None:
    monkeypatch.setattr("commands.training.policy._SHOWN", shown)
    assert ask("list")[-1] == line


def test_policy_show_prints_facts_of_ledger(ask, trainer: Trainer) -> None:
    version = trainer.ledger.version(1)
    shown = ask("show", "policy@1")
    assert shown[:8] == [
        "version policy@1 on branch main",
        "status committed",
        "from 0",
        "next 2",
        f"batch {version.policy_version.batch_id} of run run (train)",
        f"files {version.policy_version.path}",
        f"checksum {version.policy_version.checksum}",
        f"tokenizer {version.tokenizer_hash}",
    ]
    assert "mean_return 0.5" in shown
    with pytest.raises(LedgerError, match=r"knows no version policy@7\. `spangrad policy list` shows"):
        ask("show", "policy@7")
    with pytest.raises(LedgerError, match="knows no version policy@1 on branch other"):
        ask("show", "policy@1", "--branch", "other")


def test_policy_publish_serves_version_and_keeps_head(ask, trainer: Trainer, gateway: AdminGateway) -> None:
    assert ask("publish", "policy@1") == ["version 1 of policy is served (0.25 s)"]
    facts = trainer.ledger.version(1).policy_version
    body = {"version": 1, "path": facts.path, "checksum": facts.checksum}
    assert gateway.publications == [("/admin/policies/policy/versions", {**body, "again": True})]
    assert newest_version(trainer.ledger).version == 2


def test_policy_rollback_serves_version_and_moves_head_of_running_trainer(
    ask,
    trainer: Trainer,
    gateway: AdminGateway,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert ask("rollback", "policy@1") == [
        "branch main of policy is at version 1: the next step trains it",
        "version 1 of policy is served (0.25 s)",
    ]
    assert [body["version"] for _, body in gateway.publications] == [1]
    caplog.set_level("INFO")
    trainer.run(follow=False)
    assert "version 1 is loaded: branch main was moved there by another process" in caplog.text
    newest = newest_version(trainer.ledger)
    assert (newest.version, newest.policy_version.parent, trainer.ledger.lineage()) == (3, 1, [0, 1, 3])
    assert (path(trainer, 3) / "optimizer/weight").read_text() == "2.0", "one step from version 1, whose weight is 1"
    assert ask("show", "policy@1")[3] == "next 2, 3"
    assert ask("rollback", "policy@2", "--no-publish") == ["branch main of policy is at version 2: the next step trains it"]
    assert len(gateway.publications) == 1


@pytest.mark.parametrize("running", [False, True])
def test_trainer_publishes_head_after_rollback_without_publication(
    ask, trainer: Trainer, caplog: pytest.LogCaptureFixture, running: bool
) -> None:
    """The next start, or a trainer that is at work: the ledger's head is the authority, not the number that the gateway has."""
    served = trainer.settings.trainer.directory / "served.json"
    assert json.loads(served.read_text())[-1] == 2
    ask("rollback", "policy@1", "--no-publish")
    caplog.set_level("INFO")
    if running:
        trainer._publish_again()  # pyright: ignore[reportPrivateUsage]
    else:
        trainer.start()
    assert json.loads(served.read_text())[-1] == 1
    assert "version 1 is served (0.25 s) in place of version 2" in caplog.text
    served.write_text("[9]")
    with pytest.raises(GatewayError, match="version 1 is not newer than what is served"):
        trainer.start()  # nobody here has made version 9: whose is it?


def test_policy_rollback_orphans_step_under_way(ask, trainer: Trainer) -> None:
    assert trainer.ledger.begin(trainer.source.load(trainer.source.ready()).rollouts)  # type: ignore[arg-type]
    holder = trainer.ledger.holder()
    assert ask("rollback", "policy@1", "--no-publish")[0] == f"the running step ({holder}) is cancelled"
    assert trainer.ledger.version(3).status is VersionStatus.ORPHANED
    with pytest.raises(LedgerError, match="version 3 of policy is orphaned: it has no weights"):
        ask("rollback", "policy@3")


def test_prune_keeps_pinned_versions_and_heads(ask, trainer: Trainer) -> None:
    assert ask("pin", "policy@1") == [f"policy@1 is pinned: {path(trainer, 1)} stays"]
    trainer.run(follow=False)
    trainer.source = FakeSource(["d"], changes={"d": trainer.source.changes["c"]})  # type: ignore[attr-defined]
    trainer.run(follow=False)
    assert [version for version in (1, 2, 3, 4) if path(trainer, version).is_dir()] == [1, 3, 4]
    assert ask("rollback", "policy@1", "--no-publish")
    assert ask("unpin", "policy@1") == ["policy@1 is not pinned: the next step may remove its files"]
    prune(trainer.ledger, trainer.settings)
    assert path(trainer, 1).is_dir(), "it is the head"
    ask("rollback", "policy@3", "--no-publish")
    prune(trainer.ledger, trainer.settings)
    assert not path(trainer, 1).exists()
    for words in (("rollback", "policy@2"), ("publish", "policy@1"), ("pin", "policy@1")):
        with pytest.raises(CheckpointError, match="is missing"):
            ask(*words)
    assert newest_version(trainer.ledger).version == 3, "nothing was moved"


@pytest.mark.parametrize(
    ("words", "pinned"), [(("pin", "policy@1"), {1}), (("rollback", "policy@1", "--no-publish"), set()), (("publish", "policy@1"), set())]
)
def test_policy_command_keeps_files_that_it_has_verified(
    ask, trainer: Trainer, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], pinned: set[int]
) -> None:
    verify, newest_alone = (
        checkpoint.verify,
        settings(trainer.settings.trainer.model, trainer.settings.trainer.directory, checkpoint__keep=1),
    )  # type: ignore[arg-type]

    def verified_before_prune(directory: Path, checksum: str) -> None:
        verify(directory, checksum)
        prune(trainer.ledger, newest_alone)

    monkeypatch.setattr(checkpoint, "verify", verified_before_prune)
    ask(*words)
    assert path(trainer, 1).is_dir(), "whose files the command, and the gateway, are about to use"
    assert trainer.ledger.pinned() == pinned


def test_policy_pin_beside_a_publication_outlives_it(ask, trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    served = versions._served
    monkeypatch.setattr(versions, "_served", lambda version, chosen: (trainer.ledger.pin(version.version), served(version, chosen))[1])
    ask("publish", "policy@1")
    assert trainer.ledger.pinned() == {1}
    ask("unpin", "policy@1")
    assert trainer.ledger.pinned() == set()


def test_prune_chooses_and_renames_versions_in_one_transaction(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = checkpoint.prune

    def beside_pin(*arguments: Any) -> list[Path]:
        hidden = rename(*arguments)
        file = trainer.settings.trainer.directory / "ledger.db"
        with closing(sqlite3.connect(file, timeout=0)) as other, pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")  # as a pin, a rollback and a commit begin
        return hidden

    monkeypatch.setattr(checkpoint, "prune", beside_pin)
    prune(trainer.ledger, settings(trainer.settings.trainer.model, trainer.settings.trainer.directory, checkpoint__keep=1))  # type: ignore[arg-type]
    assert [version for version in (1, 2) if path(trainer, version).is_dir()] == [2]
    assert sorted(found.name for found in path(trainer, 2).parent.iterdir()) == ["v2"], "what was hidden is deleted"


def test_policy_rollback_with_absent_gateway_moves_head_and_raises(ask, trainer: Trainer, gateway: AdminGateway) -> None:
    gateway.close()
    with pytest.raises(GatewayError, match=r"does not answer.*Once it runs, `spangrad policy publish` hands the version to it\."):
        ask("rollback", "policy@1")
    assert newest_version(trainer.ledger).version == 1


def test_policy_list_without_ledger_raises_and_creates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPANGRAD_TRAINER__DIRECTORY", "nowhere")
    with pytest.raises(LedgerError, match="nowhere holds no ledger: nothing was trained there"):
        command(["list"], result_action="return_value")
    assert list(tmp_path.iterdir()) == []
