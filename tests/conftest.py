"""Fixtures that several parts' tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from running_store import running_store, store_settings

from spangrad.settings import StoreSettings


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreSettings]:
    """A running span store, shared by the whole test run: keep apart by run, rollout and trace ids."""
    directory = tmp_path_factory.mktemp("store")
    settings = store_settings(directory / "data")
    with running_store(settings, directory / "store.log"):
        yield settings
