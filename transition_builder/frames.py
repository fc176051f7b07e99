"""The tables that flow through the builder, as Polars frames of fixed schemas.

Invariant: every frame has exactly the columns of its schema (schemas.py), in its order, so that stages can be tested with hand-made rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache

import polars as pl

from transition_builder.schemas import DROPPED, OWNERS, RESPONSES, SQL_REWARDS, TIMES, TOOL_CALLS, TOOL_EVENTS, TOOL_LOGS, Schema


class Verdict(StrEnum):
    """Decision on whether a rollout may be built."""

    WAITING = "waiting"
    """Something is missing and may still arrive."""
    COMPLETE = "complete"
    """Everything that can be known to exist has arrived."""
    INCOMPLETE = "incomplete"
    """Calls that the gateway answered, or the final root, did not arrive in time."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Inputs of the completeness decision, of the schemas of their names; no token ids, no attributes."""

    roots: pl.DataFrame
    """ROOTS, of every attempt."""
    presence: pl.DataFrame
    counts: pl.DataFrame
    owners: pl.DataFrame = field(default_factory=lambda: empty(OWNERS))
    """OWNERS of the traces of rows that name no rollout."""


@dataclass(frozen=True, slots=True)
class Frames:
    """Everything known of the rollouts to build, of the schemas of their names; what only rules use is empty unless one uses it."""

    rollouts: pl.DataFrame
    """ROLLOUTS, none of them waiting."""
    spans: pl.DataFrame
    calls: pl.DataFrame
    answers: pl.DataFrame
    sql_rewards: pl.DataFrame = field(default_factory=lambda: empty(SQL_REWARDS))
    responses: pl.DataFrame = field(default_factory=lambda: empty(RESPONSES))
    dropped: pl.DataFrame = field(default_factory=lambda: empty(DROPPED))
    owners: pl.DataFrame = field(default_factory=lambda: empty(OWNERS))
    """OWNERS of the traces of rows that name no rollout, as far as the store knows them."""
    tool_events: pl.DataFrame = field(default_factory=lambda: empty(TOOL_EVENTS))
    tool_logs: pl.DataFrame = field(default_factory=lambda: empty(TOOL_LOGS))


@dataclass(frozen=True, slots=True)
class Built:
    """Rows that `build` makes of `Frames`, of the schemas of their names."""

    transitions: pl.DataFrame
    drops: pl.DataFrame
    rewards: pl.DataFrame
    tool_calls: pl.DataFrame = field(default_factory=lambda: empty(TOOL_CALLS))
    times: pl.DataFrame = field(default_factory=lambda: empty(TIMES))


def empty(schema: Schema) -> pl.DataFrame:
    """Return a frame without rows."""
    return _empty(tuple(schema.items())).clone()


@cache
def _empty(columns: tuple[tuple[str, pl.DataType], ...]) -> pl.DataFrame:
    return pl.DataFrame(schema=dict(columns))


def conform(frame: pl.DataFrame, schema: Schema) -> pl.DataFrame:
    """Return the columns of a schema, in its order and of its types.

    Raises:
        polars.exceptions.PolarsError: a column is missing, or a value does not fit its type.
    """
    # This check, and columns one by one, cost a tenth and a quarter of a query plan.
    if [*frame.schema.items()] == [*schema.items()]:
        return frame
    columns = ((frame.get_column(name), dtype) for name, dtype in schema.items())
    return pl.DataFrame([column if column.dtype == dtype else column.cast(dtype) for column, dtype in columns])


def concat(frames: Iterable[pl.DataFrame], schema: Schema) -> pl.DataFrame:
    """Concatenate several frames, conformed to a schema."""
    parts = [conform(frame, schema) for frame in frames]
    return pl.concat(parts) if parts else empty(schema)
