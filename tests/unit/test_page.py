"""The page without a store: what its statements may name, and texts as they are searched."""

from __future__ import annotations

from pathlib import Path

import page
from page.rollouts.text_search import _spellings  # pyright: ignore[reportPrivateUsage]
from spangrad.store.names import INTERNAL


def test_page_modules_name_no_internal_table() -> None:
    modules = sorted(Path(page.__file__).parent.rglob("*.py"))
    assert len(modules) > 10
    assert [module.name for module in modules if INTERNAL in module.read_text()] == []


def test_text_search_text_is_looked_for_as_json_escapes_it() -> None:
    assert _spellings("plain") == ["plain"]
    assert _spellings('say "é"') == ['say "é"', 'say \\"é\\"', 'say \\"\\u00e9\\"']
