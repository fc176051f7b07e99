"""`spangrad rewards`: the rewards in the store, rewards that are defined after the rollouts ran, and the reward service."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from commands.options import ConfigFile, Overrides, limit_builder_threads, log_to_stderr, require_directory, resolve
from commands.stopped_store import answering_client
from commands.times import parse_time_or_age

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

    from spangrad.store.datasets import Dataset

_GIVEN = """
SELECT Name, Source, uniqExact(RunId, RolloutId) AS Rollouts, countIf(CallId != '') AS OfCalls, count() AS Rewards, avg(Value) AS Mean,
    min(Value) AS Least, max(Value) AS Most
FROM (SELECT DISTINCT * EXCEPT (BuildSpec, Revision, Content, IngestedAt) FROM spangrad.rewards)
GROUP BY Name, Source
ORDER BY Name, Source
"""
"""Rewards in the store, by name and source; a reward that several build specifications give counts once."""
_OF_DATASET = """
SELECT reward.1 AS Name, reward.3 AS Source, uniqExact(RunId, RolloutId) AS Rollouts, count() AS Rewards, avg(reward.2) AS Mean,
    min(reward.2) AS Least, max(reward.2) AS Most
FROM {transitions} AS t
ARRAY JOIN arrayZip(`Rewards.Name`, `Rewards.Value`, `Rewards.Source`) AS reward
GROUP BY Name, Source
ORDER BY Name, Source
"""
_DROPS_OF_DATASET = (
    "SELECT Reason, Detail, count() AS Drops FROM {drops} AS d GROUP BY Reason, Detail ORDER BY Drops DESC, Reason, Detail LIMIT 20"
)

rewards = App(name="rewards", help="Show rewards, define new ones over stored spans, serve an evaluator.")


@rewards.command(name="list")
def _list(*, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Print the rewards in the store by name and source, and the files of builder.rewards_directory.

    Queries the store at store.url. If no store answers there, the data of a stopped store (store.path, else the last demo's) is opened
    for the time of the query.
    """
    from spangrad.store import datasets

    settings = resolve(config, set_)
    with answering_client(settings.store) as (client, _):
        given = client.query(_GIVEN).result_rows
        known = datasets.known(client)
    _print(("reward", "source", "rollouts", "of calls", "rewards", "mean", "least", "most"), given, "no rewards in the store")
    files = sorted(settings.builder.rewards_directory.glob("*.sql"))
    rows = [(file.name, version, _users(file.stem, version, known)) for file in files if (version := settings.builder.sql_hash(file.stem))]
    _print(("file", "version", "datasets"), rows, f"no SQL rewards in {settings.builder.rewards_directory}")


@rewards.command(name="backfill")
def _backfill(
    *,
    since: str,
    reward: Annotated[list[str], Parameter(help="name of a file NAME.sql in builder.rewards_directory. Can be repeated.", negative=())],
    dataset: str | None = None,
    run_id: str | None = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Evaluate SQL rewards over stored spans, and build the rollouts again as a new revision of a dataset.

    Existing transitions stay as they are. A second run of the same command changes nothing.

    Args:
        since: build rollouts of which a root span or a call arrived since this time: ISO 8601 (UTC if it has no time zone), for example
            2026-01-31T12:00, or a duration before now, for example 7d, 12h or 30m.
        dataset: name of the dataset that gets the revision; default: builder.dataset.
        run_id: build only rollouts whose spans name this run (spangrad.run.id). Other runs can be added to the same revision later.
    """
    from spangrad.store import datasets

    settings = resolve(config, set_)
    began = parse_time_or_age("--since", since, datetime.now(UTC))
    name = dataset or settings.builder.dataset
    sql_rewards = tuple(dict.fromkeys((*settings.builder.sql_rewards, *reward)))
    builder = settings.builder.model_copy(update={"dataset": name, "sql_rewards": sql_rewards})
    versions = ", ".join(f"{file}@{builder.sql_hash(file)}" for file in reward)  # raises where there is no such file
    log_to_stderr()
    limit_builder_threads()
    with answering_client(settings.store) as (client, store):
        from commands.console import rollout_progress
        from transition_builder import loop
        from transition_builder.rewards import sql

        sql.check(client, builder)
        if not any(dataset.name == name for dataset in datasets.known(client)):
            datasets.register(client, name, settings.builder.spec, settings.builder.decides, "the settings without the backfill")
        why = f"backfill of {versions} over {f'run {run_id}' if run_id else 'all runs'} since {began.isoformat(timespec='seconds')}"
        revision = datasets.register(client, name, builder.spec, builder.decides, why)
        with rollout_progress(f"building {revision}") as on_progress:
            summary = loop.rebuild(settings.model_copy(update={"builder": builder, "store": store}), began, on_progress, run_id)
        _report(client, revision, str(summary) if summary.rollouts else "nothing new")


@rewards.command(name="serve")
def _serve(*, evaluator: str, directory: Path = Path(), port: int | None = None, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Serve a Python evaluator to runners, over HTTP, until SIGTERM or Ctrl-C.

    Args:
        evaluator: MODULE:FUNCTION that is called with (input, output), and with `environment` if it has a parameter of that name.
        directory: directory of the evaluator's modules.
        port: TCP port to listen on; default: rewards.port.
    """
    require_directory("--directory", directory, "the directory of the evaluator's modules")
    settings = resolve(config, set_, {"rewards.port": port})
    log_to_stderr()
    from runner.rewards.server import serve
    from spangrad.callables import load

    sys.path.insert(0, str(directory.resolve()))
    serve(settings, load(evaluator))


def _report(client: Client, dataset: Dataset, summary: str) -> None:
    from spangrad.store import datasets

    where = f"BuildSpec = '{dataset.build_spec}'"  # a hash
    given = client.query(_OF_DATASET.format(transitions=datasets.rows_sql("transitions", where=where))).result_rows
    dropped = client.query(_DROPS_OF_DATASET.format(drops=datasets.rows_sql("drops", where=where))).result_rows
    _print(("reward", "source", "rollouts", "rewards", "mean", "least", "most"), given, "no rewards on its transitions")
    if dropped:
        _print(("drops", "detail", "calls"), dropped, "")
    print(f"{dataset}: {summary}")


def _users(name: str, version: str, known: Sequence[Dataset]) -> str:
    """Return the datasets that were built with this version of a file, joined by commas."""
    return ", ".join(str(dataset) for dataset in known if dataset.settings.get("sql_rewards", {}).get(name) == version)


def _print(columns: Sequence[str], rows: Sequence[Sequence[Any]], otherwise: str) -> None:
    from commands.console import print_table

    if not rows:
        print(otherwise)
        return
    print_table(columns, ([f"{value:.6g}" if isinstance(value, float) else value for value in row] for row in rows))
