"""Files of spans and answers in every dialect: what is read in spans, and what a real vLLM answers with our middleware and without it.

`python -m tests.support.dialects golden` writes what is read anew; `python -m tests.support.dialects capture` asks the recorded requests
again, when vLLM changes; a new request is a new file of `path` and `request`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from gateway.dialects import DIALECTS
from tests.support.policies import build_spelling_model
from tests.support.processes import engine_settings, running_bare_vllm, running_engine
from tests.support.spans import SpanFactory
from transition_builder import dialects
from transition_builder.schemas import NODES, SPANS

# Golden files: spans of a convention, and what the dialects read in them.

ROOT = Path(__file__).resolve().parents[2]
GOLDEN_FILES = ROOT / "tests/golden/dialects"
_ALWAYS = ["ScopeName", "SpanName", "Convention"]
_OMITTED_IF_EMPTY = [name for name in NODES if name not in {*SPANS, *_ALWAYS, "RolloutId"}]


@dataclass(frozen=True, slots=True)
class ConventionSpan:
    """A span with names that its convention's own source writes; the values are ours."""

    scope: str
    name: str
    attributes: dict[str, str] = field(default_factory=dict[str, str])
    status: str = "Unset"


@dataclass(frozen=True, slots=True)
class GoldenFile:
    """Spans of one convention, and each kind of them once, with what the dialects read in it and how many there are."""

    source: str
    """The fixture that has the spans, or the repositories and paths in which the names of `spans` were read."""
    described: list[dict[str, Any]]
    spans: tuple[ConventionSpan, ...] = ()

    def frame(self) -> pl.DataFrame:
        """SPANS and RolloutId."""
        return frame_of(self.spans) if self.spans else recorded(ROOT / self.source)


def golden_files() -> dict[str, GoldenFile]:
    """Every golden file, by name."""
    return {file.stem: msgspec.json.decode(file.read_bytes(), type=GoldenFile) for file in sorted(GOLDEN_FILES.iterdir())}


def frame_of(spans: Iterable[ConventionSpan]) -> pl.DataFrame:
    """SPANS and RolloutId of spans."""
    factory = SpanFactory()
    for span in spans:
        factory.span(span.name, "", scope=span.scope, status=span.status, Attributes=span.attributes)
    return pl.DataFrame(factory.spans, schema=dict(SPANS)).with_columns(RolloutId="RolloutKey")


def recorded(fixture: Path) -> pl.DataFrame:
    """SPANS and RolloutId of a recording: lines of OTLP/JSON."""
    factory = SpanFactory()
    for line in fixture.read_text().splitlines():
        factory.load_otlp(json.loads(line))
    return pl.DataFrame(factory.spans, schema=dict(SPANS)).with_columns(RolloutId="RolloutKey")


def described(spans: pl.DataFrame) -> list[dict[str, Any]]:
    """Return what the dialects read in spans, in the form of `GoldenFile.described`."""
    kinds: dict[str, dict[str, Any]] = {}
    for node in dialects.describe(spans).select(*_ALWAYS, *_OMITTED_IF_EMPTY).iter_rows(named=True):
        kind = {name: value for name, value in node.items() if name in _ALWAYS or value not in (None, False, "", [])}
        kinds.setdefault(json.dumps(kind, sort_keys=True), {"spans": 0, **kind})["spans"] += 1
    return list(kinds.values())


def write_golden() -> None:
    """Describe each golden file's spans anew; look at the difference before you keep it."""
    for name, golden in golden_files().items():
        file = GOLDEN_FILES / f"{name}.json"
        file.write_text(
            json.dumps(json.loads(file.read_text()) | {"described": described(golden.frame())}, indent=1, ensure_ascii=False) + "\n"
        )


# Runs of frameworks that nobody recorded, by the names and shapes that their sources and their tests have.


@dataclass(frozen=True, slots=True)
class SpanTree:
    """A span, and those inside of it."""

    scope: str
    name: str
    attributes: dict[str, str] = field(default_factory=dict[str, str])
    inside: tuple[SpanTree, ...] = ()
    status: str = "Ok"
    wire: bool = False
    """Mark of a span from which a request to a model leaves."""


@dataclass(frozen=True, slots=True)
class FrameworkRun:
    """Spans of one run of a framework's agent."""

    source: str
    """The repository and path that the names were read in."""
    trees: tuple[SpanTree, ...]
    calls: int
    """Number of calls that its agent made, each of which must become a transition or a drop."""
    reasons: frozenset[str]
    """Reasons of the drops, without a gateway."""

    def plant(self, factory: SpanFactory, root: str, *, gateway: bool = False, **where: Any) -> None:
        """Make the spans below a root, with a recording gateway's span behind each request if it is there."""

        def grow(tree: SpanTree, parent: str) -> None:
            span = factory.span(tree.name, parent, scope=tree.scope, status=tree.status, Attributes=dict(tree.attributes), **where)
            if tree.wire and gateway:
                factory.call(span, **where)
            for inner in tree.inside:
                grow(inner, span)

        for tree in self.trees:
            grow(tree, root)


def framework_runs() -> dict[str, FrameworkRun]:
    """Every run of tests/fixtures/frameworks, by name."""
    files = sorted((ROOT / "tests/fixtures/frameworks").iterdir())
    return {file.stem: msgspec.json.decode(file.read_bytes(), type=FrameworkRun) for file in files}


# Answers of the dialects, made comparable: without ids and times, and however many tokens came at a time.

VOLATILE = {"id", "item_id", "call_id", "created", "created_at", "signature", "sequence_number"}
"""Fields that are drawn, counted or read from a clock for each answer."""
_LENGTHENED = ("delta", "content", "text", "thinking", "partial_json", "arguments", "reasoning")
_ENDS = (".finish_reason", ".stop_reason", ".system_fingerprint")
_END = "<|im_end|>"
_MIXED = ("choices", "tool_calls")
"""Lists of one part each, or of several that vLLM mixes as they come."""


def comparable(body: bytes) -> Any:
    """Return the content of an answer in any dialect, as a value to compare."""
    return _Stream(body).content() if body.startswith((b"data:", b"event:")) else _steady(json.loads(body))


class _Stream:
    """Content of a stream's events, as a list for each choice, and the names of their fields."""

    def __init__(self, body: bytes) -> None:
        self.fields: set[str] = set()
        self.said: dict[str, list[Any]] = {}
        """Changes of fields as (path, value), and between two of them the texts and lists that went on meanwhile, by path."""
        self._state: dict[tuple[str, str], Any] = {}
        *events, end = body.split(b"\n\n")
        assert end == b""
        for event in events:
            name, _, data = event.decode().partition("data: ")
            values: dict[str, Any] = {"data": data} if data == "[DONE]" else json.loads(data)
            if str(values.get("type")).startswith("response."):
                values = _without_end(values)
            choices = values.get("choices") or [{}]
            for path, value in sorted(_leaves("", {"event": name, **values}), key=_place):
                self.fields.add(path)
                self._add(f"choice {choices[0].get('index')}", path, value)

    def content(self) -> dict[str, Any]:
        return {"said": self.said, "fields": sorted(self.fields)}

    def _add(self, choice: str, path: str, value: Any) -> None:
        parts = self.said.setdefault(choice, [])
        if isinstance(value, list) or path.endswith(_LENGTHENED):
            if value:
                if not parts or not isinstance(parts[-1], dict):
                    parts.append({})
                parts[-1][path] = parts[-1][path] + value if path in parts[-1] else value
        elif value is not None and self._state.get((choice, path)) != value:
            self._state[choice, path] = value
            if path.endswith(_ENDS):
                self.said.setdefault(f"end of {choice}", []).append((path, value))
            else:
                parts.append((path, value))


def _place(leaf: tuple[str, Any]) -> int:
    """Return a sort key of an event's fields: those that identify it, those that it lengthens, and a choice's end, which may come later."""
    path, value = leaf
    return 2 if path.endswith(_ENDS) else int(isinstance(value, list) or path.endswith(_LENGTHENED))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The values of an event, each with its path."""
    if isinstance(value, dict):
        for name, child in value.items():
            yield from _leaves(f"{path}.{name}", "…" if name in VOLATILE and child else child)
    elif isinstance(value, list) and path.endswith(_MIXED):
        for child in value:
            yield from _leaves(f"{path}[]", child)
    else:
        yield path, _steady(value)


def _without_end(value: Any) -> Any:
    """Return a value without logprobs of an answer's last token: vLLM's Responses give them only if it came with a token that has text."""
    if isinstance(value, dict):
        return {key: _without_end(child) for key, child in value.items()}
    if isinstance(value, list):
        return [
            _without_end(child) for child in value if not (isinstance(child, dict) and "logprob" in child and child.get("token") == _END)
        ]
    return value


def _steady(value: Any) -> Any:
    """Return a value without what is drawn or read from a clock, and with numbers as exact as two processes agree on."""
    if isinstance(value, dict):
        return {key: "…" if key in VOLATILE and child else _steady(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_steady(child) for child in value]
    return round(value, 3) if isinstance(value, float) else value


# What vLLM answers to the requests of tests/fixtures/gateway, with our middleware and without it.


def ask(url: str, body: bytes) -> dict[str, Any]:
    """Status, content type and text of an answer."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"}), timeout=60) as answer:
            return {"status": answer.status, "type": answer.headers["content-type"], "body": answer.read().decode()}
    except urllib.error.HTTPError as error:
        return {"status": error.code, "type": error.headers["content-type"], "body": error.read().decode()}


def capture() -> None:
    """Start two engines, and ask both."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as running:
        home = Path(directory)
        build_spelling_model(home / "model")
        tools: dict[str, object] = {"max_model_len": 512, "extra_args": ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]}
        plugged = engine_settings(home / "model", home / "cache", **tools)
        running.enter_context(running_engine(plugged, home / "engine.log"))
        bare = engine_settings(home / "model", home / "cache", **tools)
        running.enter_context(running_bare_vllm(bare, home / "bare.log"))
        for file in sorted((ROOT / "tests/fixtures/gateway").iterdir()):
            golden = json.loads(file.read_text())
            path, raw = golden["path"], json.dumps(golden["request"]).encode()
            golden["bare"] = ask(bare.gateway.engine_url + path, raw)
            golden["plugged"] = ask(plugged.gateway.engine_url + path, DIALECTS[path].parse(raw).for_engine())
            file.write_text(json.dumps(golden, indent=1) + "\n")
            print(file.stem, golden["bare"]["status"], golden["plugged"]["status"])


if __name__ == "__main__":
    {"golden": write_golden, "capture": capture}[sys.argv[1]]()


_ANSWER = "JSONExtractRaw(SpanAttributes['output.value'], 'choices', 1)"


IDS_OF_ANSWERS = f"""SELECT JSONExtract(SpanAttributes['output.value'], 'prompt_token_ids', 'Array(UInt32)') AS prompt,
    JSONExtract({_ANSWER}, 'token_ids', 'Array(UInt32)') AS response
FROM otel.otel_traces
WHERE TraceId IN ({{}}) AND position(SpanAttributes['output.value'], '"token_ids"') > 0
ORDER BY length(prompt)"""
"""Token ids in the answers that agents' spans keep, of the traces of a subquery or a list."""
