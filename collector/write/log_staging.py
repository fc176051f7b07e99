"""Insert of many bodies of log records at once.

Invariant: all rows are committed, or none.
"""

from __future__ import annotations

from collections.abc import Sequence

from collector.database import Handle
from collector.otlp.rows import DROPPED_INSERT, LOGS_INSERT, Rows
from collector.write.ingest import Refused
from collector.write.staging import Staging


class LogStaging:
    """Inserter of log records through one handle."""

    def __init__(self, handle: Handle) -> None:
        """Insert through `handle`, which must not be shared."""
        self._staging = Staging(handle)

    def commit(self, bodies: Sequence[Rows]) -> list[Refused]:
        """Insert all records of all bodies; return the refused records of each.

        Raises:
            EngineRefusedError: they were not inserted.
        """
        for head, parts in ((DROPPED_INSERT, [body.dropped for body in bodies]), (LOGS_INSERT, [body.data for body in bodies])):
            if rows := b"".join(parts):
                self._staging.insert(head, "RowBinary", rows, keep_staging=True)
        return [Refused(body.rejected, body.reason) for body in bodies]
