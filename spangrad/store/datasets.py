"""Datasets: names of build specifications, and SQL that reads any past state of their builds.

In: `NAME`, `NAME@REVISION` and points in time. Out: the build specification of a name, and SQL that reads its builds, transitions, drops
and rewards. Invariants: a revision of a dataset never changes its specification; a read as of a time always returns the same, except for
rows that expiry deletes.

A dataset is a name for build specifications: another specification under the same name is its next revision, and the rows of the
earlier ones stay where they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from spangrad.errors import SettingsError, StoreError
from spangrad.store.clickhouse import microseconds, moment, store_errors, store_url

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

KEY = ("RunId", "BuildSpec", "RolloutId")
"""Columns that identify a built rollout: those that a condition for `builds_sql` may contain."""
ROWS_OF = ("RunId", "RolloutId", "BuildSpec", "Revision", "Content")
"""Columns that rows of transitions, drops and rewards share with the row of `spangrad_internal.builds` that makes them count."""
_OF_ROOT = ("Mode", "GroupId", "GroupSize", "TaskId", "Attempt")
_FACTS = (*_OF_ROOT, "Revision", "Content", "Calls", "Transitions", "Drops", "Rewards", "Failure", "Watermark", "RowsRead")
_COLUMNS = "Name, Revision, BuildSpec, Settings, Reason, toUnixTimestamp64Micro(IngestedAt)"
_TRIES = 10
_LONGEST = 120
"""Largest number of characters of a setting's value in a reason."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """One revision of a dataset."""

    name: str
    revision: int
    """Number of the revision: 1, 2, ..."""
    build_spec: str
    """BuildSpec of its builds, transitions, drops and rewards."""
    settings: Mapping[str, Any]
    """Settings that determine their result: `BuilderSettings.decides`."""
    reason: str
    """Reason for this revision."""
    created: datetime

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}"


def parse(text: str) -> tuple[str, int | None]:
    """Parse `NAME` or `NAME@REVISION`; no revision means the newest.

    Raises:
        SettingsError: the text is neither.
    """
    name, at, revision = text.partition("@")
    if not name or (at and not (revision.isdecimal() and revision.isascii() and int(revision) > 0)):
        raise SettingsError(f"{text!r} names no dataset. Write NAME, or NAME@REVISION with a revision from 1.")
    return name, int(revision) if at else None


def resolve(client: Client, text: str, as_of: datetime | None = None) -> Dataset:
    """Return the dataset that a text names: `NAME`, which means its newest revision until `as_of`, or `NAME@REVISION`.

    Raises:
        SettingsError: the text names nothing.
        StoreError: there is no such dataset, or the store failed.
    """
    name, revision = parse(text)
    existing = known(client, as_of)
    matches = [dataset for dataset in existing if dataset.name == name and revision in (None, dataset.revision)]
    if matches:
        return matches[-1]
    when = f" as of {as_of.isoformat()}" if as_of else ""
    names = ", ".join(str(dataset) for dataset in existing)
    remedy = f"There are: {names}." if names else "There is none: `spangrad build` makes the one that builder.dataset names."
    raise StoreError(f"the store at {store_url(client)} has no dataset {text!r}{when}. {remedy}")


def known(client: Client, as_of: datetime | None = None) -> list[Dataset]:
    """Return all revisions of all datasets, or those that were there at a time, ordered by name and revision.

    Raises:
        StoreError: the store failed.
    """
    with store_errors(client):
        rows = client.query(f"SELECT {_COLUMNS} FROM spangrad.datasets ORDER BY Name, Revision").result_rows
    revisions = [
        Dataset(name, number, spec, json.loads(text), reason, moment(created)) for name, number, spec, text, reason, created in rows
    ]
    return [revision for revision in revisions if as_of is None or revision.created <= as_of]


def register(client: Client, name: str, build_spec: str, settings: Mapping[str, Any], reason: str = "") -> Dataset:
    """Give a build specification a name: return the revision with the same specification, if there is one, else a new one.

    Several processes may do so at once: each revision belongs to the first. `settings` are those that determine the specification
    (`BuilderSettings.decides`). `reason` is the action of the user that led to a new revision; it is stored with the differences from the
    one before.

    Raises:
        SettingsError: the name is invalid.
        StoreError: the store failed.
    """
    if not name or "@" in name:
        raise SettingsError(f"builder.dataset = {name!r} is no name of a dataset. Take one without '@', which stands before revisions.")
    for _ in range(_TRIES):
        of_name = [dataset for dataset in known(client) if dataset.name == name]
        same = [dataset for dataset in of_name if dataset.build_spec == build_spec]
        if same:
            return same[-1]
        why = "; ".join(part for part in (reason, _since(of_name[-1] if of_name else None, settings)) if part)
        row = [name, of_name[-1].revision + 1 if of_name else 1, build_spec, json.dumps(settings, sort_keys=True), why]
        with store_errors(client):
            client.insert("spangrad_internal.datasets", [row], column_names=["Name", "Revision", "BuildSpec", "Settings", "Reason"])
    raise StoreError(
        f"dataset {name!r} of the store at {store_url(client)} got a new revision by others {_TRIES} times in a row. Give each its own "
        "name."
    )


def _since(before: Dataset | None, settings: Mapping[str, Any]) -> str:
    """Describe the difference of a revision from the one before it: `as of TIME`, and the settings that differ."""
    is_at, was_at = settings.get("as_of"), before.settings.get("as_of") if before else None
    parts = [f"as of {is_at}"] if is_at and is_at != was_at else []
    if before is None:
        return "; ".join([*parts, "the first"])
    now, then = (dict(_flat({key: value for key, value in each.items() if key != "as_of"})) for each in (settings, before.settings))
    changed = [key for key in sorted({*now, *then}) if now.get(key) != then.get(key)]
    differences = ", ".join(f"{key} = {_short(now.get(key))} (was {_short(then.get(key))})" for key in changed)
    parts += [f"from all spans, not as of {was_at}"] if was_at and not is_at else []
    return "; ".join([*parts, f"other than {before}: {differences}"] if differences else parts)


def _flat(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings by their dotted names; unset ones and empty lists are left out."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        elif value not in (None, [], ()):
            yield f"{above}{name}", list(value) if isinstance(value, tuple) else value


def _short(value: Any) -> str:
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def builds_sql(as_of: datetime | None = None, where: str = "", facts: Sequence[str] = _FACTS) -> str:
    """Return a subquery with the columns of `spangrad.builds`: of each rollout its newest revision.

    Args:
        as_of: time at which a revision was the newest, UTC where it names no zone. None: now.
        where: a condition over KEY, to read less. Over other columns it could select an older revision as the newest.
        facts: columns to read beside KEY, IngestedAt and FirstBuiltAt.
    """
    selected = ", ".join(f"newest.{index} AS {name}" for index, name in enumerate((*facts, "IngestedAt"), 1))
    return (
        f"(SELECT {', '.join(KEY)}, {selected}, FirstBuiltAt FROM (SELECT {', '.join(KEY)}, min(b.IngestedAt) AS FirstBuiltAt, "
        f"argMax(({', '.join(facts)}, b.IngestedAt), Precedence) AS newest "
        f"FROM spangrad_internal.builds AS b{_among(as_of, where)} GROUP BY {', '.join(KEY)}))"
    )


def newest_sql(as_of: datetime | None = None, where: str = "") -> str:
    """Return a subquery with ROWS_OF of each rollout's newest revision; arguments as for `builds_sql`.

    A condition may also ask for rows `b` that arrived since some time: a newer revision is never older than the one before.
    """
    return (
        f"(SELECT {', '.join(KEY)}, newest.1 AS Revision, newest.2 AS Content FROM (SELECT {', '.join(KEY)}, "
        f"argMax((Revision, Content), Precedence) AS newest "
        f"FROM spangrad_internal.builds AS b{_among(as_of, where)} GROUP BY {', '.join(KEY)}))"
    )


def _among(as_of: datetime | None, where: str) -> str:
    conditions = [f"({condition})" for condition in (where, until_sql(as_of)) if condition]
    return f" WHERE {' AND '.join(conditions)}" if conditions else ""


def rows_sql(table: str, as_of: datetime | None = None, where: str = "") -> str:
    """Return a subquery with the rows of transitions, drops or rewards that count: those of each rollout's newest revision, each once.

    Further arguments are those of `builds_sql`.
    """
    columns = ", ".join(ROWS_OF)
    condition = f"({where}) AND " if where else ""
    newest = f"SELECT {columns} FROM {newest_sql(as_of, where)} AS v"
    return f"(SELECT * FROM spangrad_internal.{table} FINAL WHERE {condition}({columns}) IN ({newest}))"


def rows_of_builds_sql(table: str, where: str) -> str:
    """Return a subquery with the transitions, drops or rewards of known builds, each once, by a condition over KEY, to read less.

    The builds are the statement's parameter `builds`: BuildId of `builds_sql`.
    """
    return f"(SELECT * FROM spangrad_internal.{table} FINAL WHERE ({where}) AND BuildId IN {{builds:Array(UInt64)}})"


def built_sql(condition: str) -> str:
    """Return a subquery with the ids of the rollouts of which a build, be it the newest or not, meets a condition: read by key."""
    return f"(SELECT RolloutId FROM spangrad_internal.builds WHERE {condition})"


def roles_sql(condition: str) -> str:
    """Return a subquery with RunId and Role of the newest builds' rewards by role, by a condition over rewards that reads them by key."""
    rewards, key = f"spangrad_internal.rewards WHERE {condition} AND Role != ''", ", ".join(ROWS_OF)
    newest = newest_sql(where=f"RolloutId IN (SELECT RolloutId FROM {rewards})")
    return f"(SELECT RunId, Role FROM (SELECT DISTINCT {key}, Role FROM {rewards}) WHERE ({key}) IN (SELECT {key} FROM {newest} AS v))"


def until_sql(as_of: datetime | None) -> str:
    """Return a condition over rows `b` of `spangrad_internal.builds`: they existed at a time. Empty: there is no such time."""
    if as_of is None:
        return ""
    return f"b.IngestedAt <= fromUnixTimestamp64Micro({microseconds(as_of)})"
