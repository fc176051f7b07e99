"""The blocks of the documentation run: shell and Python in a directory of their own, SQL on a store, TOML as settings.

A block that needs a GPU, a second machine or minutes of vLLM has a line before it that says so: `*Not run by the tests ...*`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from spangrad.cli import app
from spangrad.processes import free_ports
from spangrad.settings.sources import explain_settings, load_settings, variable_of
from tests.programs import fork_server
from tests.support.processes import address_of_forks

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "benchmarks" / "RESULTS.md",
    *sorted(page for page in ROOT.glob("docs/**/*.md") if not {"reference", "decisions"} & set(page.parts)),
]
BLOCK = re.compile(
    r"(?P<mark>^ *\*Not run by the tests[^`*]*(?:`[^`]*`[^`*]*)*\*\n\n)?^ *```(?P<kind>\w*)\n(?P<text>.*?)^ *```$", re.M | re.S
)
KINDS = {"bash", "python", "sql", "toml", "json", "xml", "console", "javascript", ""}
SERVICES = {"store", "queue", "gateway", "environments", "worker", "rewards"}
TASKS = "".join(json.dumps({"task_id": f"t{number}", "input": number}) + "\n" for number in range(2))
FILES = {
    "my_agent.py": "def answer(input):\n    return input\n\n\nif __name__ == '__main__':\n    print(answer(input()))\n",
    "my_game.py": (
        "import spangrad.episode.environment as episode\n\n\nclass Guess:\n    def reset(self, task):\n        return 'Your guess?'\n\n"
        "    def step(self, action):\n        return episode.StepResult('Right.', 1.0, done=True)\n"
    ),
    "my_task.py": "def score(input, output):\n    return float(input == output)\n",
    "my_world.py": "class World:\n    def begin(self, input):\n        return {}\n\n    def reset(self):\n        pass\n",
    "tasks.jsonl": TASKS,
    "held_out.jsonl": TASKS,
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    mark: str
    kind: str
    text: str

    @property
    def place(self) -> str:
        """Its page and line, as the name of its test."""
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    name = str(page.relative_to(ROOT))
    return [
        Block(name, text.count("\n", 0, match.start("kind")) + 1, match["mark"] or "", match["kind"], textwrap.dedent(match["text"]))
        for match in BLOCK.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def blocks(kind: str, *, marked: bool = False) -> list[Block]:
    return [block for block in BLOCKS if block.kind == kind and (marked or not block.mark)]


def commands(block: Block) -> list[list[str]]:
    """Split the `spangrad` commands of a shell block into words."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [shlex.split(re.split(r" [>|&]", line)[0], comments=True)[1:] for line in lines if line.startswith("spangrad ")]


def test_doc_blocks_have_a_kind_that_is_run_or_compared() -> None:
    assert len(blocks("bash", marked=True)) > 30
    assert [block.place for block in BLOCKS if block.kind not in KINDS] == []
    named = re.compile(r"^(?:spangrad|curl|pip|make|python|export|ray|docker) ", re.M)
    assert [block.place for block in BLOCKS if not block.kind and named.search(block.text)] == [], "a shell block begins with ```bash"
    for block in BLOCKS:
        for file in re.findall(r"`(tests/[^`*]+)`", block.mark):
            assert (ROOT / file).exists(), block.place
    # Those of the queue's HTTP interface are run, and their answers compared, by tests/integration/test_queue_docs.py.
    assert {block.page for block in blocks("console")} <= {"docs/guides/queue.md"}
    # Run by tests/integration/test_loop.py.
    assert [block.page for block in blocks("javascript")] == ["docs/guides/runner.md"]


@pytest.mark.parametrize("block", blocks("bash", marked=True), ids=lambda block: block.place)
def test_doc_blocks_commands_and_options_are_known(block: Block) -> None:
    for words in commands(block):
        app.parse_args(words, exit_on_error=False, print_error=False)


@pytest.mark.parametrize("block", blocks("toml"), ids=lambda block: block.place)
def test_doc_blocks_toml_loads_as_settings(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "spangrad.toml"
    file.write_text(block.text)
    assert load_settings(file=file, env={})


@pytest.mark.parametrize("block", blocks("json"), ids=lambda block: block.place)
def test_doc_blocks_json_parses(block: Block) -> None:
    assert json.loads(block.text)


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.place)
def test_doc_blocks_python_runs(block: Block, tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(block.text)
    code = "import runpy; runpy.run_path('block.py', run_name='block')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


class Place:
    """A running store, free ports for the other services, and an environment in which commands find both."""

    def __init__(self, directory: Path) -> None:
        """Start the store."""
        self.directory = directory
        origins = explain_settings(env={})
        known = [str(origin.value) for origin in origins if origin.key.endswith("port") and origin.value] + ["8193"]
        self.ports = dict(zip(known, map(str, free_ports(len(known))), strict=True))
        path = f"{self.commands()}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
        for origin in origins:
            moved = self.move(str(origin.value))
            if moved != str(origin.value) and (origin.key.endswith("port") or "://" in moved):
                self.environment[variable_of(origin.key)] = moved
        self.environment[variable_of("runner.gateway")] = "false"
        for name, text in FILES.items():
            (directory / name).write_text(text)
        for name in ("tests", "examples", "dashboards"):
            if (ROOT / name).exists():
                (directory / name).symlink_to(ROOT / name)
        store = [directory / "bin" / "spangrad", "store"]
        self.store = subprocess.Popen(store, cwd=directory, env=self.environment, start_new_session=True)
        self.wait(self.ports["8123"])

    def commands(self) -> Path:
        """Make a directory whose `spangrad` is forked from a process that has imported what it imports."""
        directory = self.directory / "bin"
        directory.mkdir()
        python, command = directory / "forking-python", directory / "spangrad"
        fork_server.write_wrapper(python, Path(sys.executable), address_of_forks("services"), "spangrad")
        command.write_text(f'#!/bin/sh\nexec {python} -m spangrad "$@"\n')
        command.chmod(0o755)
        return directory

    def move(self, text: str) -> str:
        """Replace the usual ports in a text by those that are free here."""
        return re.sub(r"(?<![\d.])\d{4,5}(?!\d)", lambda match: self.ports.get(match[0], match[0]), text)

    def wait(self, port: str) -> None:
        """Wait until a process listens on a port."""
        until = time.monotonic() + 90
        while time.monotonic() < until:
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", int(port))) == 0:
                    return
            time.sleep(0.05)
        raise AssertionError(f"nobody listens on {port}")

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        """Run a page's shell blocks as one script, and end the services that it started."""
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=500)
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        return subprocess.CompletedProcess(script, process.returncode, output)

    def close(self) -> None:
        """End the store."""
        self.store.terminate()
        self.store.wait(60)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    place = Place(tmp_path_factory.mktemp("docs"))
    yield place
    place.close()


LISTENS = {"queue": "8190", "environments": "8191", "rewards serve": "8192", "env serve": "8193", "page": "8195"}
"""Service that a page starts in the background -> the usual port on which it is waited for."""


def script_of(page_blocks: list[Block], place: Place) -> str:
    """Join a page's blocks: the store runs already, and what starts in the background is waited for."""
    lines = list[str]()
    for line in "".join(place.move(block.text) for block in page_blocks).replace("\\\n", " ").splitlines():
        if line.startswith("spangrad store"):
            continue
        if not (line.startswith("spangrad ") and line.endswith("&")):
            lines.append(line)
            continue
        service = next((name for name in LISTENS if line.startswith(f"spangrad {name}")), None)
        lines.append(f"{line.removesuffix('&')} > /dev/null 2>&1 &")
        if service:
            lines.append(f"until (exec 3<>/dev/tcp/127.0.0.1/{place.ports[LISTENS[service]]}) 2>/dev/null; do sleep 0.1; done")
    return "\n".join([*lines, "kill $(jobs -p) 2>/dev/null || true", "wait"])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", sorted({block.page for block in blocks("bash")}))
def test_doc_blocks_shell_runs(page: str, place: Place) -> None:
    done = place.run(script_of([block for block in blocks("bash") if block.page == page], place))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("block", blocks("sql"), ids=lambda block: block.place)
def test_doc_blocks_sql_runs(block: Block, place: Place) -> None:
    parameters = {"param_rollouts": "['a']", "param_since": "2026-01-01 00:00:00", "param_until": "2027-01-01 00:00:00"}
    query = "&".join(f"{name}={value}" for name, value in parameters.items()).replace(" ", "%20").replace("'", "%27")
    done = subprocess.run(
        ["curl", "-gsS", "--fail-with-body", f"http://127.0.0.1:{place.ports['8123']}/?{query}", "--data-binary", block.text],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
