"""Recovery of ledger and checkpoints before the first step and after a failed one; removal of old versions.

In: the settings and a ledger. Out: both agree. Invariant: a committed version that a branch or the user may still need is never removed;
files of versions that are not committed are removed, at any time.
"""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Generator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import IO

from spangrad.errors import CheckpointError, LedgerError, SettingsError
from spangrad.processes import make_private
from spangrad.settings import Settings
from spangrad.types import VersionStatus
from spangrad.weights.checksums import checksum_directory, tokenizer_hash
from trainer.ledger.ledger import Ledger
from trainer.ledger.optimizer_state import steps_since_state
from trainer.ledger.tables import FILE as LEDGER_FILE
from trainer.ledger.tables import LedgerVersion, ledger_location
from trainer.monitor.evaluate import best, best_of_files, versions_with_weights
from trainer.publish import checkpoint

logger = logging.getLogger(__name__)


def require_beginning(settings: Settings) -> None:
    """Check, before anything is opened or made, that there are initial weights, or a ledger that names some.

    Raises:
        SettingsError: there are neither.
    """
    model = settings.trainer.model
    if model is None and settings.trainer.ledger_url is None and not (settings.trainer.directory / LEDGER_FILE).exists():
        raise SettingsError(
            "trainer.model is not set. Give the directory of the weights that training begins with: `spangrad train --model DIR`."
        )
    if model is not None and not model.is_dir():
        raise SettingsError(
            f"trainer.model = {str(model)!r} is no directory. Give the one that holds the weights that training begins with."
        )


def prepare(ledger: Ledger, settings: Settings) -> LedgerVersion:
    """Undo the remains of a crash, record the initial weights if there are none, and verify the newest version.

    Raises:
        SettingsError: there is no version and no trainer.model.
        CheckpointError: trainer.model holds no weights or tokenizer, or the newest version's directory is not what was committed.
    """
    undo_leases(ledger, settings)
    if ledger.frontier() is None:
        model = settings.trainer.model
        if model is None:
            raise SettingsError(
                f"trainer.model is not set, and the ledger knows no version of {settings.trainer.policy} on {settings.trainer.branch}."
                " Give the directory of the weights that training begins with: `spangrad train --model DIR`."
            )
        path = model.absolute()
        checksum, tokenizer = checksum_directory(path), tokenizer_hash(path)
        try:
            ledger.register_initial(checksum=checksum, path=str(path), tokenizer_hash=tokenizer, run_id=settings.trainer.run_id)
        except LedgerError:
            if ledger.frontier() is None:  # else another trainer was first
                raise
        begun = newest_version(ledger)
        if begun.parent_branch:
            logger.info("branch %s begins with version %d of branch %s", begun.branch, begun.version, begun.parent_branch)
    newest = newest_version(ledger)
    checkpoint.verify(Path(newest.policy_version.path), newest.policy_version.checksum)
    return newest


def open_ledger(settings: Settings) -> Ledger:
    """Open the ledger of the trainer's branch."""
    trainer = settings.trainer
    return Ledger(ledger_location(trainer), trainer.policy, trainer.branch, lease_seconds=trainer.lease_seconds, settings=trainer)


def existing_ledger(settings: Settings) -> Ledger | None:
    """Open the ledger if there is one, also while a trainer uses it. None: nothing was ever trained there."""
    trainer = settings.trainer
    return open_ledger(settings) if trainer.ledger_url or (trainer.directory / LEDGER_FILE).exists() else None


def require_ledger(settings: Settings) -> Ledger:
    """Open the ledger, as `existing_ledger`.

    Raises:
        LedgerError: there is none.
    """
    ledger = existing_ledger(settings)
    if ledger is None:
        raise LedgerError(
            f"{settings.trainer.directory} holds no ledger: nothing was trained there. Set trainer.directory or trainer.ledger_url to the "
            "trainer's, or start with `spangrad train`."
        )
    return ledger


def of_branch(settings: Settings, policy: str, branch: str) -> Settings:
    """Return the settings of another branch's trainer."""
    return settings.model_copy(update={"trainer": settings.trainer.model_copy(update={"policy": policy, "branch": branch})})


@contextmanager
def running_trainer(ledger: Ledger, settings: Settings) -> Generator[LedgerVersion]:
    """Yield the head from which a trainer of the branch goes on, after trainer.checkpoint.after_crash; it counts as running in the block.

    Where no other trainer of the branch runs, states that a crash left half-written are removed.

    Raises:
        CheckpointError: the directory of the branch's versions cannot be written, or the version to go back to is damaged.
    """
    trainer = settings.trainer
    versions = checkpoint.branch_directory(trainer)
    path = versions.with_name(f".{versions.name}.lock")
    try:
        make_private(trainer.directory)
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")  # NFS gives a shared lock to readers alone
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error.strerror}). Name a trainer.directory that can.") from None
    with file:
        # Trainers of a branch share their versions' directory, also those on other machines, and the system ends the lock of one that dies.
        newest = None
        if _locked(file, fcntl.LOCK_EX | fcntl.LOCK_NB):
            checkpoint.sweep_states(trainer)
            newest = _orphan_after_crash(ledger, settings)
        _locked(file, fcntl.LOCK_SH)
        yield newest or newest_version(ledger)  # now: another that was alone may have orphaned the head meanwhile


def _locked(file: IO[str], kind: int) -> bool:
    """Lock a file, and return whether that was possible: another process holds it, or the file system has no locks."""
    try:
        fcntl.flock(file, kind)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning("%s cannot be locked (%s): a trainer that runs is not told apart from one that crashed", file.name, error.strerror)
        return False
    return True


def _orphan_after_crash(ledger: Ledger, settings: Settings) -> LedgerVersion:
    """Orphan the versions since the last optimizer state that was written, where trainer.checkpoint.after_crash says so; return the head.

    Their rollouts are free again. Versions are kept, and replayed, where another step is under way, or one of them is still needed
    (`Ledger.orphan`). The caller ensures that no trainer runs that may have their optimizer state in memory.

    Raises:
        CheckpointError: the version with that state is not what was committed.
    """
    newest, trainer = newest_version(ledger), settings.trainer
    base, lost = steps_since_state(ledger, newest)
    if trainer.checkpoint.after_crash == "replay" or not lost:
        return newest
    checkpoint.verify(Path(base.policy_version.path), base.policy_version.checksum)  # training goes on from there
    if not ledger.orphan(lost, base.version):
        return newest
    checkpoint.sweep(trainer, ledger.statuses)
    for version in lost:
        logger.warning("version %d is orphaned, as its optimizer state was not written: its rollouts are free again", version.version)
    return base


def undo_leases(ledger: Ledger, settings: Settings) -> list[int]:
    """Free the rollouts of a lease that no trainer will commit, and remove the files of versions that were never committed.

    Returns:
        The versions that this call orphaned.
    """
    orphaned = ledger.recover()
    for version in orphaned:
        logger.warning("version %d was never committed: its number stays taken, its rollouts are free again", version)
    checkpoint.sweep(settings.trainer, ledger.statuses)
    return orphaned


def earlier_checkpoints(ledger: Ledger, version: LedgerVersion, count: int) -> list[Path]:
    """Return the directories of the versions that led to one, oldest first: `count` at most, up to the first that was removed."""
    lineage = ledger.lineage()
    before = lineage[: lineage.index(version.version)] if version.version in lineage else []
    newest = before[max(len(before) - count, 0) :]
    paths = {known.version: Path(known.policy_version.path) for known in ledger.versions(newest) if known.status is VersionStatus.COMMITTED}
    directories = [paths.get(number) for number in reversed(newest)]
    return [path for path in takewhile(lambda path: path is not None and path.is_dir(), directories) if path][::-1]


def prune(ledger: Ledger, settings: Settings) -> None:
    """Remove the files of old versions, except the head, the best, that of a run over files, pinned ones and those of other branches.

    Of a version that is kept without the optimizer's state, the version from which its steps are replayed is kept as well. A ledger that
    fails is logged: the files are removed after the next step.
    """
    try:
        _prune(ledger, settings)
    except LedgerError as error:
        logger.warning("%s Old versions are removed after the next step.", error)


def _prune(ledger: Ledger, settings: Settings) -> None:
    trainer = settings.trainer
    with ledger.database.transaction():  # no pin, rollback or commit comes between the choice of versions and their renaming
        head = ledger.frontier()
        versions = [version for version in versions_with_weights(ledger, trainer) if version.status is VersionStatus.COMMITTED]
        newest = ledger.committed_versions()[-trainer.checkpoint.keep :]
        chosen = (head, best(versions, trainer), best_of_files(ledger, versions, trainer))
        named = {version.version for version in chosen if version}
        kept = ledger.pinned() | ledger.parents_of_other_branches() | named | {*newest}
        bases = {steps_since_state(ledger, version)[0].version for version in versions if version.version in kept}
        old = [version.version for version in versions if version.version not in kept | bases]
        hidden = checkpoint.prune(trainer, old)
    checkpoint.delete(hidden)


def newest_version(ledger: Ledger) -> LedgerVersion:
    """Return the version that the next step trains.

    Raises:
        LedgerError: there is none.
    """
    newest = ledger.frontier()
    if newest is None:
        raise LedgerError("the ledger has no weights to train. Start `spangrad train` with --model.")
    return newest
