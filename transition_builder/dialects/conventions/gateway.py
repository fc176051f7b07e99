"""The gateway's own spans, the authority for what the engine read and sampled: a row a choice, whatever became of the call."""

from __future__ import annotations

import polars as pl

from spangrad import semconv
from transition_builder.schemas import CHOICE

IS_GATEWAY = pl.col("ScopeName") == semconv.GATEWAY_SCOPE


def calls(rows: pl.DataFrame) -> pl.DataFrame:
    """Canonical calls of resolved CALLS rows."""
    # Token ids are copied only where a call came twice.
    once = rows if rows[CHOICE].is_unique().all() else rows.unique(CHOICE, keep="first", maintain_order=True)
    return once.with_columns(ByGateway=pl.lit(True))
