"""Write docs/reference from the code: settings, commands, tables, attributes, reasons, metrics and what becomes of spans.

In: the settings' models, the command line, the schema's migrations in a temporary database, `spangrad/semconv.py`, the enumerations of
reasons, the collectors behind `/metrics`, spans of frameworks. Out: a Markdown page for each; with --check, exit code 1 and the names of
pages that differ. Invariant: pages hold no path, address or time of the machine that wrote them.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel

ROOT = Path(__file__).resolve().parent.parent
DIRECTORY = ROOT / "docs" / "reference"
COMMAND = ".venv/bin/python packaging/reference.py"


def settings_page() -> Iterator[str]:
    """Yield every section of the settings with its keys, types, defaults and meanings."""
    from spangrad.settings import Settings

    yield "# Settings"
    yield (
        "Flags are stronger than the environment, the environment than the file, the file than the default: "
        "[Operations](../guides/operations.md#settings)."
    )
    yield from _sections(Settings, "")


def _sections(model: type[BaseModel], prefix: str) -> Iterator[str]:
    from spangrad.settings.explain import default_text, docstrings, type_name
    from spangrad.settings.section import models_in

    texts = docstrings(model)
    rows: list[tuple[str, ...]] = []
    nested: list[tuple[str, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        key, kind = f"{prefix}{name}", field.annotation
        if inspect.isclass(kind) and issubclass(kind, BaseModel):
            nested.append((key, kind))
            continue
        nested += [(f"{key}[]", entry) for entry in models_in(kind)]
        rows.append((f"`{key}`", type_name(kind), default_text(field), texts.get(name, "")))
    if prefix:
        yield f"## {prefix.removesuffix('.')}"
        yield " ".join((model.__doc__ or "").split())
        if rows:
            yield table(("key", "type", "default", "meaning"), rows)
    for key, section in nested:
        yield from _sections(section, f"{key}.")


def cli_page() -> Iterator[str]:
    """Yield every command with its options, as its own help has them."""
    from spangrad.cli import app

    text = app.generate_docs(output_format="markdown", heading_level=1)
    body = text.split("**Services**", 1)[1].replace(f"{ROOT}/", "")
    yield "# Commands"
    yield (
        "`spangrad COMMAND --help` prints the same. `--config FILE` and `--set SECTION.KEY=VALUE` belong to every command that reads "
        "settings."
    )
    yield "**Services**" + re.sub(r"^\* `--(?:config PATH|set STR\.\.\.)`:.*\n", "", body, flags=re.MULTILINE).strip()


def tables_page() -> Iterator[str]:
    """Yield the tables of the store, with the comments of tables and columns that the store itself holds."""
    from chdb.session import Session

    from collector.schema.cluster import Layout
    from collector.schema.migrations import SCHEMA, migrate

    with tempfile.TemporaryDirectory() as directory:
        database = Session(directory)

        def rows(sql: str) -> list[list[str]]:
            return [line.split("\t") for line in str(database.query(sql, "TabSeparated")).splitlines()]

        migrate(lambda sql: str(database.query(sql, "TabSeparated")), Layout())
        tables = rows(
            "SELECT database, name, comment FROM system.tables WHERE database IN ('otel', 'spangrad', 'spangrad_internal') "
            "AND engine != 'MaterializedView' AND name NOT LIKE '.inner%' ORDER BY database = 'otel', database, name"
        )
        columns = rows("SELECT table, name, type, comment FROM system.columns WHERE database = 'spangrad' ORDER BY table, position")
        database.close()
    notes = _notes_of(SCHEMA)
    described = {f"{schema}.{name}": (comment or notes.get(f"{schema}.{name}", "")).replace("\\'", "'") for schema, name, comment in tables}
    views = [name for name in described if name.startswith("spangrad.")]
    yield "# Tables"
    yield "What people and dashboards read: each counts a thing once, however often it was delivered."
    for name in views:
        yield f"## {name}"
        yield described[name]
        yield table(
            ("column", "type", "meaning"),
            [(f"`{column}`", f"`{kind}`", meaning) for of, column, kind, meaning in columns if f"spangrad.{of}" == name],
        )
    yield "## What they are made from"
    yield (
        "`otel_traces` and `otel_logs` have the column layout of the OpenTelemetry Collector's ClickHouse exporter. The others may "
        "change with any version."
    )
    yield table(("table", "holds"), [(f"`{name}`", text) for name, text in described.items() if name not in views])


def _notes_of(directory: Path) -> dict[str, str]:
    """Return the comments right above the statements that create tables and views."""
    statement = re.compile(r"((?:^--[^\n]*\n)+)CREATE (?:TABLE|VIEW) IF NOT EXISTS (\w+\.\w+)", re.MULTILINE)
    return {
        match[2]: " ".join(line.removeprefix("--").strip() for line in match[1].splitlines())
        for path in sorted(directory.glob("*.sql"))
        for match in statement.finditer(path.read_text())
    }


def attributes_page() -> Iterator[str]:
    """Yield spangrad's own attributes, by the spans that carry them."""
    from spangrad.settings.explain import docstring_of

    path = ROOT / "spangrad" / "semconv.py"
    yield "# Attributes"
    yield (
        "Attributes of spans that spangrad writes or reads under names of its own; `spangrad/semconv.py` is their home in code. "
        "Beside them the gateway's span carries OpenTelemetry's `gen_ai.*`; what the builder reads of other instrumentations is in "
        "[Conventions](conventions.md)."
    )
    lines = path.read_text().splitlines()
    body = ast.parse(path.read_text()).body
    rows: list[tuple[str, ...]] = []
    title = ""
    for index, node in enumerate(body):
        comment = lines[node.lineno - 2] if node.lineno > 1 else ""
        if comment.startswith("# "):
            if rows:
                yield f"## {title}"
                yield table(("attribute", "meaning"), rows)
            title, rows = comment[2:].split(".")[0], []
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.value, ast.Constant):
            continue
        value = node.value.value
        if isinstance(value, str) and value.startswith("spangrad.") and not str(getattr(node.target, "id", "")).endswith("_SCOPE"):
            after = body[index + 1] if index + 1 < len(body) else None
            rows.append((f"`{value}`", docstring_of(after)))
    if rows:
        yield f"## {title}"
        yield table(("attribute", "meaning"), rows)


def reasons_page() -> Iterator[str]:
    """Yield why calls are dropped, groups skipped and attempts failed, with remedies."""
    from spangrad.settings.explain import docstrings
    from spangrad.types import AttemptFailure, DropReason, Mode, remedy
    from trainer.ledger import skips

    drops, failures, skipped, modes = map(docstrings, (DropReason, AttemptFailure, skips.SkipReason, Mode))
    yield "# Drop reasons"
    yield (
        "Every policy call of a complete rollout is a transition or a drop; a drop has one reason "
        "([which, where several hold](../concepts/completeness.md#precedence-of-reasons)). "
        "`spangrad rollout why ID` prints reason and remedy of each call of a rollout."
    )
    rows = [(f"`{reason}`", drops[reason.name], remedy(reason)) for reason in DropReason]
    yield table(("reason", "the call, or its rollout", "remedy"), rows)
    yield "## Skip reasons"
    yield "A group that the trainer does not train: [Skipped groups](../guides/training.md#skipped-groups)."
    notes = [(f"`{reason}`", skipped[reason.name], reason.remedy) for reason in skips.SkipReason]
    yield table(("reason", "the group", "remedy"), notes)
    yield "## Failures of an attempt"
    yield "[Runner](../guides/runner.md#failures) says which are the policy's doing, and have a reward, and which are retried."
    yield table(("reason", "the attempt"), [(f"`{reason}`", failures[reason.name]) for reason in AttemptFailure])
    yield "## Modes"
    yield table(("mode", "its rollouts"), [(f"`{mode}`", modes[mode.name]) for mode in Mode])


def metrics_page() -> Iterator[str]:
    """Yield the metrics of each `/metrics`, from the collectors that a scrape asks."""
    from gateway.metrics import GatewayMetrics
    from runner.environments.server import EnvironmentMetrics
    from runner.queue.metrics import QueueMetrics
    from runner.sessions.metrics import SessionCounts, SessionMetrics
    from transition_builder.metrics import BuilderMetrics

    service: Any = SimpleNamespace(
        ended=Counter[str](),
        in_flight=0,
        writer=SimpleNamespace(transactions=0, requests=0, seconds=0.0),
    )
    pool: Any = SimpleNamespace(statuses=list, waiting=0, counts=Counter[str]())
    backends: Any = SimpleNamespace(backends=[], waiting=0)
    exporter: Any = SimpleNamespace(delivered=0, refused=0, waiting_bytes=0, memory_bytes=0)
    gateway = GatewayMetrics(backends, exporter)  # labels show with the first event
    gateway.ended("policy", "dialect", "200", "", tokens_in=1, tokens_out=1, first_byte_seconds=1.0, seconds=1.0)
    gateway.published("policy", "ok", 1.0)
    yield "# Metrics"
    yield (
        "What Prometheus scrapes at `/metrics` of each service. The metrics of a training step are in "
        "[Training](../guides/training.md#metrics)."
    )
    for title, collector in (
        ("Gateway", gateway),
        ("Queue", QueueMetrics(service)),
        ("Environments", EnvironmentMetrics(pool)),
        ("Sessions of environments", SessionMetrics({"Game": SessionCounts()})),
        ("Builder", BuilderMetrics(lambda: {"train": (0.0, 0)})),
    ):
        yield f"## {title}"
        rows: list[tuple[str, ...]] = []
        for metric in collector.collect():
            shown = getattr(metric, "_labelnames", None) or (label for label in metric.samples[0].labels if label != "le")
            labels = ", ".join(f"`{label}`" for label in shown)
            name = f"{metric.name}_total" if metric.type == "counter" else metric.name
            rows.append((f"`{name}`", metric.type, labels, metric.documentation))
        yield table(("metric", "type", "labels", "meaning"), rows)


def fixtures_page() -> Iterator[str]:
    """Yield what the builder makes of spans of many frameworks, in a temporary store."""
    from commands.inspection.inspect import HEADINGS, examine, total_of
    from spangrad.settings import Settings

    rows = examine(sorted((ROOT / "tests" / "fixtures" / "spans").glob("*.jsonl")), Settings())
    yield "# What the builder makes of real spans"
    yield "`spangrad inspect tests/fixtures/spans` prints this table, and what to do about each reason."
    yield (
        "Each file holds spans of one set-up: a framework, its instrumentation, with or without a recording gateway. They were captured "
        "from small agents without rewards, and their gateway predates the contract between the parts. So most calls drop, each with a "
        "reason that [drops.md](drops.md) explains. What matters here is the last column: every span that looks like a call of a model is "
        "part of a call that the builder concluded."
    )
    yield (
        "Nobody names a rollout in these files, so each trace is one. `langchain*` have three: LangChain's own, and one for each request "
        "of its OpenAI client, whose spans lie in traces of their own. Nothing is joined across rollouts, so that each of the two calls is "
        "there twice: as LangChain reports it, without ids, and as its client does. A rollout id on all of them, as the span processors "
        "put it there (or the link of `langchain_linked`), makes two calls of the four."
    )
    yield table(HEADINGS, [*((f"`{row.file}`", *row.cells[1:]) for row in rows), total_of(rows).cells])


PAGES: dict[str, Callable[[], Iterable[str]]] = {
    "settings": settings_page,
    "cli": cli_page,
    "tables": tables_page,
    "attributes": attributes_page,
    "drops": reasons_page,
    "metrics": metrics_page,
    "fixtures": fixtures_page,
}


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = [head, tuple("---" for _ in head), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def render(name: str) -> str:
    """Return a page's text."""
    return "\n\n".join(["<!-- Written by packaging/reference.py from the code: do not edit. -->", *PAGES[name]()]) + "\n"


def main() -> int:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare the pages and write nothing")
    check: bool = parser.parse_args().check
    stale: list[str] = []
    for name in PAGES:
        path, text = DIRECTORY / f"{name}.md", render(name)
        if not path.exists() or path.read_text() != text:
            stale.append(f"docs/reference/{name}.md")
            if not check:
                path.write_text(text)
    if check and stale:
        print(f"{', '.join(stale)}: differ from the code. Write them again: {COMMAND}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
