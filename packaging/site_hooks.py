"""Hooks of MkDocs: pages outside docs/ that the documentation links to become pages of its site.

In: mkdocs.yml, and README files beside the code. Out: pages `examples/...`, `recipes/...` and `benchmarks/...` with their links, and the
navigation of the decisions. Invariant: a link that leads to no page of the site is an error.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("CHANGELOG.md", "benchmarks/*.md", "examples/README.md", "examples/*/README.md", "recipes/*/README.md")
    for path in ROOT.glob(pattern)
)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Add the examples, the recipes, the benchmarks, the decisions, and pages that mkdocs.yml does not name, to the navigation."""
    named = set(_named(config.nav))
    for section in config.nav:
        for title, entries in section.items():
            if isinstance(entries, list):
                pages = (path.relative_to(ROOT / "docs").as_posix() for path in sorted((ROOT / "docs" / title.lower()).glob("*.md")))
                entries += [page for page in pages if page not in named]
    decisions = sorted(path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/decisions/*.md"))
    examples, recipes = ([_page(path) for path in OUTSIDE if path.startswith(folder)] for folder in ("examples/", "recipes/"))
    config.nav += [{"Examples": examples}, {"Recipes": recipes}]
    config.nav.append({"Project": [_page("benchmarks/RESULTS.md"), _page("CHANGELOG.md"), {"Decisions": decisions}]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside docs/, and the pictures below them."""
    for path in OUTSIDE:
        files.append(File.generated(config, _page(path), content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links between docs/ and the pages outside it to where the site has them."""
    source = page.file.src_uri
    outside = next((path for path in OUTSIDE if _page(path) == source), None)
    directory = posixpath.dirname(outside if outside else f"docs/{source}")

    def replace(match: re.Match[str]) -> str:
        image, text, link, anchor = match[1], match[2], match[3], match[4] or ""
        if "://" in link or link.startswith("mailto:"):
            return match[0]
        target = posixpath.normpath(posixpath.join(directory, link))
        if target in OUTSIDE:
            on_site = _page(target)
        elif target.startswith("docs/"):
            on_site = target.removeprefix("docs/")
        elif target == "README.md":
            on_site = "index.md"
        elif not image and (ROOT / target).exists():
            return f"`{target}`"
        else:
            return match[0]
        return f"{image}[{text}]({posixpath.relpath(on_site, posixpath.dirname(source) or '.')}{anchor})"

    return _LINK.sub(replace, markdown)


def _named(nav: Any) -> Iterator[str]:
    """Yield the pages of a navigation."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        yield from _named(list(nav.values()))
    else:
        for entry in nav:
            yield from _named(entry)


def _page(path: str) -> str:
    """Return the page of a file outside docs/: README.md is its folder's index."""
    return path.replace("README.md", "index.md").replace("CHANGELOG.md", "changelog.md").replace("RESULTS.md", "results.md")
