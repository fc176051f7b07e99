"""`spangrad lineage`: from a policy version to the spans that it was trained on, and from a span to the versions trained on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter

from commands.options import ConfigFile, Overrides, resolve
from spangrad.errors import SettingsError
from spangrad.store.lineage import Ancestor, BatchRolloutRow, SpanLineage, VersionLineage, of_span, of_version
from spangrad.store.rollout.record import counted


def lineage(
    version: Annotated[str | None, Parameter(name="POLICY@VERSION")] = None,
    /,
    *,
    span: str | None = None,
    branch: str | None = None,
    depth: int = 1,
    json_: Annotated[bool, Parameter(name="--json", negative=())] = False,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Show a version's parents, batch, rollouts and their spans; or, for a span, every version that was trained on it.

    Queries the copy of the ledger in the store at store.url. If no store answers there, the data of a stopped store (store.path, else the
    last demo's) is opened for the time of the query.

    Args:
        version: policy version, as POLICY@VERSION.
        span: span to show instead of a version, as TRACE/SPAN, both in hexadecimal.
        branch: branch of the version, if several branches have a version of that number.
        depth: number of versions to show with rollouts and spans: this one and its ancestors.
        json_: print JSON instead of text.
    """
    from commands.stopped_store import answering_client

    if (version is None) == (span is None):
        raise SettingsError("give a version, `spangrad lineage POLICY@VERSION`, or a span, `spangrad lineage --span TRACE/SPAN`.")
    if depth < 0:
        raise SettingsError(f"--depth {depth} is no number of versions. Give 0 or more.")
    version_key = None if version is None else version_name(version)
    span_key = None if span is None else span_name(span)
    with answering_client(resolve(config, set_).store) as (client, _):
        if version_key is not None:
            answer = of_version(client, *version_key, branch, depth)
            text = version_text(answer)
        else:
            assert span_key is not None
            answer = of_span(client, *span_key)
            text = span_text(answer)
    print(json.dumps(asdict(answer), indent=2) if json_ else "\n".join(text))


def version_name(text: str) -> tuple[str, int]:
    """Return the policy and the version number of POLICY@VERSION.

    Raises:
        SettingsError: the text has another form.
    """
    policy, _, number = text.rpartition("@")
    if not policy or not number.isdecimal():
        raise SettingsError(f"{text!r} names no version. Write POLICY@VERSION: policy@3.")
    return policy, int(number)


def span_name(text: str) -> tuple[str, str]:
    """Return the trace id and the span id of TRACE/SPAN.

    Raises:
        SettingsError: the text has another form.
    """
    trace, _, span = text.partition("/")
    if not trace or not span:
        raise SettingsError(f"{text!r} names no span. Write TRACE/SPAN, both in hex as `spangrad rollout show` prints them.")
    return trace, span


def version_text(lineage: VersionLineage) -> list[str]:
    """Return lines on a version, its rollouts and spans, then on its ancestors."""
    return [line for ancestor in lineage.ancestors for line in _version(lineage.policy, ancestor)]


def span_text(lineage: SpanLineage) -> list[str]:
    """Return lines on the versions that were trained on a span."""
    where = f"span {lineage.span} of trace {lineage.trace}, rollout {', '.join(lineage.rollouts)}"
    if not lineage.versions:
        return [f"{where}: trained no version"]
    direct = any(version.transition for version in lineage.versions)
    lines = [where if direct else f"{where}: no trained call itself; its rollout's calls trained"]
    for version in lineage.versions:
        since = f", and by descent {_numbers(version.descendants)}" if version.descendants else ""
        what = f"transition {version.transition}" if version.transition else f"rollout {version.rollout}"
        origin = f"{what} in group {version.group}, batch {version.batch}"
        lines.append(f"  {version.policy}@{version.version} on branch {version.branch}: {origin}{since}")
    return lines


def _version(policy: str, ancestor: Ancestor) -> Iterator[str]:
    parent = "training began with it" if ancestor.parent is None else f"from {policy}@{ancestor.parent}"
    if ancestor.parent is not None and ancestor.parent_branch != ancestor.branch:
        parent += f" on branch {ancestor.parent_branch}"
    origin = (
        f"{counted(ancestor.groups, 'group')}, {counted(ancestor.rollouts, 'rollout')} of run {ancestor.run} ({ancestor.mode})"
        if ancestor.rollouts or not ancestor.files
        else ""
    )
    if ancestor.files:
        run = ancestor.files[0]
        origin = f"{run.method} on files, step {run.step} of {run.steps}" + (f", from {origin}" if origin else "")
    batch = f", batch {ancestor.batch}: {origin}" if ancestor.batch else ""
    yield f"{policy}@{ancestor.version} on branch {ancestor.branch}, {ancestor.status}, {parent}{batch}"
    if ancestor.batch_rollouts is not None:
        yield f"  checksum {ancestor.checksum}, {ancestor.path}"
        for file in ancestor.files:
            yield f"  file {file.name}, sha256 {file.sha256}, {file.size} bytes: {counted(file.trained, 'example')}"
        for rollout in ancestor.batch_rollouts:
            yield from _rollout(rollout)


def _rollout(rollout: BatchRolloutRow) -> Iterator[str]:
    none = "" if rollout.spans else ": no call of this policy was trained"
    yield f"  rollout {rollout.rollout}, attempt {rollout.attempt}, revision {rollout.revision}, group {rollout.group}{none}"
    for span in rollout.spans:
        yield f"    span {span.trace}/{span.span}, call {span.call}"


def _numbers(numbers: list[int]) -> str:
    """Return ascending numbers as text, with runs as ranges: `2-4, 7`."""
    parts = list[list[int]]()
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}" if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
