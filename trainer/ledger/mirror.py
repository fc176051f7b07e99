"""Copy of the ledger's versions and batches in the span store, where users query which rollouts trained which version.

In: the ledger, and the calls that lie beside a version's weights. Out: rows of `policy_versions`, `batches`, `trained_calls`,
`trained_tokens` and `batch_files`. Invariant: the ledger is the authority and the store a copy that may lag behind it, never the reverse;
writing a row again replaces it, so catching up after a crash is writing the rows that the store lacks, and deleting those of batches that
were orphaned.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import store_errors, store_url
from spangrad.store.names import stored
from spangrad.types import VersionStatus
from trainer.ledger.file_batches import file_batch_of
from trainer.ledger.ledger import Ledger
from trainer.ledger.tables import LedgerVersion
from trainer.publish.checkpoint import TRAINED_CALLS

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

logger = logging.getLogger(__name__)

_ROLLOUT_COLUMNS = ("RunId", "Mode", "GroupId", "RolloutId", "Attempt", "BuildSpec", "Revision")
_FILE_COLUMNS = ("Method", "Run", "Step", "Steps", "Name", "Sha256", "Bytes", "Trained")
_CALL_COLUMNS = (
    "RunId", "Mode", "BuildSpec", "Revision", "GroupId", "TaskId", "RolloutId", "Attempt", "Turn", "TransitionId", "CallId", "TraceId",
    "SpanId", "AgentName", "Tools", "SampledVersions", "Staleness", "InputTokens", "OutputTokens", "FinishReason", "Reward", "Return",
    "Advantage",
)  # fmt: skip
_TOKEN_COLUMNS = ("RolloutId", "CallId", "TrainerLogprobs", "Entropies")
_BATCH_TABLES = ("trained_tokens", "trained_calls", "batch_calls", "batches")
"""Tables of batches of rollouts; the store itself fills batch_calls. The last one is deleted from last: it shows that rows are left."""
_CALLS_AT_A_TIME = 256
"""Number of calls whose tokens are Python values at the same time."""
_STORED_VERSIONS = """
SELECT Version, Status, Checksum, Metrics FROM spangrad_internal.policy_versions FINAL
WHERE Policy = %(policy)s AND Branch = %(branch)s AND Version >= %(since)s
"""
_BATCH_SIZES = """
SELECT BatchId, count() FROM spangrad_internal.batches FINAL
WHERE Policy = %(policy)s AND Branch = %(branch)s AND Version >= %(since)s
GROUP BY BatchId
"""


class Mirror:
    """Writes one branch's versions and batches."""

    def __init__(self, client: Client, store: StoreSettings, ledger: Ledger) -> None:
        """Write with `client` to the store of these settings."""
        self._client = client
        self._store = store
        self._ledger = ledger

    def catch_up(self, since: int = 0) -> int:
        """Write each version from a number on whose row is missing or different in the store, with its batch; return how many those are.

        The batches of versions that were orphaned once they were committed are deleted.
        """
        numbers = [number for number in self._ledger.statuses() if number >= since] if since else None
        versions = [version for version in self._ledger.versions(numbers) if version.status]
        if not versions:
            return 0
        facts = versions[0]
        names = {"policy": facts.policy_version.policy, "branch": facts.branch, "since": since}
        sizes = self._ledger.batch_sizes(since)
        with store_errors(self._client):
            rows = self._client.query(_STORED_VERSIONS, parameters=names).result_rows
            batches = self._client.query(_BATCH_SIZES, parameters=names).result_rows
        stored = {int(number): (status, checksum, _comparable(metrics)) for number, status, checksum, metrics in rows}
        if not since and (unknown := stored.keys() - {version.version for version in versions}):
            logger.warning(
                "the store at %s has version %s@%d on branch %s, which the ledger lacks: the ledger is another one, or was deleted. "
                "Restore it, or choose another trainer.branch: versions of one number replace each other in the store",
                *(store_url(self._client), facts.policy_version.policy, max(unknown), facts.branch),
            )
        counts = {str(batch): int(count) for batch, count in batches}
        outdated = [
            version
            for version in versions
            if stored.get(version.version) != (version.status, version.policy_version.checksum, _comparable(version.metrics))
            or (
                version.status is VersionStatus.COMMITTED
                and counts.get(version.policy_version.batch_id or "", 0) != sizes.get(version.policy_version.batch_id or "", 0)
            )
        ]
        orphaned = {version.policy_version.batch_id or "" for version in versions if version.status is VersionStatus.ORPHANED}
        if left := orphaned & counts.keys():
            self._delete({**names, "batches": tuple(sorted(left))})
        for version in outdated:
            self.write(version)
        return len(outdated)

    def write(self, version: LedgerVersion) -> None:
        """Write a version and, when it is committed, its batch; the batch first, so that a version's row implies its batch.

        A version that has changed meanwhile is written again: another process may have written the newer row before this one.
        """
        if version.status is VersionStatus.COMMITTED and version.policy_version.batch_id:
            batch_id = version.policy_version.batch_id
            rollouts = [
                (row.group.run_id, row.group.mode, row.group.group_id, row.rollout_id, row.attempt, row.group.build_spec, row.revision)
                for row in self._ledger.batch(batch_id)
            ]
            if rollouts:  # a batch of files may name none
                self._insert_of_batch("batches", _ROLLOUT_COLUMNS, version, rollouts)
            for table, columns in (("trained_calls", _CALL_COLUMNS), ("trained_tokens", _TOKEN_COLUMNS)):
                for calls in _trained_calls(version, columns):
                    self._insert_of_batch(table, columns, version, calls.iter_rows())
            if batch := file_batch_of(self._ledger.database, batch_id):
                facts = (batch.method, batch.run, batch.step, batch.steps)
                files = [(*facts, file.name, file.checksum, file.size, file.rows) for file in batch.files]
                self._insert_of_batch("batch_files", _FILE_COLUMNS, version, files)
        written = None
        while repr(version) != written:  # a text: a metric may be NaN, which equals nothing
            row = _version_row(version)
            self._insert("policy_versions", tuple(row), [[*row.values()]])
            written, version = repr(version), self._ledger.version(version.version)

    def _delete(self, names: dict[str, object]) -> None:
        """Delete the rows of some batches."""
        for table in _BATCH_TABLES:
            # A table that spans shards deletes nothing.
            place = f"{stored(f'{table}_local')} ON CLUSTER '{self._store.cluster}'" if self._store.sharded else stored(table)
            statement = f"DELETE FROM {place} WHERE Policy = %(policy)s AND Branch = %(branch)s AND BatchId IN %(batches)s"
            with store_errors(self._client):
                self._client.command(statement, parameters=names)

    def _insert_of_batch(self, table: str, columns: tuple[str, ...], version: LedgerVersion, rows: Iterable[tuple[object, ...]]) -> None:
        names = (version.policy_version.policy, version.branch, version.policy_version.batch_id or "", version.version)
        self._insert(table, ("Policy", "Branch", "BatchId", "Version", *columns), [[*names, *row] for row in rows])

    def _insert(self, table: str, columns: tuple[str, ...], rows: list[list[object]]) -> None:
        with store_errors(self._client):
            self._client.insert(f"spangrad_internal.{table}", rows, column_names=columns)


def _trained_calls(version: LedgerVersion, columns: tuple[str, ...]) -> Iterator[pl.DataFrame]:
    """Yield columns of the calls that made a version, some calls at a time.

    Nothing: its directory is gone, it was made of files, or by a release that recorded no such columns.
    """
    file = Path(version.policy_version.path) / TRAINED_CALLS
    if file.is_file() and set(columns) <= set(pl.read_parquet_schema(file)):
        yield from pl.read_parquet(file, columns=list(columns)).select(columns).iter_slices(_CALLS_AT_A_TIME)


def _comparable(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return metrics with None in place of NaN, which equals nothing."""
    return {name: None if math.isnan(value) else value for name, value in metrics.items()}


def _version_row(version: LedgerVersion) -> dict[str, object]:
    facts = version.policy_version
    return {
        "Policy": facts.policy,
        "Branch": version.branch,
        "Version": facts.version,
        "RunId": version.run_id,
        "Mode": version.modes,
        "Parent": facts.parent,
        "ParentBranch": version.parent_branch,
        "BatchId": facts.batch_id or "",
        "Checksum": facts.checksum,
        "Path": facts.path,
        "TokenizerHash": version.tokenizer_hash,
        "Status": version.status,
        "Metrics": version.metrics,
    }
