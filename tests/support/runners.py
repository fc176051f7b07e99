"""Queues, workers and environment services for tests, served in this process or in one that can be killed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import textwrap
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psycopg
from pydantic import SecretStr

from runner.queue import server, tables
from runner.queue.client import QueueClient
from runner.queue.service import Service
from runner.queue.wire import Completion, Failure, Held, QueuedRollout, RolloutLease, RolloutState
from runner.workers.agents import CommandAgent
from spangrad import semconv
from spangrad.http.queue_messages import NewRollout, new_rollout
from spangrad.processes import MARK, Child, answers, free_ports, wait_until
from spangrad.settings import EnvironmentServiceSettings, GatewaySettings, Settings, StoreSettings
from spangrad.types import AttemptFailure
from tests.support.otlp import HttpServer, OtlpSink
from tests.support.processes import ForkedChild

# Queues for tests: served in this process, or in one that can be killed.


def service_settings(**flat: Any) -> Settings:
    """Return all settings with these values: `SECTION__field` of a service, and fields of the runner by their own names."""
    tables: dict[str, Any] = {"runner": {}}
    for name, value in flat.items():
        section, _, field = name.rpartition("__")
        tables.setdefault(section or "runner", {})[field] = value
    return Settings(**tables)


def queue_settings(db: str, **changes: object) -> Settings:
    """Settings of a queue on a free port; `changes` by key (`settings_by_key`)."""
    (port,) = free_ports(1)
    address = {"queue__port": port, "queue__url": f"http://127.0.0.1:{port}", "queue__db": SecretStr(db)}
    return service_settings(**{**address, **changes})


@asynccontextmanager
async def serving(settings: Settings, retry_seconds: float = 5) -> AsyncGenerator[tuple[QueueClient, Service]]:
    """A queue in this process, and a client of it."""
    async with server.running(settings) as service, QueueClient.of(settings.queue, retry_seconds=retry_seconds) as client:
        yield client, service


def queue_process(settings: Settings, log: Path, env: dict[str, str] | None = None) -> Child:
    """Start `spangrad queue` and wait until it is ready; the caller stops it."""
    values = {
        "queue.port": settings.queue.port,
        "queue.db": settings.queue.db.get_secret_value(),
        "queue.lease_seconds": settings.queue.lease_seconds,
        "runner.timeout_seconds": settings.runner.timeout_seconds,
        "runner.max_attempts": settings.runner.max_attempts,
    }
    words = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
    child = ForkedChild("spangrad queue", ["-m", "spangrad", "queue", *words], log, env, inherit_settings=False)
    try:
        wait_until(lambda: answers(f"{settings.queue.url}/readyz"), 60, "the queue", [child], poll_seconds=0.02)
    except BaseException:
        child.stop()
        raise
    return child


@contextmanager
def queue_server(settings: Settings, log: Path, env: dict[str, str] | None = None) -> Generator[Child]:
    """`spangrad queue` in a process of its own."""
    child = queue_process(settings, log, env)
    try:
        yield child
    finally:
        child.stop()


def new_rollouts(count: int, prefix: str = "r", group_size: int = 1, **facts: object) -> list[NewRollout]:
    """Rollouts with names: r0, r1, ...; so many a group."""
    return [
        new_rollout(
            f"task {i}", {"question": i}, f"{prefix} group {i // group_size}", rollout_id=f"{prefix}{i}", group_size=group_size, **facts
        )
        for i in range(count)
    ]


def with_mood(mood: str, rollouts: Iterable[NewRollout]) -> list[NewRollout]:
    """Rollouts whose input is a word that the agents of `workers` know."""
    return [msgspec.structs.replace(rollout, input=msgspec.Raw(json.dumps(mood).encode())) for rollout in rollouts]


async def until_ended(client: QueueClient, count: int) -> list[QueuedRollout]:
    """The rollouts that have ended, once there are so many."""
    ended: list[QueuedRollout] = []
    cursor = 0
    while len(ended) < count:
        page = await client.ended("run", after=cursor, limit=1000, wait_seconds=20)
        cursor, ended = page.cursor, ended + page.rollouts
    return ended


def lock_holders(url: str, columns: str = "pid") -> list[tuple[Any, ...]]:
    """Return columns of pg_locks for each session that holds the server lock of a queue's database in PostgreSQL."""
    condition = "locktype = 'advisory' AND classid = %s AND objid::bigint = (hashtext(current_schema())::bigint & 4294967295) AND granted"
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute(f"SELECT {columns} FROM pg_locks WHERE {condition}".encode(), [tables._SERVER_LOCK]).fetchall()


async def is_locked(url: str, but: int = 0) -> bool:
    """Return True if a queue server holds the lock of a database in PostgreSQL, by another session than `but`."""
    return any(pid != but for (pid,) in await asyncio.to_thread(lock_holders, url))


def done(lease: RolloutLease | Held, **facts: Any) -> Completion:
    return Completion(
        **{"rollout_id": lease.rollout_id, "attempt": lease.attempt, "rewards": {"reward": 1.0}, "calls": 2, "seconds": 0.5, **facts}
    )


def failed(lease: RolloutLease, reason: AttemptFailure = AttemptFailure.CRASH, **facts: Any) -> Failure:
    return Failure(rollout_id=lease.rollout_id, attempt=lease.attempt, reason=reason, **facts)


async def until(true: Callable[[], Awaitable[bool]], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not await true():
        assert time.monotonic() < end, "it did not come true in time"
        await asyncio.sleep(0.01)


async def state(client: QueueClient, name: str) -> RolloutState:
    return (await client.rollout(name)).state


async def is_state(client: QueueClient, name: str, expected: RolloutState) -> bool:
    return await state(client, name) == expected


async def is_true(value: object) -> bool:
    return bool(value)


# Worker processes for tests: a small gateway, a small store, and agents in sh that need no time to start.

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


class AttemptGateway(HttpServer):
    """Fake gateway for the runner, with chat completions: remembers announcements, counts calls, answers with `reply`."""

    def __init__(self, port: int = 0, reply: Callable[[list[dict[str, str]]], str] = lambda messages: "weather paris") -> None:
        self.announced: dict[tuple[str, int], dict[str, Any]] = {}
        self.stages: dict[tuple[str, int], list[tuple[str, float]]] = {}
        """Stages of attempts in their order, with their time limits."""
        self.calls: dict[tuple[str, int], int] = {}
        self.closed: dict[tuple[str, int], str] = {}
        """Reasons for which attempts were closed."""
        self.budget_spent = ""
        """Reason for which it says of every attempt that it was closed."""
        self.chats: list[dict[str, Any]] = []
        self.chat_headers: list[dict[str, str]] = []
        self.reply = reply
        self.ready = 200
        self.forgotten: set[int] = set()
        """Attempts, by number, whose calls it cannot count any more."""
        self.overflow_all = False
        """Flag to report of every attempt that the engine refused the last call for its length; the calls themselves are answered."""
        self.chatted = threading.Semaphore(0)
        self._lock = threading.Lock()
        super().__init__(port)

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        low = {name.lower(): value for name, value in headers.items()}
        status, answer = self._route(method, path, low, json.loads(body) if body else {})
        return status, {"content-type": "application/json"}, json.dumps(answer).encode()

    def _route(self, method: str, path: str, headers: dict[str, str], body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/readyz":
            return self.ready, {"reason": "no engine"}
        attempt = re.match(r"/rollout/([^/]+)/attempt/(\d+)", path)
        key = (attempt[1], int(attempt[2])) if attempt else None
        with self._lock:
            if path.endswith("/chat/completions"):
                carried = re.search(r"spangrad\.rollout\.id=([^,;]+).*?spangrad\.rollout\.attempt=(\d+)", headers.get("baggage", ""))
                key = key or ((carried[1], int(carried[2])) if carried else None)
                if key is not None:
                    self.calls[key] = self.calls.get(key, 0) + 1
                self.chats.append(body)
                self.chat_headers.append(headers)
                self.chatted.release()
                message = {"role": "assistant", "content": self.reply(body["messages"])}
                choice = {"index": 0, "message": message, "finish_reason": "stop"}
                usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
                return 200, {"id": "c", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice], "usage": usage}
            if path == "/attempts":
                self.announced |= {(reported["rollout_id"], reported["attempt"]): reported for reported in body["attempts"]}
                return 200, {}
            if path == "/attempts/stages":
                for reported in body["attempts"]:
                    self.stages.setdefault((reported["rollout_id"], reported["attempt"]), []).append(
                        (reported["stage"], reported["seconds"])
                    )
                return 200, {}
            if path == "/attempts/close":
                self.closed |= {(reported["rollout_id"], reported["attempt"]): reported["reason"] for reported in body["attempts"]}
                return 200, {}
            if path == "/attempts/calls":
                return 200, {"attempts": [self._counted(reported["rollout_id"], reported["attempt"]) for reported in body["attempts"]]}
        return 404, {"error": path}

    def _counted(self, rollout: str, number: int) -> dict[str, Any]:
        known = (rollout, number) in self.announced and number not in self.forgotten
        return {
            "calls": self.calls.get((rollout, number), 0) if known else None,
            "overflowed": self.overflow_all,
            "in_flight": 0,
            "closed": self.closed.get((rollout, number), self.budget_spent),
        }


@dataclass
class RunnerServices:
    """Services around a worker: an OTLP endpoint, a gateway and child processes, with their settings."""

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
        child = ForkedChild(
            "spangrad worker",
            ["-m", "spangrad", "worker", "--directory", str(self.directory), *options, *words, *agent],
            log,
            {"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "langchain,openai,httpx,httpx2", **(env or {})},
            inherit_settings=False,
        )
        self.children.append(child)
        return child

    def roots(self) -> dict[tuple[str, int], Mapping[str, object]]:
        """Attributes of each root span, by rollout and attempt; of two that are the same span, the first."""
        attributes: dict[tuple[str, int], Mapping[str, object]] = {}
        for root in self.sink.named("rollout"):
            key = (str(root.attributes[semconv.ROLLOUT_ID]), int(str(root.attributes[semconv.ROLLOUT_ATTEMPT])))
            attributes.setdefault(key, root.attributes)
        return attributes

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
def runner_services(directory: Path, **changes: object) -> Generator[RunnerServices]:
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
        services = RunnerServices(directory, sink, gateway, settings)
        try:
            yield services
        finally:
            for child in services.children:
                child.stop(0.1)


def kill(pid: int) -> None:
    """SIGKILL, if it is there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


@contextmanager
def no_descriptors() -> Generator[None]:
    """Let this process open no further file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
    taken: list[int] = []
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


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


# Services of environments for tests, on free ports.


def environment_service_settings(**changes: Any) -> EnvironmentServiceSettings:
    """Settings of a service of environments."""
    (port,) = free_ports(1)
    return EnvironmentServiceSettings(port=port, **changes)
