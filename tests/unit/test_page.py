"""The page without a store: what its statements may name, cursors of lists, and texts as they are searched."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import page
from page import services
from page.cursors import decode_cursor
from page.overview import OverviewReader, overview_without
from page.reading import PageStore
from page.rollouts.text_search import _spellings  # pyright: ignore[reportPrivateUsage]
from page.token_texts import TokenTexts
from spangrad.errors import SpangradError
from spangrad.settings import BuilderSettings, GatewaySettings, Settings, StoreSettings, UpSettings
from spangrad.store.names import INTERNAL
from spangrad.weights.checksums import tokenizer_hash


def test_page_modules_name_no_internal_table() -> None:
    modules = sorted(Path(page.__file__).parent.rglob("*.py"))
    assert len(modules) > 10
    assert [module.name for module in modules if INTERNAL in module.read_text()] == []


@pytest.mark.parametrize("text", ["<html>", "spangrad_builder_lag_seconds 5\n"])
def test_services_other_program_at_the_builders_address_is_no_answer(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(services, "text_of", lambda *_: text)
    monkeypatch.setattr(services, "status_of", lambda *_: None)
    settings = Settings(builder=BuilderSettings(metrics_address="127.0.0.1:9"))
    builder = next(row for row in services.services_of(settings) if row["name"] == "builder")
    assert (builder["answers"], builder["detail"][:37]) == (False, "what http://127.0.0.1:9/metrics answe")


@pytest.mark.parametrize(("restarts", "detail"), [(0, "starting"), (1, "starting, restarted 1 time"), (2, "starting, restarted 2 times")])
def test_supervised_service_shows_its_state_and_restarts(restarts: int, detail: str) -> None:
    service = services._supervised({"name": "train", "state": "starting", "restarts": restarts})
    assert service == {"name": "trainer", "answers": False, "detail": detail}


def test_services_of_a_supervisor_whose_directory_is_private_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> None:
        raise SpangradError(f"{path} cannot be read")

    monkeypatch.setattr(services.run_directory, "owner_of", refused)
    monkeypatch.setattr(services, "status_of", lambda url, seconds: 200)
    rows = services.services_of(Settings(up=UpSettings(directory=tmp_path)))
    assert [row["name"] for row in rows] == ["store", "gateway"]


def test_text_search_text_is_looked_for_as_json_escapes_it() -> None:
    assert _spellings("plain") == ["plain"]
    assert _spellings('say "é"') == ['say "é"', 'say \\"é\\"', 'say \\"\\u00e9\\"']


def test_overview_without_a_store_has_services_and_the_error() -> None:
    settings = Settings(store=StoreSettings(url="http://127.0.0.1:9"), gateway=GatewaySettings(url="http://127.0.0.1:9"))
    overview = OverviewReader(PageStore(settings.store), settings).read()
    assert {row["name"]: row["answers"] for row in overview["services"]} == {"store": False, "gateway": False}
    assert "http://127.0.0.1:9" in overview["error"]
    assert overview_without(overview, {}) == {**overview, "versions": [], "steps": []}


def test_overview_without_sent_steps_has_new_and_changed_steps() -> None:
    first, second, third = ({"Version": version, "Metrics": {"loss": version / 2}} for version in (1, 2, 3))
    changed = {**second, "Metrics": {"loss": 0.0}}
    overview = {"services": [], "steps": [second, third]}
    assert overview_without(overview, {}) == {**overview, "versions": [2, 3]}
    assert overview_without(overview, {1: first, 2: second, 3: third}) == {"services": [], "versions": [2, 3], "steps": []}
    assert overview_without(overview, {1: first, 2: changed}) == {"services": [], "versions": [2, 3], "steps": [second, third]}


@pytest.mark.parametrize("values", ["{}", "[" * 6000], ids=["object", "deep"])
def test_decode_cursor_of_another_value_raises(values: str) -> None:
    with pytest.raises(ValueError, match="no cursor of this list"):
        decode_cursor(base64.urlsafe_b64encode(values.encode()).decode(), int)


def test_token_texts_ids_beyond_the_vocabulary_size_have_their_texts(tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0, "?": 1, "b": 5}, unk_token="?"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts, problem = TokenTexts(lambda _: [tmp_path]).pieces(tokenizer_hash(tmp_path), [0, 5, 3, 7])
    assert (texts, problem) == ([["a", " b", "[3]", "[7]"]], "")
