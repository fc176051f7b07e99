"""Storage settings of the embedded database's busiest tables: parts are merged seldom, many at once, and are quick to read.

In: a function that runs a statement. Out: settings of tables. Invariant: no result of a query depends on them.

Merging a part costs as much as inserting it did. The database's defaults merge a handful of parts at once, so that a row is written
three times and more; here it is once, when so many parts have come, and again when so many merged ones have. A day of spans or logs that
gets no more rows is merged into one part: a trace by its id then asks the index of one part a day.
"""

from __future__ import annotations

from collections.abc import Callable

from spangrad.store.names import stored

_TABLES = ("otel_traces", "otel_logs", "rollout_spans", "calls", "trace_rollouts")
_SETTINGS = {
    # How many parts are merged at once, at least.
    "min_parts_to_merge_at_once": 32,
    "merge_selector_base": 32,
    # Column by column from the first row on: wide values are copied as they are.
    "vertical_merge_algorithm_min_rows_to_activate": 1,
    "vertical_merge_algorithm_min_columns_to_activate": 1,
}
_BY_DAY = ("otel_traces", "otel_logs")
_ONE_PART_A_CLOSED_DAY = {
    # Age of the youngest part of a day, in seconds. Whatever arrives late, or is deleted, makes a young part: a day is merged once a day
    # at most.
    "min_age_to_force_merge_seconds": 86_400,
    "min_age_to_force_merge_on_partition_only": 1,
}
_READ_BY_ROLLOUT = ("rollout_spans", "calls")
# The server's default codec; the embedded database would use ZSTD for parts beyond some hundred megabytes: reading costs a tenth more.
_QUICK_TO_READ = {"default_compression_codec": "'LZ4'"}


def tune(execute: Callable[[str], object]) -> None:
    """Apply the storage settings to the embedded store's tables; idempotent."""
    for table in _TABLES:
        settings = _SETTINGS | (_QUICK_TO_READ if table in _READ_BY_ROLLOUT else {}) | (_ONE_PART_A_CLOSED_DAY if table in _BY_DAY else {})
        execute(f"ALTER TABLE {stored(table)} MODIFY SETTING {', '.join(f'{name} = {value}' for name, value in settings.items())}")
