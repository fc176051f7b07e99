"""The page "My agent in 15 minutes" as a reader follows it: its own files and its own commands, to trained versions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from spangrad.processes import free_ports
from spangrad.types import VersionStatus
from tests.support.processes import forking_python
from tests.support.servers import service_addresses
from trainer.ledger.ledger import Ledger

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "start" / "my-agent.md").read_text()
STEPS = PAGE.partition("\n## When it does not learn\n")[0]
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", STEPS, re.M | re.S)
COMMANDS = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]
SECONDS = 420
READY = dict.fromkeys(("store", "queue", "engine", "gateway", "build", "train", "run", "page"), "ready")


def elsewhere(cache: Path) -> dict[str, str]:
    """Return the environment that moves every service to a free port, which other tests do not use, and has vLLM forked."""
    (engine,) = free_ports(1)
    moved = {
        **service_addresses(engine),
        "ENGINE__PORT": engine,
        "ENGINE__CACHE_DIR": cache,
        "ENGINE__PYTHON": forking_python(),
    }
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, **{f"SPANGRAD_{name}": str(value) for name, value in moved.items()}, "PYTHONPATH": str(ROOT), "PATH": path}


def committed(directory: Path) -> int:
    """Return the number of versions that were trained."""
    if not (directory / "ledger.db").exists():
        return 0
    ledger = Ledger(directory, "policy", "main")
    try:
        return sum(version.status is VersionStatus.COMMITTED for version in ledger.versions()) - 1
    finally:
        ledger.close()


def states(table: str) -> dict[str, str]:
    """Return the states of the services by the table of `spangrad ps`."""
    return {line.split()[0]: line.split()[1] for line in table.splitlines()[1:9]}


def test_own_agent_page_has_fewer_than_10_commands_and_20_lines_of_agent() -> None:
    assert STEPS != PAGE, "what follows the steps has another title"
    assert len(COMMANDS) < 10
    (agent,) = [text for kind, text in BLOCKS if kind == "python"]
    assert len(agent.splitlines()) <= 20
    assert "spangrad" not in agent


@pytest.mark.timeout(900)
@pytest.mark.parametrize("steps", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_own_agent_page_commands_lead_to_trained_versions(vllm_cache: Path, tmp_path: Path, steps: int) -> None:
    environment = elsewhere(vllm_cache)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for kind, name in (("python", "agent.py"), ("", "tasks.jsonl")):
        (text,) = [text for of_kind, text in BLOCKS if of_kind == kind]
        (tmp_path / name).write_text(textwrap.dedent(text))

    def shell(command: str) -> str:
        done = subprocess.run(
            command,
            shell=True,
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        return done.stdout

    install, start, rest = COMMANDS[:2], COMMANDS[2:5], COMMANDS[5:]
    assert [command.split()[0] for command in install] == ["make", "source"]
    try:
        for command in start:
            shell(command)
        end = time.monotonic() + SECONDS
        while committed(tmp_path / "data" / "policies") < steps:
            assert time.monotonic() < end, shell("spangrad ps; tail -n 20 data/up/logs/*.log")
            time.sleep(0.5)
        output = dict[str, str]()
        for command in rest:
            output[command] = shell(command)
            while command == "spangrad ps" and states(output[command]) != READY and time.monotonic() < end:
                time.sleep(1)  # on a busy machine a service that is asked whether it is ready may answer too late, and in time again
                output[command] = shell(command)
    finally:
        subprocess.run(["spangrad", "down"], cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert states(output["spangrad ps"]) == READY
    assert "committed" in output["spangrad policy list"]
    assert "rollout" in output["spangrad lineage policy@1"]
    stopping, ended = output["spangrad down"].splitlines()
    assert (stopping.split()[0], ended) == ("stopping", "every service has ended")
