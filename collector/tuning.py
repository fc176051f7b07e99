"""How the embedded engine keeps the tables that hold whole spans and records: few, large merges.

In: what runs a statement. Out: settings of otel.otel_traces and otel.otel_logs. Invariant: nothing that a reader sees depends on them.

A span is some kilobytes there, read seldom and by time or trace: merging a pair of parts costs as much as inserting them did. The
lean tables, which the builder reads by rollout, keep the engine's eager merging.
"""

from __future__ import annotations

from collections.abc import Callable

_SETTINGS = {
    # A span is merged once, when this many parts have come, and again when that many merged ones have.
    "min_parts_to_merge_at_once": 16,
    "merge_selector_base": 16,
    # Column by column from the first row on: the wide maps are copied as they are.
    "vertical_merge_algorithm_min_rows_to_activate": 1,
    "vertical_merge_algorithm_min_columns_to_activate": 1,
}


def tune(execute: Callable[[str], object]) -> None:
    """Set how the embedded store's tables are merged; idempotent."""
    settings = ", ".join(f"{name} = {value}" for name, value in _SETTINGS.items())
    for table in ("otel_traces", "otel_logs"):
        execute(f"ALTER TABLE otel.{table} MODIFY SETTING {settings}")
