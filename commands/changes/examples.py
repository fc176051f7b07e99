"""Sets of examples: files of conversations for `spangrad finetune`, to which people add rollouts one by one.

In: the id of a rollout, the name of a set. Out: lines of `page.examples/NAME.jsonl`, as `spangrad export sft` writes them. Invariant: a
rollout is in a set once: what is added again replaces its lines; a reader sees the file before or after, never in between.
"""

from __future__ import annotations

import fcntl
import json
from contextlib import closing
from pathlib import Path

from spangrad.errors import JSON_ERRORS, BuilderError
from spangrad.processes import make_private
from spangrad.settings import Settings
from spangrad.store.rollout.record import counted


def add_rollout(rollout: str, name: str, settings: Settings) -> str:
    """Add the conversations of a rollout to a set; return a sentence on what was added.

    Raises:
        StoreError: the store failed, or nothing was built with these settings.
        BuilderError: the rollout has no call with a text, or the file cannot be written or holds another line.
    """
    from commands.data.export import dataset_of_settings
    from spangrad.store.clickhouse import connect
    from transition_builder.export import formats
    from transition_builder.export.reading import ExportSelection

    file = settings.page.examples / f"{name}.jsonl"
    weights = settings.trainer.credit.reward_weights
    try:
        make_private(file.parent)
        with file.with_name(f".{name}.lock").open("w") as lock, closing(connect(settings.store)) as client:
            fcntl.flock(lock, fcntl.LOCK_EX)
            dataset = settings.trainer.dataset or dataset_of_settings(client, settings, None)
            selection = ExportSelection(dataset, rollouts=(rollout,), reward_weights=weights)
            added = file.with_name(f".{name}.added")
            try:
                done = formats.export(client, "sft", selection, added, force=True)
                lines = _lines(added)
                if lines:
                    _replace(file, rollout, lines)
            finally:
                added.unlink(missing_ok=True)
    except OSError as error:
        raise BuilderError(
            f"{file} cannot be written ({error.strerror or error}). Set page.examples to a directory that can be."
        ) from error
    if not lines:
        reasons = ", ".join(f"{count} {reason}" for reason, count in done.tally.left_out.items()) or "it has no build of this dataset"
        raise BuilderError(f"rollout {rollout!r} has no conversation in {done.dataset}: {reasons}.")
    return f"{counted(len(lines), 'conversation')} of {rollout} in {file}: `spangrad finetune sft {file}` trains on it."


def _replace(file: Path, rollout: str, lines: list[bytes]) -> None:
    """Put lines of a rollout into a file, in the place of those that it has of it."""
    kept = list[bytes]()
    for number, line in enumerate(_lines(file) if file.exists() else (), 1):
        try:
            other = json.loads(line)["meta"]["rollout"] != rollout
        except (*JSON_ERRORS, KeyError, TypeError) as error:
            raise BuilderError(
                f"{file}, line {number}, is no conversation of a rollout ({error!r}). Fix the line, or remove it."
            ) from error
        if other:
            kept.append(line)
    whole = file.with_name(f".{file.name}.part")
    whole.write_bytes(b"".join([*kept, *lines]))
    whole.replace(file)


def _lines(file: Path) -> list[bytes]:
    """Return the lines of a file with their ends; of a text, splitlines() would cut JSON at U+2028."""
    return file.read_bytes().splitlines(keepends=True)
