"""Rewards defined by SQL files over the span store, also for rollouts that were built before.

Invariant: a file is a SELECT and nothing else, its version is the hash of its content, and a missing value is never read as 0.

A file selects `RolloutId` and `Value`, and may select `RunId`, `Attempt` (left out: the final one), `Role` (left out or empty: the
reward is for every role), and, where its rows are of calls, `CallId`, or `SpanId` with or without `TraceId`.
It may use these parameters, as ClickHouse writes them:

    {rollouts:Array(String)}   ids of the requested rollouts
    {since:DateTime64(6)}      the earliest and the latest start of a span of theirs
    {until:DateTime64(6)}

They are inserted as constants, so that the index is used, and no list of rollouts is too long for a URL.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import polars as pl

from spangrad.errors import BuilderError, StoreError
from spangrad.settings import BuilderSettings
from spangrad.store.clickhouse import constant, store_errors, store_url
from transition_builder.frames import concat, conform, empty
from transition_builder.rewards.rules.calls import reason
from transition_builder.schemas import ATTEMPT, SQL_REWARDS
from transition_builder.source.queries import StoreReader, batches, query
from transition_builder.specification import require_unchanged

if TYPE_CHECKING:
    from pathlib import Path

    from clickhouse_connect.driver.client import Client

NEEDED = ("RolloutId", "Value")
OPTIONAL = ("RunId", "Attempt", "Role", "CallId", "TraceId", "SpanId")
_OF_CALLS = ("CallId", "SpanId")
_SPAN_NAMES = ["CallId", "TraceId", "SpanId"]
_TEXTS = [*_SPAN_NAMES, "Role"]
_PARAMETER = re.compile(r"\{\s*(rollouts|since|until)\s*:[^{}]*\}")
_COMMENT = re.compile(r"--[^\n]*|/\*.*?\*/", re.DOTALL)
_NO_ROLLOUTS = (b"",)
"""Placeholder for rollout ids in statements that do not use them."""
_NUMBER = re.compile(r"^(Nullable\()?(LowCardinality\()?(U?Int(8|16|32|64)\b|Float\d+|Decimal\(([1-9]|[12]\d|3[0-8]),|Bool)")
"""Pattern of the types of Value. Polars reads no integers of more than 64 bits, and no decimals of more than 128."""


def files_of(spec: BuilderSettings) -> tuple[str, ...]:
    """Return the names of the files that a specification uses: for rewards of its own, and for rules."""
    return tuple(dict.fromkeys((*spec.sql_rewards, *(rule.where for rule in spec.rules if rule.kind == "sql" and rule.where))))


def statement(path: Path) -> str:
    """Return the SELECT in a file, without its semicolon.

    Raises:
        BuilderError: it is not one SELECT.
    """
    text = path.read_text().strip().rstrip(";").rstrip()
    statement_text = _COMMENT.sub(" ", text).lstrip(" \n\t\r(")
    if not re.match(r"(select|with)\b", statement_text, re.IGNORECASE):
        raise BuilderError(
            f"{path} is not one SELECT: it begins with {statement_text[:20].strip()!r}. A reward only reads; write a SELECT."
        )
    return text


def check(client: Client, spec: BuilderSettings) -> None:
    """Check that the store understands every file of a specification, and that its columns are those of a reward.

    Raises:
        BuilderError: a file is not a SELECT, the store refuses it, or its columns are wrong.
        SettingsError: there is no such file.
        StoreError: the store does not answer.
    """
    from clickhouse_connect.driver.exceptions import DatabaseError

    for name in files_of(spec):
        path = _path(spec, name)
        sql = f"DESCRIBE (\n{_filled(statement(path), _NO_ROLLOUTS, 0, 0)}\n)"
        with store_errors(client):
            try:
                rows = client.query(sql).result_rows
            except DatabaseError as error:
                why = str(error).strip().splitlines()[0][:500]
                raise BuilderError(f"the span store at {store_url(client)} does not take {path}: {why}. Fix the file.") from None
        _require_columns(path, {str(row[0]): str(row[1]) for row in rows})


def read(reader: StoreReader, spec: BuilderSettings, rollouts: pl.DataFrame, spans: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """Return SQL_REWARDS by a specification's files, which were checked, for the final attempts (ATTEMPT) of some rollouts.

    The times of their SPANS and CALLS bound the rows that a file reads. A file without rows of calls gives at least one row a rollout: its
    Value is null where the file gives none.

    Raises:
        BuilderError: a file was changed since it was checked, gives several values to one target, or values that a reward cannot have.
        StoreError: the store does not answer, or refuses.
    """
    names = files_of(spec)
    if not names or rollouts.is_empty():
        return empty(SQL_REWARDS)
    times = pl.concat([frame.select(pl.col("Timestamp").dt.epoch("ns")) for frame in (spans, calls)])["Timestamp"]
    first, last = (times.min(), times.max()) if times.len() else (0, 0)
    requested = rollouts.select(pl.col(name).cast(SQL_REWARDS[name]) for name in ATTEMPT).unique(maintain_order=True)
    rewards = list[pl.DataFrame]()
    for name in names:
        path = _path(spec, name)
        text, version = statement(path), spec.sql_hash(name)
        require_unchanged(spec, reader.spec)  # what was checked of the file must hold for this text
        bounds = int(first) // 1000, -(-int(last) // 1000)  # type: ignore[arg-type]
        key_batches = batches(requested["RolloutId"]) if "rollouts" in _PARAMETER.findall(text) else [_NO_ROLLOUTS]
        results = [_query(reader, path, f"SELECT * FROM (\n{_filled(text, key_batch, *bounds)}\n)") for key_batch in key_batches]
        rewards.append(_rows(pl.concat(results, how="vertical_relaxed"), requested, path, version))
    return concat(rewards, SQL_REWARDS)


def _path(spec: BuilderSettings, name: str) -> Path:
    spec.sql_hash(name)  # raises where there is no file
    return spec.rewards_directory / f"{name}.sql"


def _filled(sql: str, rollouts: Iterable[bytes], since: int, until: int) -> str:
    """Return a statement with its parameters filled in; times in microseconds."""
    values = {
        "rollouts": constant(rollouts),
        "since": f"fromUnixTimestamp64Micro({since})",
        "until": f"fromUnixTimestamp64Micro({until})",
    }
    return _PARAMETER.sub(lambda match: values[match[1]], sql)


def _query(reader: StoreReader, path: Path, sql: str) -> pl.DataFrame:
    try:
        return query(reader.client, sql)
    except StoreError as error:
        raise StoreError(f"{path}: {error}") from error


def _require_columns(path: Path, columns: Mapping[str, str]) -> None:
    missing = [name for name in NEEDED if name not in columns]
    unknown = [name for name in columns if name not in (*NEEDED, *OPTIONAL)]
    if missing or unknown:
        what = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"knows no {', '.join(unknown)}"] * bool(unknown)
        raise BuilderError(
            f"{path} selects {', '.join(columns)}: a reward {' and '.join(what)}. It selects {' and '.join(NEEDED)}, and may select "
            f"{', '.join(OPTIONAL)}."
        )
    if not _NUMBER.match(columns["Value"]):
        raise BuilderError(
            f"{path} gives Value the type {columns['Value']}, which is no number that a reward can hold. Write toFloat64(...)."
        )


def _rows(rows: pl.DataFrame, requested: pl.DataFrame, path: Path, version: str) -> pl.DataFrame:
    """Return the rewards of a file for the requested attempts, as SQL_REWARDS."""
    try:
        rows = rows.select(pl.col(name).cast(SQL_REWARDS[name]) for name in rows.columns)
    except pl.exceptions.PolarsError as error:
        raise BuilderError(f"{path} gives values that a reward cannot have: {reason(error)}. Convert them in the SELECT.") from error
    on = [name for name in ATTEMPT if name in rows.columns]
    if "RunId" not in on:
        _require_one_run(rows, requested, path)
    valued = rows.join(requested, on=on, maintain_order="left")
    _require_one_value(valued, path)
    of_calls = any(name in rows.columns for name in _OF_CALLS)
    parts = [valued] if of_calls else [valued, requested.join(valued, on=ATTEMPT, how="anti", maintain_order="left")]
    named = pl.concat(parts, how="diagonal").with_columns(Name=pl.lit(path.stem), RuleHash=pl.lit(version), PerCall=pl.lit(of_calls))
    return conform(named.with_columns(pl.lit("").alias(name) for name in _TEXTS if name not in named.columns), SQL_REWARDS).with_columns(
        pl.col(_TEXTS).fill_null("")
    )


def _require_one_value(rows: pl.DataFrame, path: Path) -> None:
    of = [name for name in (*ATTEMPT, "Role", *_SPAN_NAMES) if name in rows.columns]
    repeated = rows.group_by(of, maintain_order=True).len().filter(pl.col("len") > 1)
    if repeated.height:
        row = repeated.row(0, named=True)
        what = ", ".join(f"{name} {row[name]!r}" for name in of)
        raise BuilderError(f"{path} gives {row['len']} values for {what}. Give one: aggregate, with GROUP BY.")


def _require_one_run(rows: pl.DataFrame, requested: pl.DataFrame, path: Path) -> None:
    ambiguous = requested.filter(pl.col("RolloutId").is_duplicated()).join(rows.select("RolloutId"), on="RolloutId")
    if ambiguous.height:
        raise BuilderError(
            f"{path} does not say which run's rollout {ambiguous['RolloutId'][0]!r} it means: several have one. Select RunId."
        )
