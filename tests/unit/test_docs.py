"""The documentation against the code: links, commands, settings, tables and tests that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spangrad import semconv
from spangrad.cli import app
from spangrad.settings.sources import explain_settings

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/*/README.md"),
        *ROOT.glob("recipes/*/README.md"),
        *ROOT.glob("benchmarks/*.md"),
    ]
)
HAND_WRITTEN = [
    ROOT / "README.md",
    *(page for page in PAGES if page.match("docs/**/*.md") and not {"reference", "decisions"} & set(page.parts)),
]
SETTINGS = {origin.key for origin in explain_settings(env={})}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
class TestPage:
    def test_docs_links_exist(self, page: Path) -> None:
        links = re.findall(r"\]\(([^)#]+)\)", page.read_text())
        assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []

    def test_docs_commands_exist(self, page: Path) -> None:
        named = set(re.findall(r"`spangrad ([a-z]+)", page.read_text())) | set(re.findall(r"^ +spangrad ([a-z]+)", page.read_text(), re.M))
        assert named - set(app) == set()

    def test_docs_settings_exist(self, page: Path) -> None:
        sections = {key.split(".")[0] for key in SETTINGS}
        named = {key for key in re.findall(r"`([a-z]+(?:\.[a-z_]+)+)`", page.read_text()) if key.split(".")[0] in sections}
        parents = {key[: match.start()] for key in SETTINGS for match in re.finditer(r"\.", key)}
        assert named - SETTINGS - parents == {name for name in named if (ROOT / name).exists()}

    def test_docs_make_targets_exist(self, page: Path) -> None:
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
        assert set(re.findall(r"`?\bmake ([a-z-]+)\b`", page.read_text())) - targets == set()

    def test_docs_attributes_are_in_semconv(self, page: Path) -> None:
        known = {value for name, value in vars(semconv).items() if name.isupper() and isinstance(value, str)}
        named = set(re.findall(r"`(spangrad\.(?:run|rollout|group|task|policy|prompt|response)\.[a-z_.]+)`", page.read_text()))
        assert named - known == set()

    def test_docs_files_exist(self, page: Path) -> None:
        named = re.findall(
            r"`((?:spangrad|commands|gateway|collector|runner|trainer|transition_builder|dashboards|tests|docs|packaging|examples|recipes)/[^`]*)`",
            page.read_text(),
        )
        assert [name for name in named if not list(ROOT.glob(name.rstrip("/")))] == []


@pytest.mark.parametrize("page", HAND_WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_docs_prose_is_at_most_120_characters_wide(page: Path) -> None:
    prose = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.M | re.S)
    assert [line for line in prose.splitlines() if len(line) > 120 and not line.startswith("|")] == []


def test_readme_is_at_most_120_lines_long() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_two_tools_agent_does_not_mention_spangrad() -> None:
    assert "spangrad" not in (ROOT / "examples" / "two_tools" / "agent.py").read_text().lower()
