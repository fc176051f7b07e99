"""Worker processes for tests: a small gateway, a small store, and agents in sh that need no time to start.

In: a directory. Out: settings that name all of it, workers that can be killed, and what is left of their processes. Invariant: what a test
leaves behind is found by its working directory.
"""

from __future__ import annotations

import json
import os
import signal
import textwrap
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sections import service_settings

from fakes import AttemptGateway, OtlpSink
from runner.workers.agents import CommandAgent
from spangrad import semconv
from spangrad.processes import MARK, Child, own_command
from spangrad.settings import GatewaySettings, Settings, StoreSettings

AGENT = """
    read given
    case "$given" in
        *crash*) kill -9 $$;;
        *poison*) kill -9 $PPID;;
        *exit*) echo broken >&2; exit 3;;
        *hang*) sleep 600 & sleep 600;;
        *garbage*) echo "no number";;
        *empty*) ;;
        *steady*) sleep 3; echo 1;;
        *slow*) sleep 600 & sleep 0.3; echo 1;;
        *) echo thinking >&2; echo 1;;
    esac
"""


@dataclass
class World:
    """What surrounds a worker."""

    directory: Path
    sink: OtlpSink
    gateway: AttemptGateway
    settings: Settings
    children: list[Child] = field(default_factory=list)

    @property
    def agent(self) -> CommandAgent:
        """The agent in sh."""
        return CommandAgent(("sh", "agent.sh"), directory=self.directory)

    def start_worker(
        self, *options: str, agent: Sequence[str] = ("--", "sh", "agent.sh"), env: Mapping[str, str] | None = None, **changes: object
    ) -> Child:
        """`spangrad worker`, started.

        Args:
            options: of its command line.
            agent: the end of its command line.
            env: added to its environment.
            changes: to the runner's settings.
        """
        runner = {**self.settings.runner.model_dump(mode="json"), **changes}
        runner |= {f"container.{name}": value for name, value in runner.pop("container").items()}
        values = {
            "store.otlp_endpoint": self.settings.store.otlp_endpoint,
            "gateway.url": self.settings.gateway.url,
            **{f"runner.{name}": value for name, value in runner.items() if value is not None},
            **({"queue.url": self.settings.queue.url} if self.settings.queue.url else {}),
        }
        texts = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in values.items()}
        words = [word for name, value in texts.items() for word in ("--set", f"{name}={value}")]
        log = self.directory / f"worker-{len(self.children)}.log"
        child = Child(
            "spangrad worker",
            own_command("worker", "--directory", str(self.directory), *options, *words, *agent),
            log,
            {"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "langchain,openai,httpx,httpx2", **(env or {})},
            inherit_settings=False,
        )
        self.children.append(child)
        return child

    def roots(self) -> dict[tuple[str, int], Mapping[str, object]]:
        """Attributes of each root span, by rollout and attempt; of two that are the same span, the first."""
        found: dict[tuple[str, int], Mapping[str, object]] = {}
        for root in self.sink.named("rollout"):
            key = (str(root.attributes[semconv.ROLLOUT_ID]), int(str(root.attributes[semconv.ROLLOUT_ATTEMPT])))
            found.setdefault(key, root.attributes)
        return found

    def processes(self) -> list[str]:
        """Command lines of the agent's programs that are there."""
        return [_command(pid) for pid in self.programs()]

    def programs(self) -> list[int]:
        """Processes of the agent's programs, and what those have started."""
        return [pid for pid in _pids() if str(self.directory) == _directory(pid) and _command(pid).startswith(("sh", "sleep"))]

    def left(self) -> list[str]:
        """Command lines of whatever descends from an agent host of ours, by the mark that it has inherited, in whichever process group."""
        ours = self.settings.store.otlp_endpoint.encode()
        return [_command(pid) for pid in _pids() if f"{MARK}=".encode() in (inherited := _environment(pid)) and ours in inherited]

    def hosts(self) -> list[int]:
        """Agent hosts of our workers."""
        workers = {child.process.pid for child in self.children}
        return [pid for pid in _pids() if _parent(pid) in workers]


@contextmanager
def world(directory: Path, **changes: object) -> Generator[World]:
    """A gateway and a store, and settings of the runner; every worker is ended with the block."""
    (directory / "agent.sh").write_text(textwrap.dedent(AGENT))
    with OtlpSink() as sink, AttemptGateway() as gateway:
        chosen = service_settings(**{"run_id": "run", "directory": directory / "runner", **changes})
        settings = Settings(
            store=StoreSettings(otlp_endpoint=sink.url),
            gateway=GatewaySettings(url=gateway.url),
            runner=chosen.runner,
            queue=chosen.queue,
        )
        here = World(directory, sink, gateway, settings)
        try:
            yield here
        finally:
            for child in here.children:
                child.stop(0.1)


def kill(pid: int) -> None:
    """SIGKILL, if it is there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _command(pid: int) -> str:
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def _environment(pid: int) -> bytes:
    return _read(pid, "environ")


def _directory(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/cwd").readlink())
    except OSError:
        return ""


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
