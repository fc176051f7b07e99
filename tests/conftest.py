"""Fixtures that several parts' tests share, and how several processes share the tests.

In: what pytest collected. Out: for each worker of pytest-xdist (`make test` starts four) whole files, so that what a file's tests share is
started once. Invariant: all tests with a real vLLM run in one worker, so that at no time two of them start theirs, and so do all tests
with the shared optimizers under Ray.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import re
import signal
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from spangrad import processes
from spangrad.settings import Settings, StoreSettings
from tests.support.processes import VLLM_PYTHON, engine_settings, gateway_settings, running_engine, running_gateway
from tests.support.servers import empty_store, running_postgres, running_store, store_settings
from tests.support.trainers import Place

DocsTable = Callable[[str, Sequence[str]], None]
"""Function of a page below docs/ and the lines of a table."""
_stores: list[StoreSettings] = []
"""The shared store, once a test has asked for it."""

# Collecting the tests imports a million objects that stay: to look at them again and again takes half of the time, and more later on.
gc.disable()

# A shell without job control has its background ignore SIGINT, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says nothing where other tests run beside it.
hypothesis.settings.register_profile("beside others", deadline=None)
hypothesis.settings.load_profile("beside others")

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # A port is free until its server binds it: workers that chose from the same ports could choose the same one meanwhile.
    own = slice(int(worker.removeprefix("gw")), None, int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    processes._SERVER_PORTS = processes._SERVER_PORTS[own]


_SHARED = {"vllm": r"^pytestmark = .*vllm", "ray": r"\bray_optimizers: "}
"""Group of test files -> what stands in each of them: one worker takes a group, since its servers cost more than any file's tests."""


@functools.cache
def groups_of_files(root: Path) -> dict[str, str]:
    """Return the groups of test files whose every test takes shared servers, by what stands in them: only workers import them."""
    texts = {file.relative_to(root).as_posix(): file.read_text() for file in Path(__file__).parent.rglob("test_*.py")}
    return {file: group for file, text in texts.items() for group, pattern in _SHARED.items() if re.search(pattern, text, re.M)}


@functools.cache
def holds_laws(file: Path) -> bool:
    """Return whether a test file has tests by Hypothesis: each runs its body many times."""
    return "from hypothesis import" in file.read_text()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--part K/N`, the K-th of N parts of the selected tests, by file, `--write-docs`, and the options of `make gpu-check`."""
    parser.addoption("--write-docs", action="store_true", help="write the tables of docs that tests compute, instead of comparing them")
    parser.addoption("--gpu-report", help="file that tests/gpu write their report to, in JSON")
    parser.addoption("--gpu-checks-on-cpu", action="store_true", help="run what a CPU can of tests/gpu: do the checks themselves work?")
    parser.addoption("--part", help="K/N: the K-th of N parts of the selected tests; their files are dealt out in turn")


def files_of_part(files: Iterable[Path], part: str) -> set[Path]:
    """Return the files of a part, such as `2/4`.

    Raises:
        UsageError: the part is not K/N with K of 1 to N.
    """
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", part)
    if not match or int(match[1]) > int(match[2]):
        raise pytest.UsageError(f"--part {part} is not K/N with K of 1 to N, such as 2/4")
    return {*sorted(files)[int(match[1]) - 1 :: int(match[2])]}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests, and leave out those of other parts, once those of other marks are left out.

    First the tests of vLLM, the longest row of tests that only one worker can take; the unit tests, the shortest, come last, those with
    laws before the others, so that no worker ends with a long file alone.
    """
    if part := config.getoption("--part"):
        own = files_of_part({item.path for item in items}, part)
        config.hook.pytest_deselected(items=[item for item in items if item.path not in own])
        items[:] = [item for item in items if item.path in own]
    groups = groups_of_files(config.rootpath)

    def place(item: pytest.Item) -> int:
        path = item.path.relative_to(config.rootpath).as_posix()
        if not path.startswith("tests/unit/"):
            return 0 if groups.get(path) == "vllm" else 1
        return 2 if holds_laws(item.path) else 3

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Collect garbage from here on, except among what is imported and collected by now."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable(config: pytest.Config, report: object) -> Generator[None, Any, Any]:
    """Escape half surrogate pairs in what a test has printed or logged: a worker that cannot send a report ends, with all of its tests."""
    return _escaped((yield))


def _escaped(data: Any) -> Any:
    match data:
        case str():
            return data.encode(errors="backslashreplace").decode()
        case dict():
            return {_escaped(key): _escaped(value) for key, value in data.items()}
        case list() | tuple():
            return type(data)(_escaped(value) for value in data)
        case _:
            return data


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out files one by one, those of a group as if they were one: xdist_group marks do nothing beside pytest 9."""
    from xdist.scheduler import LoadFileScheduling

    groups = groups_of_files(config.rootpath)

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return groups.get(file, file)

    return Files(config, log)


@pytest.fixture(scope="session")
def docs_table(request: pytest.FixtureRequest) -> DocsTable:
    """Compares a table of a page of docs, found by its first line, or writes it there."""

    def compare(page: str, table: Sequence[str]) -> None:
        path = request.config.rootpath / "docs" / page
        before, _, rest = path.read_text().partition(f"{table[0]}\n")
        after = rest.splitlines(keepends=True)
        there = [table[0], *(line.rstrip("\n") for line in itertools.takewhile(lambda line: line.startswith("|"), after))]
        if request.config.getoption("--write-docs"):
            path.write_text(before + "".join(f"{line}\n" for line in table) + "".join(after[len(there) - 1 :]))
        else:
            assert list(table) == there, f"docs/{page} has another table: --write-docs writes it"

    return compare


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreSettings]:
    """A running span store, shared by the whole test run and emptied before each file: keep apart by run, rollout and trace ids."""
    directory = tmp_path_factory.mktemp("store")
    settings = store_settings(directory / "data")
    with running_store(settings, directory / "store.log"):
        _stores.append(settings)
        yield settings


@pytest.fixture(scope="module", autouse=True)
def _emptied_store(request: pytest.FixtureRequest) -> None:
    """Empty the shared store before a file that uses it: builders would build the rollouts of all files before."""
    if _stores and request.path in _users_of_store(request.session):
        for settings in _stores:
            empty_store(settings)


@functools.cache
def _users_of_store(session: pytest.Session) -> set[Path]:
    return {item.path for item in session.items if "store" in item.fixturenames}  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def guarded_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreSettings]:
    """A store with a token to write and another to read."""
    directory = tmp_path_factory.mktemp("tokens")
    settings = store_settings(directory / "data", token="write", read_token="read")
    with running_store(settings, directory / "log"):
        yield settings


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the two-tools example's model: shared, so never written to."""
    from examples.two_tools.model import build_model

    directory = tmp_path_factory.mktemp("tiny-model")
    build_model(directory, seed=0)
    return directory


@pytest.fixture(scope="session")
def vllm_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the cache directory that vLLM processes share: with the inspected model class in it, none imports all of vLLM again for it."""
    cache = tmp_path_factory.mktemp("vllm") / "cache"
    cache.mkdir()
    return cache


@pytest.fixture(scope="session")
def engine(tiny_model: Path, vllm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """A running vLLM that serves `tiny_model`, shared by the whole test run: its version only grows. Mark tests with `vllm`."""
    if not VLLM_PYTHON.exists():
        pytest.skip(f"vLLM's environment {VLLM_PYTHON} is not there")
    directory = tmp_path_factory.mktemp("engine")
    settings = engine_settings(tiny_model, vllm_cache)
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
    """Set the variables that `spangrad engine` passes to the plugin in vLLM: policy `policy` in version 3, its model in `tmp_path`."""
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setenv("SPANGRAD_GATEWAY__POLICY", "policy")
    monkeypatch.setenv("SPANGRAD_ENGINE__VERSION", "3")
    monkeypatch.setenv("SPANGRAD_ENGINE__MODEL", str(tmp_path))


@pytest.fixture(scope="session")
def postgres() -> Iterator[Callable[[str], str]]:
    """A running PostgreSQL, shared by the whole test run: the URL of a schema, by a name that is the test's own."""
    with running_postgres() as server:
        yield server.schema


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Places of ledgers, on either database."""
    if request.param == "sqlite":
        return lambda name="": tmp_path / str(name)
    schema, own = request.getfixturevalue("postgres"), f"t{uuid.uuid4().hex}"
    return lambda name="": schema(f"{own}_{name}")


@pytest.fixture(params=["sqlite", "postgresql"])
def queue_db(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a database for a queue, on either kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/queue.db"
    schema: Callable[[str], str] = request.getfixturevalue("postgres")
    return schema(f"t{uuid.uuid4().hex}")


@pytest.fixture
def blocked_pipes() -> Iterator[None]:
    """Block SIGPIPE, as the embedded database does where it is imported: programs inherit that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.fixture
def quick_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let agents' hosts import no instrumentation of frameworks, which agents without a framework do not need."""
    monkeypatch.setenv("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "langchain,openai,httpx,httpx2")
