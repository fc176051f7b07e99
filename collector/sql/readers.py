"""Settings that a request with a read token may change: the form of the answer, and limits narrower than the store's.

Invariant: no setting that a reader names loosens a limit or reaches beyond the store. The database itself then lets nothing be changed
(`readonly = 1`), neither by SET nor by a SETTINGS clause.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from collector.sql.errors import BadRequestError

_FORM = re.compile(
    r"(?:output_format|format|input_format)_\w+|date_time_\w+_format|session_timezone|extremes|limit|offset|max_block_size|join_use_nulls"
    r"|final|use_query_cache|optimize_\w+|allow_experimental_analyzer|enable_analyzer|prefer_column_name_to_alias|cast_keep_nullable"
    r"|aggregate_functions_null_for_empty|union_default_mode|transform_null_in|group_by_use_nulls|max_result_bytes|max_rows_to_read|max_bytes_to_read|use_client_time_zone"
)


@dataclass(frozen=True, slots=True)
class ReaderLimits:
    """Limits of one statement of a reader."""

    max_rows: int
    """Most rows of the answer."""
    max_seconds: int
    """Longest execution time, in seconds."""

    def settings(self, requested: Mapping[str, str]) -> dict[str, str]:
        """Return the settings to run with: those asked for, within the limits. A wider limit than the store's becomes the store's.

        Raises:
            BadRequestError: a setting is not a reader's to choose.
        """
        limits = {"max_result_rows": self.max_rows, "max_execution_time": self.max_seconds}
        taken = {key: str(limit) for key, limit in limits.items()} | {"result_overflow_mode": "throw", "timeout_overflow_mode": "throw"}
        for key, value in requested.items():
            if key in limits:
                taken[key] = _narrower(value, limits[key])
            elif taken.get(key) == value:
                continue
            elif not _FORM.fullmatch(key):
                raise BadRequestError(164, f"Cannot modify '{key}' setting: the token is for reading.", "READONLY")
            else:
                taken[key] = value
        return taken


def _narrower(requested: str, limit: int) -> str:
    try:
        return requested if 0 < float(requested) < limit else str(limit)
    except ValueError:
        return str(limit)
