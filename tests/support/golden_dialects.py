"""What the dialects read in the golden spans, and how the golden files are made again: `python tests/support/golden_dialects.py`.

In: fixtures of recorded spans, and `registry_spans`. Out: a JSON file a dialect in tests/golden/dialects. Invariant: a file holds what a
reader must see to agree, and no column that says nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import polars as pl

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from registry_spans import REGISTRY, Made

import fakes
from transition_builder import dialects
from transition_builder.schemas import NODES, SPANS

FILES = Path(__file__).parents[1] / "golden" / "dialects"
FIXTURES = Path(__file__).parents[1] / "fixtures" / "spans"
RECORDED = {
    "openinference_openai_agents": "openai_agents+gateway",
    "openinference_langgraph": "langgraph_tool_error",
    "openinference_autogen": "autogen",
    "openinference_litellm": "litellm",
    "openinference_anthropic": "anthropic",
    "gen_ai_openai_v2": "genai_openai_v2",
    "traceloop_openai": "traceloop",
    "http_only": "http_only_httpx",
}
"""Golden files by the fixtures that their spans were recorded in."""
_ALWAYS = ["ScopeName", "SpanName", "Convention"]
_SAID = [name for name in (*NODES, "ResponseId", "Model", "InputTokens", "OutputTokens") if name not in {*SPANS, *_ALWAYS, "RolloutId"}]


def made(spans: tuple[Made, ...]) -> pl.DataFrame:
    """SPANS and RolloutId of made spans."""
    factory = fakes.SpanFactory()
    for one in spans:
        factory.span(one.name, "", scope=one.scope, status=one.status, Attributes=one.attributes)
    return pl.DataFrame(factory.spans, schema=dict(SPANS)).with_columns(RolloutId="RolloutKey")


def recorded(fixture: str) -> pl.DataFrame:
    """SPANS and RolloutId of a fixture."""
    factory = fakes.SpanFactory()
    for line in (FIXTURES / f"{fixture}.jsonl").read_text().splitlines():
        factory.load_otlp(json.loads(line))
    return pl.DataFrame(factory.spans, schema=dict(SPANS)).with_columns(RolloutId="RolloutKey")


def shown(spans: pl.DataFrame) -> list[dict[str, Any]]:
    """What the dialects say of spans: each kind of span once, with what it says, and how many there were."""
    found: dict[str, dict[str, Any]] = {}
    for node in dialects.describe(spans).select(*_ALWAYS, *dict.fromkeys(_SAID)).iter_rows(named=True):
        said = {name: value for name, value in node.items() if name in _ALWAYS or value not in (None, False, "", [])}
        found.setdefault(json.dumps(said, sort_keys=True), {"spans": 0, **said})["spans"] += 1
    return list(found.values())


def golden() -> dict[str, dict[str, Any]]:
    """Every golden file's content, by name."""
    files: dict[str, dict[str, Any]] = {
        name: {"source": f"tests/fixtures/spans/{fixture}.jsonl", "described": shown(recorded(fixture))}
        for name, fixture in RECORDED.items()
    }
    files |= {name: {"source": one.source, "described": shown(made(one.spans))} for name, one in REGISTRY.items()}
    return files


def main() -> None:
    """Write the files; look at the difference before you keep it."""
    FILES.mkdir(exist_ok=True)
    for name, content in golden().items():
        (FILES / f"{name}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
