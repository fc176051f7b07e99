"""Names of what builders make, against a real store."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta

import pytest

from spangrad.errors import SettingsError, StoreError
from spangrad.settings import BuilderSettings, Selection, StoreSettings
from spangrad.store import datasets
from spangrad.store.clickhouse import connect


@pytest.mark.parametrize(("text", "named"), [("a", ("a", None)), ("a b@3", ("a b", 3))])
def test_datasets_parse_name_with_or_without_revision(text: str, named: tuple[str, int | None]) -> None:
    assert datasets.parse(text) == named


@pytest.mark.parametrize("text", ["", "@1", "a@", "a@0", "a@x", "a@-1", "a@1@2", "a@²"])
def test_datasets_parse_invalid_name_raises(text: str) -> None:
    with pytest.raises(SettingsError, match=r"names no dataset\. Write NAME, or NAME@REVISION"):
        datasets.parse(text)


def test_datasets_register_other_spec_adds_revision_and_same_spec_returns_it(store: StoreSettings) -> None:
    client = connect(store)
    first = datasets.register(client, "set", "spec-1", {"b": 1, "a": None}, "to begin with")
    again = datasets.register(client, "set", "spec-1", {"b": 1}, "another reason")
    second = datasets.register(client, "set", "spec-2", {"b": 2}, "a reward more")
    assert (first.name, first.revision, first.build_spec, first.settings, first.reason) == (
        "set",
        1,
        "spec-1",
        {"a": None, "b": 1},
        "to begin with; the first",
    )
    assert again == first
    assert (str(second), second.build_spec, second.reason) == ("set@2", "spec-2", "a reward more; other than set@1: b = 2 (was 1)")
    assert datasets.register(client, "set", "spec-1", {"b": 1}, "back again") == first

    assert datasets.resolve(client, "set") == second
    assert datasets.resolve(client, "set@1") == first
    assert datasets.resolve(client, "set", as_of=first.created) == first
    with pytest.raises(StoreError, match=r"has no dataset 'set@3'\. There are: .*set@1, set@2"):
        datasets.resolve(client, "set@3")
    with pytest.raises(StoreError, match=r"has no dataset 'set' as of 20"):
        datasets.resolve(client, "set", as_of=first.created - timedelta(microseconds=1))
    with pytest.raises(SettingsError, match=r"builder\.dataset = 'set@1' is no name of a dataset"):
        datasets.register(client, "set@1", "spec", {}, "")
    client.close()


def test_datasets_register_concurrent_specs_get_a_revision_each(store: StoreSettings) -> None:
    registered = list[datasets.Dataset]()

    def register(spec: str) -> None:
        client = connect(store)
        registered.append(datasets.register(client, "race", spec, {}, "at once"))
        client.close()

    threads = [threading.Thread(target=register, args=(f"spec-{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client = connect(store)
    there = [dataset for dataset in datasets.known(client) if dataset.name == "race"]
    client.close()
    assert sorted(registered, key=lambda dataset: dataset.revision) == there
    assert sorted(dataset.build_spec for dataset in there) == [f"spec-{number}" for number in range(4)]
    assert [dataset.revision for dataset in there] == [1, 2, 3, 4]


def test_datasets_describe_difference_from_previous_revision(store: StoreSettings) -> None:
    client = connect(store)
    then = datetime(2026, 1, 31, 12, tzinfo=UTC)
    steps = [
        BuilderSettings(),
        BuilderSettings(selection=Selection(agents="solver|critic"), max_tokens=4096),
        BuilderSettings(max_tokens=8192),
        BuilderSettings(max_tokens=8192, as_of=then),
        BuilderSettings(as_of=then + timedelta(days=1)),
        BuilderSettings(tokenizer_hash="7" * 200),
    ]
    registered = [datasets.register(client, "changing", settings.spec, settings.decides) for settings in steps]
    client.close()
    assert [dataset.reason for dataset in registered] == [
        "the first",
        "other than changing@1: max_tokens = 4096 (was none), selection.agents = solver|critic (was none)",
        "other than changing@2: max_tokens = 8192 (was 4096), selection.agents = none (was solver|critic)",
        "as of 2026-01-31T12:00:00Z",
        "as of 2026-02-01T12:00:00Z; other than changing@4: max_tokens = none (was 8192)",
        f"from all spans, not as of 2026-02-01T12:00:00Z; other than changing@5: tokenizer_hash = {'7' * 117}... (was none)",
    ]
