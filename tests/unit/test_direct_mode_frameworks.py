"""docs/guides/direct-mode.md, second table: what the builder finds in the spans that other frameworks sent, with no gateway beside them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from spangrad.settings import BuilderSettings
from tests.support.spans import SpanFactory
from transition_builder.build import build

ROOT = Path(__file__).parents[2]
SPANS = ROOT / "tests" / "fixtures" / "spans"
CAPTURED = {
    "AutoGen, under OpenInference": "autogen",
    "LiteLLM, under OpenInference": "litellm",
    "Anthropic's client, under OpenInference": "anthropic",
    "openai, under OpenTelemetry's own instrumentation": "genai_openai_v2",
    "openai, under Traceloop's instrumentation": "traceloop",
    "bare httpx, under OpenTelemetry's own instrumentation": "http_only_httpx",
}


def test_direct_mode_frameworks_match_docs_table() -> None:
    lines = [f"| {framework} | {' | '.join(counts_of(SPANS / f'{file}.jsonl'))} |" for framework, file in CAPTURED.items()]
    measured = "\n".join(
        ["| framework | calls with ids | without | failed | not read | agents' names |", "| --- | --- | --- | --- | --- | --- |", *lines]
    )
    page = (ROOT / "docs" / "guides" / "direct-mode.md").read_text()
    begin, end = "<!-- measured by tests/unit/test_direct_mode_frameworks.py -->\n", "\n<!-- end -->"
    start = page.index(begin) + len(begin)
    assert page[start : page.index(end, start)] == measured, f"\n{measured}"


def counts_of(file: Path) -> tuple[str, ...]:
    """Count the calls in captured spans: with token ids, without, failed, in no convention that is read; and name their agents."""
    spans = SpanFactory()
    spans.evaluation(spans.root())
    for line in file.read_text().splitlines():
        spans.load_otlp(json.loads(line))
    built = build(spans.frames(), BuilderSettings())
    reasons = Counter(built.drops["Reason"])
    counted = [str(reasons.pop(name, 0)) for name in ("no_token_ids", "call_failed", "unknown_convention")]
    assert not reasons
    names = ", ".join(f"`{name}`" for name in sorted(set(built.transitions["AgentName"])))
    return str(built.transitions.height), *counted, names or "none"
