"""The supervisor's rules: order, restarts, causes, services of the settings, and the text of its status."""

from __future__ import annotations

from functools import reduce
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from spangrad.errors import SettingsError
from spangrad.settings.sources import load_settings
from spangrad.supervisor.service import NEVER, RestartPolicy, ServiceSpec, cause_of, kind_of, start_order, stop_order, stop_seconds
from spangrad.supervisor.status_text import TrainingProgress, status_table
from spangrad.supervisor.supervisor import Supervisor
from spangrad.supervisor.training_services import page_service, training_services


def service(name: str, *needs: str) -> ServiceSpec:
    return ServiceSpec(name, ("true",), Path(f"{name}.log"), needs=needs)


def test_start_order_puts_services_after_their_needs() -> None:
    ordered = start_order((service("gateway", "store", "engine"), service("engine", "store"), service("store")))
    assert [each.name for each in ordered] == ["store", "engine", "gateway"]
    with pytest.raises(ValueError, match="missing: a, b"):
        start_order((service("a", "b"), service("b", "a")))


def test_stop_order_puts_replicas_together_and_needs_last() -> None:
    workers = (service("worker-1", "gateway"), service("worker-2", "gateway"))
    services = (service("store"), service("gateway", "store"), service("train"), *workers)
    assert [[each.name for each in group] for group in stop_order(services)] == [
        *(["worker-2", "worker-1"], ["train"], ["gateway"], ["store"])
    ]
    assert [len(group) for group in stop_order((service("engine-1"), service("engine-2", "engine-1")))] == [1, 1]


def test_stop_seconds_count_each_kind_once() -> None:
    assert stop_seconds([("store", 15.0), *((f"worker-{number}", 60.0) for number in range(9)), ("worker-9", 70.0)]) == 85
    assert stop_seconds([]) == 0


def test_training_services_let_workers_drain() -> None:
    values: dict[str, object] = {"engine.model": "m", "queue.url": "http://127.0.0.1:8190", "runner.drain_seconds": 100, "up.workers": 2}
    for agent in (("--agent", "a.py:f"), ("--tasks", "t.jsonl")):
        services = training_services(load_settings(values, env={}), Path("logs"), (), agent)
        graces = {each.name: each.grace_seconds for each in services}
        assert all(grace > 110 for name, grace in graces.items() if kind_of(name) in {"worker", "run"})
        assert graces["gateway"] == 15


def test_restart_policy_delays_double_up_to_longest() -> None:
    policy = RestartPolicy(first_seconds=1, longest_seconds=30)
    assert [policy.delay(failures) for failures in (1, 2, 3, 6, 10_000)] == [1, 2, 4, 30, 30]


@pytest.mark.parametrize(
    ("exit_code", "failures", "was_ready", "restarts"),
    [
        (1, 1, False, True),
        (1, 3, False, False),
        (1, 300, True, True),
        (-9, 1, True, True),
        (0, 1, True, True),
        (0, 3, False, False),
        (2, 1, False, False),
        (2, 1, True, True),
    ],
)
def test_restart_policy_restarts_unless_service_was_never_ready(exit_code: int, failures: int, was_ready: bool, restarts: bool) -> None:
    assert RestartPolicy(tries=3).restarts(exit_code, failures, was_ready=was_ready) is restarts
    assert not NEVER.restarts(exit_code, failures, was_ready=was_ready)


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("INFO starts\nspangrad: engine.model is wrong.\n", "engine.model is wrong."),
        ("spangrad: vLLM ended: ValueError: x\nSet engine.dtype.\n", "vLLM ended: ValueError: x\nSet engine.dtype."),
        ('Traceback:\n  File "x"\nKeyError: 1\n\n', "KeyError: 1"),
        ("", "its log is empty"),
    ],
)
def test_cause_of_log_finds_error(log: str, cause: str) -> None:
    assert cause_of(log, 1) == cause


@pytest.mark.parametrize(
    ("log", "exit_code", "cause"),
    [
        ("INFO ready", -9, "it was killed by SIGKILL, as the kernel does where memory runs out; the end of its log: INFO ready"),
        (
            "Fatal Python error: Segmentation fault",
            -11,
            "it was killed by SIGSEGV; the end of its log: Fatal Python error: Segmentation fault",
        ),
        ("INFO ready", -40, "it was killed by signal 40; the end of its log: INFO ready"),
        ("spangrad: its actor on 10.0.0.2 died: x", -9, "its actor on 10.0.0.2 died: x"),
    ],
)
def test_cause_of_service_that_a_signal_killed_names_it(log: str, exit_code: int, cause: str) -> None:
    assert cause_of(log, exit_code) == cause


def names(values: dict[str, object], *agent: str) -> dict[str, tuple[str, ...]]:
    settings = load_settings({"engine.model": "m", **values}, env={})
    return {each.name: each.needs for each in training_services(settings, Path("logs"), ["--config", "f.toml"], agent)}


def test_training_services_follow_settings() -> None:
    own = ["store", "engine", "gateway", "build", "train"]
    assert list(names({})) == own
    assert list(names({"store.url": "http://elsewhere:8123"})) == own[1:]
    assert names({"store.url": "http://elsewhere:8123"})["build"] == ()
    assert "engine" not in names({"gateway.engine_url": "http://elsewhere:8000"})
    queue: dict[str, object] = {"queue.url": "http://127.0.0.1:8190"}
    assert list(names(queue)) == ["store", "queue", *own[1:]]
    assert names(queue, "--agent", "a.py:f")["worker"] == ("store", "queue", "gateway")
    assert names(queue, "--tasks", "t.jsonl")["run"] == ("store", "queue", "gateway")
    assert "run" in names(queue, "--tasks=t.jsonl", "--", "python", "agent.py")
    assert "worker" in names(queue, "--instrument", "--", "python", "agent.py", "--tasks", "t.jsonl")


def test_training_services_share_settings_file_and_model() -> None:
    settings = load_settings({"trainer.model": "weights"}, env={})
    services = {each.name: each.command for each in training_services(settings, Path("logs"), ["--config", "f.toml"])}
    assert services["engine"][-5:] == ("engine", "--config", "f.toml", "--model", "weights")
    assert services["train"][-6:] == ("train", "--config", "f.toml", "--follow", "--model", "weights")


def test_training_services_finish_where_the_training_has_an_end() -> None:
    def finishing(**values: object) -> list[str]:
        settings = load_settings({"engine.model": "m", **values}, env={})
        return [each.name for each in training_services(settings, Path("logs")) if each.may_finish]

    assert finishing(**{"trainer.max_steps": 9}) == ["train"]
    assert finishing() == []


def test_training_services_with_a_url_name_the_setting_of_its_port() -> None:
    settings = load_settings({"engine.model": "m", "queue.url": "http://127.0.0.1:8190"}, env={})
    services = (*training_services(settings, Path("logs")), page_service(settings, Path("logs")))
    ports = {each.port_setting: each.ready_url for each in services if each.ready_url}
    assert len(ports) == 5
    for key, url in ports.items():
        assert f":{reduce(getattr, key.split('.'), settings)}/" in str(url)


def test_training_services_gateway_behind_a_proxy_may_have_an_address_that_answers() -> None:
    settings = load_settings({"engine.model": "m", "gateway.url": "https://gateway.example"}, env={})
    (gateway,) = [each for each in training_services(settings, Path("logs")) if each.name == "gateway"]
    assert (gateway.ready_url, gateway.port_setting) == ("https://gateway.example/readyz", "")


def test_page_service_needs_a_local_store_alone() -> None:
    page = page_service(load_settings({"page.port": 9000}, env={}), Path("logs"), ["--config", "f.toml"])
    assert (page.ready_url, page.needs, page.command[-3:]) == ("http://127.0.0.1:9000/healthz", ("store",), ("page", "--config", "f.toml"))
    assert page_service(load_settings({"store.url": "http://elsewhere:8123"}, env={}), Path("logs")).needs == ()


@pytest.mark.parametrize(("values", "agent", "sentence"), [({"engine.model": None}, (), "spangrad init"), ({}, ("x",), "needs a queue")])
def test_training_services_with_invalid_settings_raise(values: dict[str, object], agent: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        names(values, *agent)


class RemoteProcess:
    """Process that has failed, and whose log ends with its actor."""

    exit_code: int | None = 1
    ready_url: str | None = None
    pid, holder, node = 7, "", "10.0.0.7"

    def __init__(self) -> None:
        self._log = "spangrad: engine.model is wrong.\n"

    def log_end(self) -> str:
        return self._log

    def rotate_log(self) -> None:
        pass

    def ask_to_end(self) -> None:
        pass

    def stop(self, grace_seconds: float) -> None:
        self._log = "The actor died because it was killed by ray.kill"


def test_supervisor_reads_cause_of_failure_before_the_log_is_gone() -> None:
    with Supervisor([service("engine")], lambda text: None, launch=lambda service: RemoteProcess()) as supervisor:
        supervisor.poll()
        supervisor.poll()
        assert supervisor.failure("engine") == "engine failed: engine.model is wrong.\nIts log: engine.log"


class StartingProcess(RemoteProcess):
    """Process that is not ready, and whose log ends with an empty line and a part of one."""

    exit_code, node, ready_url = None, "", "http://127.0.0.1:9/"

    def log_end(self) -> str:
        return "loading\rloading weights\n\nhalf of"


@pytest.mark.parametrize(("status", "obstacle"), [(None, "loading weights"), (503, "no engine answers")])
def test_supervisor_obstacle_of_url_without_response_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch, status: int | None, obstacle: str
) -> None:
    def answer(url: str) -> tuple[int | None, str]:
        requests.append(url)
        return status, "no engine answers" if status else ""

    requests: list[str] = []
    monkeypatch.setattr("spangrad.supervisor.supervisor.answer_of", answer)
    with Supervisor([service("gateway")], lambda text: None, launch=lambda service: StartingProcess()) as supervisor:
        supervisor.poll()
        requests.clear()
        supervisor.poll()
        assert supervisor.status()[0]["obstacle"] == obstacle
    assert len(requests) == 1, "it is waited for twice"


def test_status_table_names_states_causes_and_progress() -> None:
    row = {"pid": 7, "node": "", "seconds": 61.2, "restarts": 2, "waits_for": [], "obstacle": "", "cause": "", "log": "logs/x.log"}
    rows = [
        {**row, "name": "store", "state": "ready", "cause": "an old failure"},
        {**row, "name": "gateway", "state": "waiting", "waits_for": ["store"]},
        {**row, "name": "engine", "state": "restarting", "cause": "out of memory"},
        {**row, "name": "page", "state": "starting", "obstacle": "migrating tables"},
    ]
    console = Console(width=120, file=StringIO(), markup=False)
    console.print(status_table(rows, TrainingProgress(3, 7, 0.5, 0.25), "the hint"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "waiting for store" in text
    assert "engine: out of memory" in text
    assert "page: migrating tables" in text
    assert "an old failure" not in text
    assert "1:01" in text
    assert "step 7   return +0.500   untrained rollouts 3   trainer idle 25%" in text
    assert text.endswith("the hint\n")
    assert "node" not in text
    assert "is not started again" not in text
    console.print(status_table([{**rows[0], "node": "10.0.0.7"}, {**row, "name": "run", "state": "failed"}], None))
    assert "is not started again: fix the cause, then call `spangrad down`" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "10.0.0.7" in console.file.getvalue()  # type: ignore[attr-defined]
