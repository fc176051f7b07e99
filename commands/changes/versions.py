"""Changes of policy versions: publication, rollback, pins.

In: a version of the ledger. Out: sentences on what was done. Invariant: a version whose files are missing or altered is neither published
nor returned to.
"""

from __future__ import annotations

import uuid
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spangrad.errors import LedgerError
from spangrad.settings import Settings
from spangrad.types import VersionStatus

if TYPE_CHECKING:
    from trainer.ledger.ledger import Ledger
    from trainer.ledger.policies import Overview
    from trainer.ledger.tables import LedgerVersion

_UNSERVED = "Once it runs, `spangrad policy publish` hands the version to it."


@dataclass(frozen=True, slots=True)
class VersionKey:
    """Policy and number of a version, and its branch if other branches began with it."""

    policy: str
    number: int
    branch: str | None = None
    """None: the branch that made it."""

    def __str__(self) -> str:
        return f"{self.policy}@{self.number}"


def ledger_overview(settings: Settings) -> Overview:
    """Return the content of the ledger.

    Raises:
        LedgerError: there is no ledger.
    """
    from trainer.ledger.policies import overview
    from trainer.ledger.recovery import require_ledger

    with closing(require_ledger(settings)) as ledger:
        return overview(ledger.database)


@contextmanager
def opened_version(key: VersionKey, settings: Settings) -> Generator[tuple[Overview, LedgerVersion, Ledger]]:
    """Yield the content of the ledger, a version, and the ledger of its branch, for as long as the block.

    Raises:
        LedgerError: there is no such version.
    """
    from trainer.ledger.policies import origin
    from trainer.ledger.recovery import of_branch, open_ledger

    overview = ledger_overview(settings)
    version = origin((candidate for candidate in overview.versions if key.branch in {None, candidate.branch}), key.policy, key.number)
    if version is None:
        where = "" if key.branch is None else f" on branch {key.branch}"
        raise LedgerError(f"the ledger knows no version {key}{where}. `spangrad policy list` shows those it knows.")
    with closing(open_ledger(of_branch(settings, key.policy, version.branch))) as ledger:
        yield overview, version, ledger


def publish(key: VersionKey, settings: Settings) -> str:
    """Make the gateway serve a version."""
    with opened_version(key, settings) as (_, version, ledger), _kept(version, ledger):
        return _served(version, settings)


def roll_back(key: VersionKey, settings: Settings) -> Iterator[str]:
    """Return to an older version of a branch, and have the gateway serve it where trainer.weight_sync.publish is set.

    Yields:
        A sentence on each part, once it is done.
    """
    with opened_version(key, settings) as (_, version, ledger), _kept(version, ledger):
        holder = ledger.holder()
        rolled_back = ledger.rollback(version.version)
        if holder:
            yield f"the running step ({holder}) is cancelled"
        yield f"branch {rolled_back.branch} of {key.policy} is at version {rolled_back.version}: the next step trains it"
        if settings.trainer.weight_sync.publish:
            yield _served(rolled_back, settings)


def pin(key: VersionKey, settings: Settings) -> str:
    """Keep a version's checkpoint."""
    with opened_version(key, settings) as (_, version, ledger), _kept(version, ledger):
        ledger.pin(version.version)
    return f"{key} is pinned: {version.policy_version.path} stays"


def unpin(key: VersionKey, settings: Settings) -> str:
    """Undo `pin`."""
    with opened_version(key, settings) as (_, version, ledger):
        ledger.unpin(version.version)
    return f"{key} is not pinned: the next step may remove its files"


def status_text(version: LedgerVersion) -> str:
    """Return the status of a version, in words."""
    return version.status.value if version.status else "under way"


def _kept(version: LedgerVersion, ledger: Ledger) -> ExitStack:
    """Pin a version if its weights can be loaded; return what ends this pin, and no other.

    Raises:
        LedgerError: the version was never committed.
        CheckpointError: its files are missing, or differ from its checksum.
    """
    from trainer.publish import checkpoint

    if version.status is not VersionStatus.COMMITTED:
        raise LedgerError(f"version {version.version} of {version.policy_version.policy} is {status_text(version)}: it has no weights.")
    with ExitStack() as unpinning:
        holder = uuid.uuid4().hex
        ledger.pin(version.version, holder)  # first: a trainer that makes room may remove what was only verified
        unpinning.callback(ledger.unpin, version.version, holder)
        checkpoint.verify(Path(version.policy_version.path), version.policy_version.checksum)
        return unpinning.pop_all()


def _served(version: LedgerVersion, settings: Settings) -> str:
    from trainer.publish.publisher import Publisher

    seconds = Publisher(settings.gateway, _UNSERVED).publish(version.policy_version, again=True)
    return f"version {version.version} of {version.policy_version.policy} is served ({seconds:.2f} s)"
