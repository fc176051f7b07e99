"""An engineer's own agent, trained by the services with their default settings, as examples/own_agent tells them to."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from running_engine import VLLM_PYTHON, fetch

from spangrad.processes import Child, answers, free_ports, own_command, wait_until
from spangrad.types import VersionStatus
from trainer.ledger.ledger import Ledger

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "own_agent"


def commands(model: Path, steps: int) -> dict[str, list[str]]:
    """Read the commands of the example's README, by the service that each starts; the trainer ends after so many steps."""
    (block,) = re.findall(r"```\n(spangrad store\n.*?)```", (EXAMPLE / "README.md").read_text(), re.S)
    assert block.count("--max-steps 20") == 1
    block = block.replace("--max-steps 20", f"--max-steps {steps}").replace("DIRECTORY_OF_YOUR_MODEL", str(model))
    lines = [shlex.split(line) for line in block.splitlines()]
    return {words[1]: words[1:] for words in lines}


def elsewhere(cache: Path) -> dict[str, str]:
    """Return the environment that moves every service to a free port and the directory of the test, and changes nothing else."""
    grpc, http, sql, gateway, engine, queue = free_ports(6)
    where = {
        "STORE__OTLP_GRPC_PORT": grpc,
        "STORE__OTLP_HTTP_PORT": http,
        "STORE__CLICKHOUSE_PORT": sql,
        "STORE__URL": f"http://127.0.0.1:{sql}",
        "STORE__OTLP_ENDPOINT": f"http://127.0.0.1:{http}",
        "GATEWAY__PORT": gateway,
        "GATEWAY__URL": f"http://127.0.0.1:{gateway}",
        "GATEWAY__ENGINE_URL": f"http://127.0.0.1:{engine}",
        "ENGINE__PORT": engine,
        "ENGINE__PYTHON": VLLM_PYTHON,
        "ENGINE__CACHE_DIR": cache,
        "ENGINE__KV_CACHE_BYTES": 64 * 2**20,  # vLLM would take most of this machine's memory
        "RUNNER__QUEUE_PORT": queue,
        "RUNNER__QUEUE_URL": f"http://127.0.0.1:{queue}",
    }
    return {f"SPANGRAD_{name}": str(value) for name, value in where.items()} | {"PYTHONPATH": str(ROOT)}


@contextmanager
def running(environment: dict[str, str], name: str, words: list[str]) -> Iterator[Child]:
    """Run one command in the working directory, with the address of the queue that this test has."""
    queue = environment["SPANGRAD_RUNNER__QUEUE_URL"]
    line = own_command(*(word.replace("http://127.0.0.1:8190", queue) for word in words))
    child = Child(f"spangrad {name}", line, Path(f"{name}.log"), environment)
    try:
        yield child
    finally:
        child.stop()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("steps", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_default_settings_train_an_own_agent_without_an_exit(
    tiny_model: Path, vllm_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    monkeypatch.chdir(tmp_path)
    environment, lines = elsewhere(vllm_cache), commands(tiny_model, steps)
    (tmp_path / "examples").symlink_to(EXAMPLE.parent)
    with ExitStack() as stack:
        children = {name: stack.enter_context(running(environment, name, lines[name])) for name in ("store", "queue", "engine", "gateway")}
        every = list(children.values())
        wait_until(lambda: answers(f"{environment['SPANGRAD_STORE__URL']}/ping"), 60, "the store", every)
        gateway = f"{environment['SPANGRAD_GATEWAY__URL']}/readyz"
        wait_until(lambda: fetch(gateway).get("status") == "serving", 180, "the gateway's engine", every)
        for name in ("build", "train", "run"):
            children[name] = stack.enter_context(running(environment, name, lines[name]))
        trainer, ledger_file = children["train"], tmp_path / "data" / "policies" / "ledger.db"
        end = time.monotonic() + 400
        while trainer.process.poll() is None:
            assert time.monotonic() < end, f"the trainer is not done: {(tmp_path / 'train.log').read_text()[-2000:]}"
            for name, child in children.items():
                if name != "train":
                    child.check()
            time.sleep(0.2)
        log = (tmp_path / "train.log").read_text()
        assert trainer.process.returncode == 0, log
        assert f"trainer.max_steps = {steps} steps are done" in log
    ledger = Ledger(ledger_file.parent, "policy", "main")
    versions = ledger.versions()
    ledger.close()
    assert [version.version for version in versions if version.status is VersionStatus.COMMITTED] == list(range(steps + 1))
