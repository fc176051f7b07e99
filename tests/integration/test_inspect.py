"""`spangrad inspect`: what real spans of a dozen frameworks become, and that what is overlooked is counted."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from random import Random
from typing import Any

import pytest

from commands.inspection.inspect import examine, looks_like_a_call
from spangrad.errors import SettingsError
from spangrad.settings import Settings
from tests.support.dialects import framework_runs
from tests.support.processes import run_spangrad
from tests.support.spans import SpanFactory

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "fixtures.md"


def inspect(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_spangrad("inspect", *arguments, directory=ROOT)


def test_inspect_every_fixture_builds_with_nothing_unaccounted() -> None:
    """The page in docs/, which `packaging/reference.py` makes and compares."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert {row[0].strip("`") for row in rows} == {file.name for file in (ROOT / "tests/fixtures/spans").glob("*.jsonl")}
    for name, spans, calls, transitions, drops, unaccounted in rows:
        dropped = sum(int(part.split()[0]) for part in drops.split(", "))
        assert int(spans) > 0, name
        assert (int(calls), unaccounted) == (int(transitions) + dropped, "0"), name
        assert int(calls) > 0, name


@pytest.mark.slow  # test_transition_builder_laws holds the law for arbitrary forests
def test_inspect_spans_twice_in_random_order_gives_same_counts(tmp_path: Path) -> None:
    """Every span of every fixture twice, in shuffled requests, through a real store: the rows of the page."""
    random = Random(7)
    for file in sorted((ROOT / "tests/fixtures/spans").glob("*.jsonl")):
        spans = [
            {**resource, "scopeSpans": [{**scope, "spans": [span]}]}
            for line in file.read_text().splitlines()
            for resource in json.loads(line)["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
        ] * 2
        random.shuffle(spans)
        requests = [json.dumps({"resourceSpans": spans[at : at + 20]}) for at in range(0, len(spans), 20)]
        (tmp_path / file.name).write_text("\n".join(requests) + "\n")
    rows = [f"| `{row.file}` | {' | '.join(row.cells[1:])} |" for row in examine(sorted(tmp_path.glob("*.jsonl")), Settings())]
    assert "\n".join(rows) in PAGE.read_text()


def test_inspect_unrecorded_frameworks_are_found_in_store_without_runner(tmp_path: Path) -> None:
    frameworks = framework_runs()
    for name, run in frameworks.items():
        spans = SpanFactory()
        # Of one trace, which names no rollout.
        run.plant(spans, "", trace=name)
        for row in spans.spans:
            row |= {"RolloutKeySource": "trace"}
        (tmp_path / f"{name}.jsonl").write_bytes(spans.otlp())
    rows = {row.file.removesuffix(".jsonl"): row for row in examine(sorted(tmp_path.glob("*.jsonl")), Settings())}
    assert {name: (row.calls, set(row.drops), row.unaccounted) for name, row in rows.items()} == {
        name: (run.calls, run.reasons, 0) for name, run in frameworks.items()
    }


def test_inspect_counts_calls_that_builder_overlooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A builder that takes no span of a convention for a call, and one that loses a call that the gateway recorded."""
    from dataclasses import replace

    import polars as pl

    from transition_builder import builder

    spans = SpanFactory()
    root = spans.root(calls=2)
    spans.evaluation(root)
    spans.call(spans.client(root))
    spans.call(root)
    file = tmp_path / "two.jsonl"
    file.write_bytes(spans.otlp())
    (row,) = examine([file], Settings())
    assert row.cells == ("two.jsonl", "4", "2", "2", "0", "0")

    real = builder.build

    def losing(*given: Any) -> Any:
        built = real(*given)
        return replace(built, transitions=built.transitions.filter(pl.col("Turn") != 1))

    monkeypatch.setattr(builder, "build", losing)
    (row,) = examine([file], Settings())
    assert (row.calls, row.unaccounted) == (1, 2)  # the call without a conclusion, and its span that belongs to none


def test_inspect_unlinked_framework_spans_of_calls_are_accounted_for(tmp_path: Path) -> None:
    """LangChain's span is in its chain, or in another trace of the rollout; the client's is in the agent, and a gateway recorded some."""
    spans, seconds = SpanFactory(clocks={"gateway": -500.0}), 10**9
    root = spans.root(calls=1)
    spans.evaluation(root)
    agent = spans.span("agent", root, kind="AGENT", Duration=100 * seconds)
    for number in range(3):
        chain = spans.span("chain", agent, kind="CHAIN", Duration=5 * seconds)
        trace = "another" if number == 1 else ""
        spans.span("ChatOpenAI", chain, kind="LLM", scope="openinference.instrumentation.langchain", trace=trace, Duration=2 * seconds)
        client = spans.client(agent, Duration=seconds)
        if number == 2:
            spans.call(client)
    file = tmp_path / "unlinked.jsonl"
    file.write_bytes(spans.otlp())
    (row,) = examine([file], Settings())
    assert row.cells == ("unlinked.jsonl", "12", "3", "1", "2 no_token_ids", "0")


def test_inspect_reads_requests_without_empty_fields(tmp_path: Path) -> None:
    """OTLP's JSON leaves out a field that is empty: a name, a list, the value of an attribute."""
    span = {"traceId": "0a" * 16, "spanId": "0b" * 8, "startTimeUnixNano": "1", "endTimeUnixNano": "2", "attributes": [{"key": "empty"}]}
    file = tmp_path / "sparse.jsonl"
    file.write_text(json.dumps({"resourceSpans": [{}, {"scopeSpans": [{}, {"spans": [span]}]}]}))
    (row,) = examine([file], Settings())
    assert (row.spans, row.calls, row.unaccounted) == (1, 0, 0)


def test_inspect_prints_table_with_remedies(tmp_path: Path) -> None:
    spans = SpanFactory()
    root = spans.root(calls=1)
    spans.evaluation(root)
    spans.call(root, Logprobs=[-0.5])
    file = tmp_path / "one.jsonl"
    file.write_bytes(spans.otlp())
    answer = inspect(str(file))
    assert answer.returncode == 0, answer.stderr
    lines = answer.stdout.splitlines()
    assert [" ".join(line.split()) for line in lines if line] == [
        "file spans calls transitions drops unaccounted",
        "one.jsonl 2 1 0 1 no_logprobs 0",
        "no_logprobs: Have the engine return a logprob for each sampled token: the gateway and `spangrad engine` ask for them.",
    ]


@pytest.mark.parametrize("text", ["nonsense\n", json.dumps({"resourceLogs": []}) + "\n", '{"resourceSpans": 3}\n'])
def test_inspect_file_without_spans_is_one_sentence_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text(text)
    with pytest.raises(SettingsError, match=r"^line 1 of .*other\.jsonl is no OTLP/JSON request with spans"):
        examine([file], Settings())
    answer = inspect(str(tmp_path / "nowhere"))
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr == f"spangrad: {tmp_path / 'nowhere'} is neither a file of spans nor a directory with *.jsonl in it.\n"


@pytest.mark.parametrize(
    ("name", "scope", "attributes", "expected"),
    [
        ("chat", "spangrad.gateway", {}, True),
        ("ChatOpenAI", "", {"openinference.span.kind": "LLM"}, True),
        ("chat gpt", "", {"gen_ai.operation.name": "chat"}, True),
        ("embeddings", "", {"gen_ai.operation.name": "embeddings"}, False),
        ("openai.chat", "", {"llm.request.type": "chat"}, True),
        ("POST", "", {"url.full": "http://127.0.0.1:8000/v1/chat/completions?x=1"}, True),
        ("POST", "", {"http.url": "https://api.example.com/v1/responses"}, True),
        ("GET", "", {"url.full": "https://api.example.com/v1/models"}, False),
        ("search", "", {"openinference.span.kind": "TOOL"}, False),
    ],
)
def test_looks_like_a_call_by_name_scope_and_attributes(name: str, scope: str, attributes: dict[str, str], expected: bool) -> None:
    assert looks_like_a_call(name, scope, attributes) is expected
