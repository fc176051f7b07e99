"""Copies the ledger's conclusions into the span store, where people ask what trained what.

In: the ledger. Out: rows of `otel.policy_versions`, `otel.batches` and `otel.batch_files`. Invariant: the ledger is the authority and the
store a copy that may lag behind it, never the reverse; writing a row again replaces it, so catching up after a crash is writing whatever
the store lacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spangrad.store.clickhouse import store_errors
from spangrad.types import VersionStatus
from trainer.ledger.file_batches import Tuning, tuning_of
from trainer.ledger.ledger import Ledger
from trainer.ledger.tables import LedgerVersion

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

_VERSION_COLUMNS = (
    "Policy", "Branch", "Version", "RunId", "Mode", "Parent", "ParentBranch", "BatchId", "Checksum", "Path", "TokenizerHash", "Status",
    "Metrics",
)  # fmt: skip
_BATCH_COLUMNS = ("Policy", "Branch", "BatchId", "Version", "RunId", "Mode", "GroupId", "RolloutId", "Attempt", "BuildSpec", "Revision")
_FILE_COLUMNS = ("Policy", "Branch", "BatchId", "Version", "Method", "Run", "Step", "Steps", "Name", "Sha256", "Bytes", "Trained")
_THERE = """
SELECT Version, Status, Checksum, Metrics FROM otel.policy_versions FINAL WHERE Policy = %(policy)s AND Branch = %(branch)s
"""
_BATCH_SIZES = """
SELECT BatchId, count() FROM otel.batches FINAL WHERE Policy = %(policy)s AND Branch = %(branch)s GROUP BY BatchId
"""


class Mirror:
    """Writes one branch's versions and batches."""

    def __init__(self, client: Client, url: str, ledger: Ledger) -> None:
        """Write with `client`; `url` is named when the store fails."""
        self._client = client
        self._url = url
        self._ledger = ledger

    def catch_up(self) -> int:
        """Write every version whose row the store lacks or holds otherwise, with its batch; return how many."""
        versions = [one for one in self._ledger.versions() if one.status]
        if not versions:
            return 0
        facts = versions[0]
        names = {"policy": facts.policy_version.policy, "branch": facts.branch}
        with store_errors(self._url):
            rows = self._client.query(_THERE, parameters=names).result_rows
            batches = self._client.query(_BATCH_SIZES, parameters=names).result_rows
        there = {int(version): (status, checksum, dict(metrics)) for version, status, checksum, metrics in rows}
        counts = {str(batch): int(count) for batch, count in batches}
        behind = [
            one
            for one in versions
            if there.get(one.version) != (one.status, one.policy_version.checksum, one.metrics)
            or (one.status is VersionStatus.COMMITTED and counts.get(one.policy_version.batch_id or "", 0) != self._batch_size(one))
        ]
        for one in behind:
            self.write(one)
        return len(behind)

    def write(self, version: LedgerVersion) -> None:
        """Write a version and, when it is committed, its batch; the batch first, so that a version's row says its lineage is there."""
        if version.status is VersionStatus.COMMITTED and version.policy_version.batch_id:
            batch_id = version.policy_version.batch_id
            if rows := self._batch_rows(version, batch_id):  # a batch of files may name no rollout
                self._insert("otel.batches", _BATCH_COLUMNS, rows)
            if tuning := tuning_of(self._ledger.database, batch_id):
                self._insert("otel.batch_files", _FILE_COLUMNS, _file_rows(version, batch_id, tuning))
        self._insert("otel.policy_versions", _VERSION_COLUMNS, [_version_row(version)])

    def _batch_size(self, version: LedgerVersion) -> int:
        batch_id = version.policy_version.batch_id
        return len(self._ledger.batch(batch_id)) if batch_id else 0

    def _batch_rows(self, version: LedgerVersion, batch_id: str) -> list[list[object]]:
        names = [version.policy_version.policy, version.branch, batch_id, version.version]
        rollouts = self._ledger.batch(batch_id)
        groups = [(one.group.run_id, one.group.mode, one.group.group_id) for one in rollouts]
        return [
            [*names, *group, one.rollout_id, one.attempt, one.group.build_spec, one.revision]
            for group, one in zip(groups, rollouts, strict=True)
        ]

    def _insert(self, table: str, columns: tuple[str, ...], rows: list[list[object]]) -> None:
        with store_errors(self._url):
            self._client.insert(table, rows, column_names=columns)


def _file_rows(version: LedgerVersion, batch_id: str, tuning: Tuning) -> list[list[object]]:
    names = [version.policy_version.policy, version.branch, batch_id, version.version]
    return [
        [*names, tuning.method, tuning.run, tuning.step, tuning.steps, one.name, one.checksum, one.size, one.rows] for one in tuning.files
    ]


def _version_row(version: LedgerVersion) -> list[object]:
    facts = version.policy_version
    return [
        facts.policy,
        version.branch,
        facts.version,
        version.run_id,
        version.modes,
        facts.parent,
        version.parent_branch,
        facts.batch_id or "",
        facts.checksum,
        facts.path,
        version.tokenizer_hash,
        version.status,
        version.metrics,
    ]
