"""`spangrad inspect`: what the builder would make of files of spans, in a store of their own.

In: files of OTLP/JSON, a request a line (what the collector's file exporter writes). Out: a table of file x spans x calls x transitions x
drops, for people or as a page of the docs. Invariant: what looks like a model's call in a file and is in no call that the builder concluded
is counted as unaccounted, whichever way it was overlooked: the spans are judged here by themselves, not as the builder judges them.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from cyclopts import Parameter

from commands.options import ConfigFile, Overrides, resolve
from spangrad import semconv
from spangrad.errors import SettingsError, StoreError
from spangrad.settings import Settings, StoreSettings

_PAGE = """# What the builder makes of real spans

Made by `spangrad inspect {paths} --page {page}`; a test makes it again and compares.

Each file of `tests/fixtures/spans` holds spans of one set-up: a framework, its instrumentation, with or without a recording gateway.
They were captured from small agents that nobody rewarded, and their gateway predates the contract between the parts. So most calls drop,
each with a reason that [drops.md](drops.md) explains. What matters here is the last column: every span that looks like a call of a model
is part of a call that the builder concluded.

Nobody names a rollout in these files, so each trace is one. `langchain*` have three: LangChain's own, and one for each request of its
OpenAI client, whose spans lie in traces of their own. Nothing is joined across rollouts, so that each of the two calls is there twice: as
LangChain tells of it, without ids, and as its client does. A rollout id on all of them, as the span processors put it there (or the link
of `langchain_linked`), makes two calls of the four.

"""
_HEADINGS = ("file", "spans", "calls", "transitions", "drops", "unaccounted")
_ENDINGS = ("/chat/completions", "/completions", "/responses", "/messages")
_OPERATIONS = frozenset({"chat", "text_completion", "generate_content"})


def inspect(
    *paths: Annotated[Path, Parameter(name="FILE", allow_leading_hyphen=False)],
    page: Path | None = None,
    reasons: bool = True,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Build files of spans in a store of their own, and print what became of the calls in each.

    Nothing is kept, and no running store is touched. Exit code 1 where something that looks like a model's call is in no call.

    Args:
        paths: files of OTLP/JSON lines, or directories of *.jsonl.
        page: write the table there as Markdown, instead of printing it.
        reasons: end with the remedies of the reasons.
    """
    settings = resolve(config, set_)
    files = list(_files(paths))
    rows = examine(files, settings)
    if page is not None:
        page.write_text(_PAGE.format(paths=" ".join(map(str, paths)), page=page) + markdown(rows))
    else:
        _print(rows, reasons=reasons)
    if any(row.unaccounted for row in rows):
        sys.exit(1)


@dataclass(frozen=True, slots=True)
class Row:
    """What became of the spans of a file."""

    file: str
    spans: int
    calls: int
    transitions: int
    drops: Mapping[str, int]
    """Calls by reason."""
    unaccounted: int
    """Spans that look like a model's call and are part of no call; recorded calls without a conclusion, or with two."""

    @property
    def cells(self) -> tuple[str, ...]:
        """As text, in the order of the table's columns."""
        drops = ", ".join(f"{count} {reason}" for reason, count in sorted(self.drops.items(), key=lambda one: (-one[1], one[0]))) or "0"
        return self.file, str(self.spans), str(self.calls), str(self.transitions), drops, str(self.unaccounted)


@dataclass(slots=True)
class _Spans:
    """Of a file: parents by trace and span, and which spans look like calls."""

    parents: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict[tuple[str, str], tuple[str, str]])
    looks: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    requests: list[bytes] = field(default_factory=list[bytes])

    @property
    def traces(self) -> list[str]:
        """Their ids."""
        return sorted({trace for trace, _ in self.parents})


def examine(files: Sequence[Path], settings: Settings) -> list[Row]:
    """Post files to a store of their own, build all of it, and compare.

    Raises:
        SettingsError: a file holds no OTLP/JSON.
        StoreError: the store did not take a request.
    """
    from commands.stopped_store import own_store
    from spangrad.store.clickhouse import connect, store_errors
    from transition_builder import loop

    read = {file: _read(file) for file in files}
    with TemporaryDirectory() as directory, own_store(Path(directory) / "store", settings.store) as store:
        for spans in read.values():
            for request in spans.requests:
                _post(store, request)
        # All of it is there: nothing is waited for.
        builder = settings.builder.model_copy(update={"quiet_seconds": 0.0, "incomplete_after_seconds": 0.0})
        loop.build_once(settings.model_copy(update={"store": store, "builder": builder}))
        client = connect(store)
        with store_errors(store.url):
            rows = [_row(file.name, spans, client) for file, spans in read.items()]
        client.close()
    return rows


def looks_like_a_call(name: str, scope: str, attributes: Mapping[str, str]) -> bool:
    """Whether a span seems to tell of a model's call, whatever the convention: a rough, generous judgement."""
    asked = attributes.get("url.full") or attributes.get("http.url") or attributes.get("http.target") or ""
    return (
        scope == semconv.GATEWAY_SCOPE
        or attributes.get(semconv.OPENINFERENCE_KIND) == "LLM"
        or attributes.get("gen_ai.operation.name") in _OPERATIONS
        or "llm.request.type" in attributes
        or name in {"ai.generateText.doGenerate", "ai.streamText.doStream"}
        or asked.split("?")[0].endswith(_ENDINGS)
    )


def markdown(rows: Sequence[Row]) -> str:
    """The table, with a line for all of it."""
    lines = [_HEADINGS, tuple("---" for _ in _HEADINGS), *((f"`{row.cells[0]}`", *row.cells[1:]) for row in rows), _total(rows).cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _total(rows: Iterable[Row]) -> Row:
    rows = list(rows)
    drops = Counter[str]()
    for row in rows:
        drops.update(row.drops)
    return Row(
        "all",
        sum(row.spans for row in rows),
        sum(row.calls for row in rows),
        sum(row.transitions for row in rows),
        drops,
        sum(row.unaccounted for row in rows),
    )


def _print(rows: Sequence[Row], *, reasons: bool) -> None:
    from rich.table import Table

    from commands.console import plain_console
    from commands.training.build_report import remedy

    console = plain_console(160)
    table = Table(box=None, pad_edge=False)
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading in {"file", "drops"} else "right", overflow="fold")
    for row in rows:
        table.add_row(*row.cells, style="red" if row.unaccounted else "")
    total = _total(rows)
    if len(rows) > 1:
        table.add_row(*total.cells, style="bold")
    console.print(table)
    for reason in total.drops if reasons else ():
        console.print(f"{reason}: {remedy(reason)}", highlight=False)


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        found = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not found or not found[0].is_file():
            raise SettingsError(f"{path} is neither a file of spans nor a directory with *.jsonl in it.")
        yield from found


def _read(file: Path) -> _Spans:
    spans = _Spans()
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            for resource in json.loads(line)["resourceSpans"]:
                for scope in resource["scopeSpans"]:
                    for span in scope["spans"]:
                        key = span["traceId"].lower(), span["spanId"].lower()
                        spans.parents[key] = key[0], span.get("parentSpanId", "").lower()
                        attributes = {one["key"]: str(next(iter(one["value"].values()), "")) for one in span.get("attributes", [])}
                        if looks_like_a_call(span["name"], scope.get("scope", {}).get("name", ""), attributes):
                            spans.looks.add(key)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SettingsError(f"line {number} of {file} is no OTLP/JSON request with spans ({error!r}).") from None
        spans.requests.append(line)
    return spans


def _post(store: StoreSettings, body: bytes) -> None:
    request = urllib.request.Request(f"{store.otlp_endpoint}/v1/traces", body, {"Content-Type": "application/json"}, method="POST")
    try:
        urllib.request.urlopen(request, timeout=60).close()
    except urllib.error.HTTPError as error:
        raise StoreError(f"the store refused a request: {error.read().decode(errors='replace')[:500]}") from None


_CONCLUDED = """
SELECT TraceId, SpanId, CallId, '' AS Reason FROM otel.v_transitions WHERE TraceId IN {traces:Array(String)}
UNION ALL
SELECT TraceId, SpanId, CallId, Reason FROM otel.v_drops WHERE TraceId IN {traces:Array(String)} AND CallId != ''
"""
_RECORDED = "SELECT CallId FROM otel.v_calls WHERE TraceId IN {traces:Array(String)} AND IdsSource != 'agent'"


def _row(name: str, spans: _Spans, client: Any) -> Row:
    traces = {"traces": spans.traces}
    concluded = list(client.query(_CONCLUDED, parameters=traces).result_rows)
    recorded = {row[0] for row in client.query(_RECORDED, parameters=traces).result_rows}
    calls = Counter(call for _, _, call, _ in concluded)
    drops = Counter(reason for *_, reason in concluded if reason)
    double = sum(count - 1 for count in calls.values())
    lost = len(recorded - calls.keys())
    silent = len(_silent(spans, {(trace, span) for trace, span, _, _ in concluded}))
    return Row(name, len(spans.parents), len(calls), sum(not reason for *_, reason in concluded), drops, double + lost + silent)


def _silent(spans: _Spans, calls: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Spans that look like calls and are neither one, nor above or below one, nor the framework's word for one beside them."""
    above = {key for call in calls for key in _up(call, spans.parents)}
    apart = {key for key in spans.looks - above if not calls & set(_up(key, spans.parents))}
    # Frameworks that link nothing have their own span of a call beside the client's, below the same parent: one for one.
    beside = Counter(spans.parents[call] for call in calls if spans.parents.get(call, ("", ""))[1])
    silent = set[tuple[str, str]]()
    for key in sorted(apart):
        beside[spans.parents[key]] -= 1
        if beside[spans.parents[key]] < 0:
            silent.add(key)
    return silent


def _up(key: tuple[str, str], parents: Mapping[tuple[str, str], tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """A span and all above it, as far as they are there."""
    seen = set[tuple[str, str]]()
    while key in parents and key not in seen:
        seen.add(key)
        yield key
        key = parents[key]
