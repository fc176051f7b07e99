"""`spangrad export`: transitions, conversations and preferences as files for other tools."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

from cyclopts import Parameter

from commands.options import ConfigFile, Overrides, log_to_stderr, resolve
from commands.stopped_store import answering_client
from commands.times import parse_time
from spangrad.errors import SettingsError, StoreError
from spangrad.settings import Selection
from spangrad.store.clickhouse import store_url
from spangrad.types import DropReason

if TYPE_CHECKING:
    from datetime import datetime

    from clickhouse_connect.driver.client import Client

    from spangrad.settings import Settings
    from transition_builder.export.reading import ExportReader

Several = Annotated[list[str] | None, Parameter(negative=())]


def export(
    format_: Annotated[
        Literal["parquet", "huggingface", "verl", "verl-sft", "sft", "sft-tokens", "preferences", "training-trace"],
        Parameter(name="FORMAT"),
    ],
    /,
    *,
    out: Path,
    dataset: str | None = None,
    as_of: str | None = None,
    run: Several = None,
    rollout: Several = None,
    mode: Several = None,
    since: str | None = None,
    agent: str | None = None,
    model: str | None = None,
    policy: str | None = None,
    tool: str | None = None,
    component: str | None = None,
    min_return: float | None = None,
    min_margin: float = 0.0,
    dropped: Several = None,
    force: Annotated[bool, Parameter(negative=())] = False,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Write transitions and their texts as files for other tools, and print how many calls were left out, by reason.

    Queries the store at store.url. If no store answers there, the data of a stopped store (store.path, else the last demo's) is opened
    for the time of the export. Rewards are weighted by trainer.credit.reward_weights.

    Args:
        format_: format of the files.
        out: file to write; a directory for huggingface.
        dataset: NAME for the newest revision of a dataset, or NAME@REVISION. Default: the dataset that the trainer reads, which is
            trainer.dataset, else the one that the settings build.
        as_of: export the store as it was at this time (ISO 8601; UTC if it has no time zone).
        run: export only rollouts of this run. Can be repeated.
        rollout: export only the rollout with this id. Can be repeated.
        mode: export only rollouts of this mode. Can be repeated.
        since: export only rollouts that were first built at this time or later (ISO 8601; UTC if it has no time zone).
        agent: export only calls of agents whose whole name matches this regular expression.
        model: export only calls for which the whole name of the requested model matches this regular expression.
        policy: export only calls for which the whole name of the policy that answered matches this regular expression.
        tool: export only calls that caused a tool to run whose whole name matches this regular expression.
        component: export only calls inside an agent, chain or tool whose whole name matches this regular expression.
        min_return: export only rollouts whose weighted rewards sum up to at least this.
        min_margin: largest difference of two returns that still counts as a tie; for preferences only.
        dropped: export also calls that were dropped for this reason, for example no_token_ids; for text formats only. Can be repeated.
        force: replace the file at --out; for huggingface the directory, if it is empty or an export.
    """
    settings = resolve(config, set_)
    log_to_stderr()
    from commands.console import rollout_progress
    from transition_builder.export import formats
    from transition_builder.export.reading import ExportSelection

    if min_margin and format_ != "preferences":
        raise SettingsError(f"--min-margin is of preferences, and {format_} compares no returns. Leave it out, or take --min-return.")
    rollout_filter = ExportSelection(
        dataset or settings.trainer.dataset or settings.builder.dataset,
        as_of=None if as_of is None else parse_time("--as-of", as_of),
        runs=tuple(run or ()),
        rollouts=tuple(rollout or ()),
        modes=tuple(mode or ()),
        since=None if since is None else parse_time("--since", since),
        selection=Selection(agents=agent, models=model, policies=policy, tools=tool, components=component),
        min_return=min_return,
        reward_weights=settings.trainer.credit.reward_weights,
        dropped=tuple(_reason(name) for name in dropped or ()),
    )
    formats.require_place(format_, rollout_filter.dropped)
    # SIGTERM, as a scheduler sends it, then removes half-written files, as Ctrl-C does.
    signal.signal(signal.SIGTERM, _stopped)
    with answering_client(settings.store) as (client, _), rollout_progress("exporting") as progress:
        if not (dataset or settings.trainer.dataset):
            rollout_filter = replace(rollout_filter, dataset=dataset_of_settings(client, settings, rollout_filter.as_of))
        done = formats.export(client, format_, rollout_filter, out, force=force, min_margin=min_margin, progress=progress)
        elsewhere = "" if done.tally.calls else _elsewhere(client, rollout_filter.runs)
    _show(done, out)
    if not done.tally.calls:
        print(f"nothing was written: {done.dataset} holds no call of the rollouts that were asked for.{elsewhere}", file=sys.stderr)
    elif not done.tally.calls_written:
        print("nothing was written: every call was left out, as the table says.", file=sys.stderr)


def dataset_of_settings(client: Client, settings: Settings, as_of: datetime | None) -> str:
    """Return the revision of builder.dataset that the settings build: the one that the trainer reads.

    Raises:
        StoreError: nothing was built with these settings under that name.
    """
    from spangrad.store import datasets

    name, spec = settings.builder.dataset, settings.builder.spec
    revisions = [dataset for dataset in datasets.known(client, as_of) if dataset.name == name]
    if revisions and all(revision.build_spec != spec for revision in revisions):
        raise StoreError(
            f"the store at {store_url(client)} holds no revision of {name} that was built with these settings. "
            f"Name one with --dataset: {', '.join(map(str, revisions))}; or `spangrad build` with them first."
        )
    return next((str(revision) for revision in revisions if revision.build_spec == spec), name)


def _elsewhere(client: Client, runs: Sequence[str]) -> str:
    """Return a sentence with the datasets that hold rollouts of these runs, or of all runs if none are given."""
    from spangrad.store import datasets

    of_runs = "WHERE RunId IN {runs:Array(String)}" if runs else ""
    rows = client.query(f"SELECT BuildSpec, count() FROM spangrad.builds {of_runs} GROUP BY BuildSpec", {"runs": list(runs)}).result_rows
    built = {str(spec): int(count) for spec, count in rows}
    dataset_counts = [f"{dataset}: {built[dataset.build_spec]}" for dataset in datasets.known(client) if dataset.build_spec in built]
    return f" Rollouts of {'these' if runs else 'all'} runs by dataset: {', '.join(dataset_counts)}." if dataset_counts else ""


def _reason(text: str) -> DropReason:
    try:
        return DropReason(text)
    except ValueError:
        raise SettingsError(f"--dropped {text!r} is no reason of a drop. `spangrad rollout why` and spangrad.drops name them.") from None


def _stopped(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def _show(done: ExportReader, out: Path) -> None:
    """Print the numbers of calls written and left out, by reason, with their sum."""
    from commands.console import print_table

    tally = done.tally
    rows = [
        *((name.replace("_", " "), count) for name, count in sorted(tally.written.items())),
        ("calls written", tally.calls_written),
        *((f"calls left out, {reason}", count) for reason, count in sorted(tally.left_out.items())),
        ("calls in all", tally.calls),
        ("rollouts", tally.rollouts),
        *([("rollouts without a call", tally.bare_rollouts)] if tally.bare_rollouts else []),
        *((f"groups without a pair, {reason}", count) for reason, count in sorted(tally.groups_left_out.items())),
    ]
    print_table(("", "count"), rows, right=[1])
    print(f"{done.dataset} -> {out}")
