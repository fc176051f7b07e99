"""`spangrad inspect`: the transitions and drops that the builder makes of files of spans, in a temporary store.

In: files of OTLP/JSON, one request a line (the format of the Collector's file exporter). Out: a table of spans, calls, transitions and
drops by file. Invariant: a span that looks like a model call, and belongs to no call that the builder concluded, is counted as unaccounted
for. This module recognises such spans independently of the builder.
"""

from __future__ import annotations

import json
import sys
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from cyclopts import Parameter

from commands.options import ConfigFile, Overrides, limit_builder_threads, resolve
from spangrad import semconv
from spangrad.errors import SettingsError, StoreError
from spangrad.http.json_http import ask
from spangrad.http.service import RemoteService
from spangrad.settings import Settings
from spangrad.types import remedy

HEADINGS = ("file", "spans", "calls", "transitions", "drops", "unaccounted")
_ENDINGS = ("/chat/completions", "/completions", "/responses", "/messages")
_POST_SECONDS = 60.0
_OPERATIONS = frozenset({"chat", "text_completion", "generate_content"})


def inspect(
    *paths: Annotated[Path, Parameter(name="FILE", allow_leading_hyphen=False)],
    reasons: bool = True,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Build files of spans in a temporary store, and print the numbers of calls, transitions and drops in each file.

    No running store is used or changed, and nothing is kept. The exit code is 1 if a span that looks like a model call is unaccounted for.

    Args:
        paths: files of OTLP/JSON, one request a line, or directories of such files (*.jsonl).
        reasons: print also, for each drop reason in the table, what to do about it.
    """
    if not paths:
        raise SettingsError("no file of spans is named: `spangrad inspect FILE`, or a directory with *.jsonl in it.")
    settings = resolve(config, set_)
    rows = examine(list(_files(paths)), settings)
    _print(rows, reasons=reasons)
    if any(row.unaccounted for row in rows):
        sys.exit(1)


@dataclass(frozen=True, slots=True)
class FileReport:
    """Numbers of spans, calls, transitions and drops of one file."""

    file: str
    spans: int
    calls: int
    transitions: int
    drops: Mapping[str, int]
    """Number of dropped calls by drop reason."""
    unaccounted: int
    """Number of spans that look like a model call and belong to none, and of recorded calls with no conclusion or more than one."""

    @property
    def cells(self) -> tuple[str, ...]:
        """The row's values as text, in the order of the table's columns."""
        drops = ", ".join(f"{count} {reason}" for reason, count in sorted(self.drops.items(), key=lambda item: (-item[1], item[0]))) or "0"
        return self.file, str(self.spans), str(self.calls), str(self.transitions), drops, str(self.unaccounted)


_Key = tuple[str, str]
"""Trace and span id of a span."""


@dataclass(slots=True)
class _Spans:
    """Spans of one file: the parent of each, those that look like calls, and the requests that hold them."""

    parents: dict[_Key, _Key] = field(default_factory=dict[_Key, _Key])
    call_like: dict[_Key, tuple[str, int, int]] = field(default_factory=dict[_Key, tuple[str, int, int]])
    """Rollout that each names, else its trace; its start and end, in nanoseconds."""
    requests: list[bytes] = field(default_factory=list[bytes])

    @property
    def traces(self) -> list[str]:
        """Ids of the spans' traces, sorted."""
        return sorted({trace for trace, _ in self.parents})


def examine(files: Sequence[Path], settings: Settings) -> list[FileReport]:
    """Send files to a temporary store, build everything in it, and return one row a file.

    Raises:
        SettingsError: a file is not OTLP/JSON.
        StoreError: the store refused a request.
    """
    from commands.stopped_store import own_store
    from spangrad.store.clickhouse import connect, store_errors

    limit_builder_threads()
    from transition_builder import loop

    read = {file: _read(file) for file in files}
    with TemporaryDirectory() as directory, own_store(Path(directory) / "store", settings.store) as store:
        target = RemoteService("the temporary store", store.otlp_endpoint, store.token, StoreError, "Run the command again.")
        for spans in read.values():
            for request in spans.requests:
                ask(target, "POST", "/v1/traces", request, seconds=_POST_SECONDS)
        # All spans have arrived, so the builder need not wait.
        builder = settings.builder.model_copy(update={"quiet_seconds": 0.0, "incomplete_after_seconds": 0.0})
        loop.build_once(settings.model_copy(update={"store": store, "builder": builder}))
        client = connect(store)
        with store_errors(client):
            rows = [_row(file.name, spans, client) for file, spans in read.items()]
        client.close()
    return rows


def looks_like_a_call(name: str, scope: str, attributes: Mapping[str, str]) -> bool:
    """Return whether a span looks like a model call in any convention. This is a rough check that rather accepts too many spans."""
    url = attributes.get("url.full") or attributes.get("http.url") or attributes.get("http.target") or ""
    return (
        scope == semconv.GATEWAY_SCOPE
        or attributes.get(semconv.OPENINFERENCE_KIND) == "LLM"
        or attributes.get("gen_ai.operation.name") in _OPERATIONS
        or "llm.request.type" in attributes
        or name in {"ai.generateText.doGenerate", "ai.streamText.doStream"}
        or url.split("?")[0].endswith(_ENDINGS)
    )


def total_of(rows: Sequence[FileReport]) -> FileReport:
    """Return the numbers of all files."""
    return FileReport(
        "all",
        sum(row.spans for row in rows),
        sum(row.calls for row in rows),
        sum(row.transitions for row in rows),
        sum((Counter(row.drops) for row in rows), Counter()),
        sum(row.unaccounted for row in rows),
    )


def _print(rows: Sequence[FileReport], *, reasons: bool) -> None:
    from commands.console import plain_console, plain_table

    console = plain_console()
    table = plain_table(*HEADINGS, right=[place for place, heading in enumerate(HEADINGS) if heading not in {"file", "drops"}])
    for row in rows:
        table.add_row(*row.cells, style="red" if row.unaccounted else "")
    total = total_of(rows)
    if len(rows) > 1:
        table.add_row(*total.cells, style="bold")
    console.print(table)
    for reason in total.drops if reasons else ():
        console.print(f"{reason}: {remedy(reason)}", highlight=False)


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not files or not files[0].is_file():
            raise SettingsError(f"{path} is neither a file of spans nor a directory with *.jsonl in it.")
        yield from files


def _read(file: Path) -> _Spans:
    spans = _Spans()
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            for resource in json.loads(line)["resourceSpans"]:
                for scope in resource.get("scopeSpans", ()):  # OTLP's JSON leaves out what is empty
                    for span in scope.get("spans", ()):
                        key = span["traceId"].lower(), span["spanId"].lower()
                        spans.parents[key] = key[0], span.get("parentSpanId", "").lower()
                        attributes = {
                            attribute["key"]: str(next(iter(attribute.get("value", {}).values()), ""))
                            for attribute in span.get("attributes", [])
                        }
                        if looks_like_a_call(span.get("name", ""), scope.get("scope", {}).get("name", ""), attributes):
                            rollout = attributes.get(semconv.ROLLOUT_ID) or key[0]
                            spans.call_like[key] = rollout, int(span.get("startTimeUnixNano", 0)), int(span.get("endTimeUnixNano", 0))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SettingsError(f"line {number} of {file} is no OTLP/JSON request with spans ({error!r}).") from None
        spans.requests.append(line)
    return spans


_CONCLUDED = """
SELECT TraceId, SpanId, CallId, '' AS Reason FROM spangrad.transitions WHERE TraceId IN {traces:Array(String)}
UNION ALL
SELECT TraceId, SpanId, CallId, Reason FROM spangrad.drops WHERE TraceId IN {traces:Array(String)} AND CallId != ''
"""
_RECORDED = "SELECT CallId FROM spangrad.calls WHERE TraceId IN {traces:Array(String)}"


def _row(name: str, spans: _Spans, client: Any) -> FileReport:
    traces = {"traces": spans.traces}
    concluded = list(client.query(_CONCLUDED, parameters=traces).result_rows)
    recorded = {row[0] for row in client.query(_RECORDED, parameters=traces).result_rows}
    calls = Counter(call for _, _, call, _ in concluded)
    drops = Counter(reason for *_, reason in concluded if reason)
    double = sum(count - 1 for count in calls.values())
    lost = len(recorded - calls.keys())
    unaccounted = len(_unaccounted(spans, {(trace, span) for trace, span, _, _ in concluded}))
    return FileReport(name, len(spans.parents), len(calls), sum(not reason for *_, reason in concluded), drops, double + lost + unaccounted)


def _unaccounted(spans: _Spans, calls: set[_Key]) -> set[_Key]:
    """Return call-like spans that are neither a call, nor its ancestor or descendant, nor a framework's own span in which a call began."""
    ancestors = {call: [key for key in _ancestors(call, spans.parents) if key in spans.call_like] for call in calls}
    linked = {key for call_like in ancestors.values() for key in call_like}
    apart = {key for key in spans.call_like.keys() - linked if not calls & set(_ancestors(key, spans.parents))}
    # A framework that links no spans has a span of its own for each call. The client's span, not the gateway's, is of its process's clock.
    begun = dict[str, list[int]]()
    for outermost in {call_like[-1] for call_like in ancestors.values() if call_like}:
        rollout, start, _ = spans.call_like[outermost]
        insort(begun.setdefault(rollout, []), start)
    unaccounted = set[_Key]()
    for key in sorted(apart, key=lambda key: (spans.call_like[key][2], key)):
        rollout, start, end = spans.call_like[key]
        starts = begun.get(rollout, [])
        first = bisect_left(starts, start)
        if first < len(starts) and starts[first] <= end:
            del starts[first]
        else:
            unaccounted.add(key)
    return unaccounted


def _ancestors(key: _Key, parents: Mapping[_Key, _Key]) -> Iterator[_Key]:
    """Yield a span and its ancestors, as far as the file holds them."""
    seen = set[tuple[str, str]]()
    while key in parents and key not in seen:
        seen.add(key)
        yield key
        key = parents[key]
