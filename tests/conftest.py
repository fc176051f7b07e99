"""Fixtures that several parts' tests share."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from running_engine import VLLM_PYTHON, engine_settings, gateway_settings, running_engine, running_gateway
from running_postgres import running_postgres
from running_store import running_store, store_settings

from spangrad.settings import Settings, StoreSettings


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreSettings]:
    """A running span store, shared by the whole test run: keep apart by run, rollout and trace ids."""
    directory = tmp_path_factory.mktemp("store")
    settings = store_settings(directory / "data")
    with running_store(settings, directory / "store.log"):
        yield settings


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the two-tools example's model: shared, so never written to."""
    from examples.two_tools.model import build_model

    directory = tmp_path_factory.mktemp("tiny-model")
    build_model(directory, seed=0)
    return directory


@pytest.fixture(scope="session")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """A running vLLM that serves `tiny_model`, shared by the whole test run: its version only grows. Mark tests with `vllm`."""
    if not VLLM_PYTHON.exists():
        pytest.skip(f"vLLM's environment {VLLM_PYTHON} is not there")
    directory = tmp_path_factory.mktemp("engine")
    settings = engine_settings(tiny_model, directory / "cache")
    with running_engine(settings, directory / "engine.log"):
        yield settings


@pytest.fixture(scope="session")
def gateway(engine: Settings, store: StoreSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """A running gateway between `engine` and `store`, shared by the whole test run."""
    settings = gateway_settings(engine, store)
    with running_gateway(settings, tmp_path_factory.mktemp("gateway") / "gateway.log"):
        yield settings


@pytest.fixture
def plugin_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `spangrad engine` tells the plugin in vLLM: policy `policy` in version 3, its model in `tmp_path`."""
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setenv("SPANGRAD_GATEWAY__POLICY", "policy")
    monkeypatch.setenv("SPANGRAD_ENGINE__VERSION", "3")
    monkeypatch.setenv("SPANGRAD_ENGINE__MODEL", str(tmp_path))


@pytest.fixture(scope="session")
def postgres() -> Iterator[Callable[[str], str]]:
    """A running PostgreSQL, shared by the whole test run: the URL of a schema, by a name that is the test's own."""
    with running_postgres() as server:
        yield server.schema


Place = Callable[..., Path | str]
"""Where a ledger lies, by name: the same place at each call."""


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Places of ledgers, on either database."""
    if request.param == "sqlite":
        return lambda name="": tmp_path / str(name)
    schema, own = request.getfixturevalue("postgres"), f"t{uuid.uuid4().hex}"
    return lambda name="": schema(f"{own}_{name}")
