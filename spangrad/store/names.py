"""Names of the store's databases: the Collector exporter's stock tables, the public tables for people, and the internal ones."""

from __future__ import annotations

STOCK, PUBLIC, INTERNAL = "otel", "spangrad", "spangrad_internal"
DATABASES = (STOCK, PUBLIC, INTERNAL)
_STOCK_TABLES = frozenset({"otel_traces", "otel_logs"})


def stored(table: str) -> str:
    """Return the qualified name of a table that holds rows: a stock table, or an internal one."""
    return f"{STOCK if table.removesuffix('_local') in _STOCK_TABLES else INTERNAL}.{table}"
