"""Real servers for tests, each in a process of its own or in this one: store, schema, sharded layout, Collector, PostgreSQL, full disks."""

from __future__ import annotations

import atexit
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import sql

from collector.database import EmbeddedDatabase
from collector.schema.cluster import Layout
from collector.schema.migrations import migrate
from spangrad.processes import Child, answers, free_ports, own_command, wait_until
from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import connect
from spangrad.store.names import INTERNAL, STOCK
from tests.support.processes import ForkedChild

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client


def service_addresses(engine_port: int) -> dict[str, object]:
    """Values that move store, gateway, queue and page to free ports, by the ends of their variables' names."""
    grpc, http, sql, gateway, queue, page = free_ports(6)
    return {
        "STORE__OTLP_GRPC_PORT": grpc,
        "STORE__OTLP_HTTP_PORT": http,
        "STORE__CLICKHOUSE_PORT": sql,
        "STORE__URL": f"http://127.0.0.1:{sql}",
        "STORE__OTLP_ENDPOINT": f"http://127.0.0.1:{http}",
        "GATEWAY__PORT": gateway,
        "GATEWAY__URL": f"http://127.0.0.1:{gateway}",
        "GATEWAY__ENGINE_URL": f"http://127.0.0.1:{engine_port}",
        "QUEUE__PORT": queue,
        "QUEUE__URL": f"http://127.0.0.1:{queue}",
        "PAGE__PORT": page,
    }


# A real store in a process of its own, for tests: settings on free ports, started, ready, stopped.

_SERVE = """
import json, logging, sys
from collector.server import serve
from spangrad.errors import SpangradError
from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import connect
from spangrad.store.names import INTERNAL, STOCK
logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
try:
    serve(StoreSettings.model_validate(json.loads(sys.argv[1])))
except SpangradError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def store_settings(path: Path, **changes: object) -> StoreSettings:
    """Settings of a store on free ports, with its data in `path`."""
    grpc_port, http_port, clickhouse_port = free_ports(3)
    return StoreSettings.model_validate(
        {
            "path": path,
            "otlp_grpc_port": grpc_port,
            "otlp_http_port": http_port,
            "clickhouse_port": clickhouse_port,
            "url": f"http://127.0.0.1:{clickhouse_port}",
            "otlp_endpoint": f"http://127.0.0.1:{http_port}",
            **changes,
        }
    )


@cache
def _migrated_data() -> Path:
    """Return the data of a store that has applied all migrations and ended: they take half of the CPU time of a start."""
    directory = Path(tempfile.mkdtemp(prefix="spangrad-store-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    settings = store_settings(directory / "data")
    settings.path.mkdir(mode=0o700)  # so that this store migrates, and copies nothing
    with running_store(settings, directory / "log"):
        return settings.path


def start_store(settings: StoreSettings, log: Path) -> Child:
    """Start a store, a new one on a copy of migrated data; it may not be ready yet."""
    if not settings.path.exists():
        shutil.copytree(_migrated_data(), settings.path, symlinks=True)
    values = settings.model_dump(mode="json")
    # Secrets hide themselves in a dump.
    for name in ("token", "read_token"):
        secret = getattr(settings, name)
        values[name] = secret.get_secret_value() if secret else None
    return ForkedChild("store", ["-c", _SERVE, json.dumps(values)], log)


@contextmanager
def running_store(settings: StoreSettings, log: Path) -> Generator[Child]:
    """A store that answers, stopped at the end."""
    child = start_store(settings, log)
    try:
        wait_until(lambda: store_answers(settings), 60, "the store", [child], poll_seconds=0.05)
        yield child
    finally:
        child.stop(grace_seconds=5)


def empty_store(settings: StoreSettings) -> None:
    """Delete all rows of a running store."""
    for database in (STOCK, INTERNAL):
        client_of(settings).command(f"TRUNCATE TABLES FROM {database} NOT LIKE 'schema_migrations'")


def client_of(store: StoreSettings) -> Client:
    """Return this process's one client of a store, never to be closed: to connect costs as much as several statements."""
    return _client(store, os.getpid())


@cache
def _client(store: StoreSettings, _: int) -> Client:
    return connect(store)


def store_answers(settings: StoreSettings) -> bool:
    """Return whether the store's ClickHouse interface answers at all; it is the last to be opened."""
    try:
        urllib.request.urlopen(f"{settings.url}/ping", timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


# A real engine in this process, with the schema's tables: what tests of the collector's parts commit into.


@contextmanager
def migrated_engine(path: Path) -> Generator[EmbeddedDatabase]:
    """Open a directory; the process may have no other engine meanwhile."""
    engine = EmbeddedDatabase(path)
    handle = engine.handle()
    migrate(lambda sql: handle.query(sql).body.decode(), Layout())
    handle.close()
    yield engine
    engine.close()


# Raw requests to the store's SQL interface, for what the drivers hide: headers, cut answers, clients that leave.


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, and whether it came whole."""

    status: int
    headers: Message
    body: bytes
    whole: bool = True

    @property
    def code(self) -> int:
        """ClickHouse's code of the error; 0 for none."""
        return int(self.headers["X-ClickHouse-Exception-Code"] or 0)


def ask(
    store: StoreSettings,
    sql: str | bytes = "",
    *,
    method: str = "POST",
    path: str = "/",
    headers: dict[str, str] | None = None,
    **parameters: object,
) -> Reply:
    """Ask, and read all that comes."""
    connection = http.client.HTTPConnection("127.0.0.1", store.clickhouse_port, timeout=60)
    try:
        connection.request(method, f"{path}?{urllib.parse.urlencode(parameters)}", sql, headers or {})
        answer = connection.getresponse()
        try:
            return Reply(answer.status, answer.headers, answer.read())
        except http.client.IncompleteRead as cut:
            return Reply(answer.status, answer.headers, cut.partial, whole=False)
    finally:
        connection.close()


def begin(store: StoreSettings, sql: str, **parameters: object) -> socket.socket:
    """Send a question and read nothing."""
    connection = socket.create_connection(("127.0.0.1", store.clickhouse_port))
    path = f"/?{urllib.parse.urlencode(parameters)}"
    connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(sql)}\r\n\r\n{sql}".encode())
    return connection


def form(**parts: tuple[str | None, bytes]) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a form: by name, a file's name (None for a field) and the content."""
    lines: list[bytes] = []
    for name, (file, content) in parts.items():
        named = f'; filename="{file}"' if file is not None else ""
        lines.append(f'--edge\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'.encode() + content + b"\r\n")
    return b"".join(lines) + b"--edge--\r\n", {"Content-Type": "multipart/form-data; boundary=edge"}


# A file system in memory that is soon full.


@contextmanager
def small_disk(mount: Path, mebibytes: int) -> Generator[Path]:
    """Mount one at a path; the test is skipped where that is not allowed."""
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(mount)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here ({done.stderr.strip()}): run as root")
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


# A real OpenTelemetry Collector before a store, for tests: `spangrad collector` on free ports, started, ready, stopped.

PORTS = ("otlp_http_port", "otlp_grpc_port", "health_port")


def otelcol() -> str:
    """The Collector's program; skips the test where there is none."""
    return binary("SPANGRAD_OTELCOL", "otelcol-spangrad")


@dataclass(frozen=True)
class RunningCollector:
    """A Collector that takes OTLP, and how to start it again."""

    child: Child
    url: str
    grpc: str


def collector_values(directory: Path, **changes: object) -> dict[str, object]:
    """Settings of the section `collector`, on free ports, with the queue in `directory`."""
    return {**dict(zip(PORTS, free_ports(len(PORTS)), strict=True)), "queue_path": str(directory / "queue"), **changes}


def start_collector(store: StoreSettings, values: dict[str, object], log: Path) -> Child:
    """Start `spangrad collector`; it may not be ready yet."""
    token = store.token.get_secret_value() if store.token else None
    named = {"store.url": store.url, "store.token": token, **{f"collector.{key}": value for key, value in values.items()}}
    flags = [f"--set={key}={json.dumps(value)}" for key, value in named.items() if value is not None]
    return Child("spangrad collector", own_command("collector", *flags), log, {"SPANGRAD_OTELCOL": otelcol()}, inherit_settings=False)


@contextmanager
def running_collector(store: StoreSettings, values: dict[str, object], log: Path) -> Generator[RunningCollector]:
    """A Collector that answers, stopped at the end."""
    child = start_collector(store, values, log)
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{values['health_port']}"), 60, "the collector", [child], poll_seconds=0.05)
        yield RunningCollector(child, f"http://127.0.0.1:{values['otlp_http_port']}", f"127.0.0.1:{values['otlp_grpc_port']}")
    finally:
        child.stop(grace_seconds=10)


def post(url: str, body: bytes, content_type: str = "application/x-protobuf", **headers: str) -> int:
    """The status that an OTLP endpoint answers a body with."""
    request = urllib.request.Request(url, body, {"Content-Type": content_type, **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


# A real PostgreSQL in a directory of its own, for tests: started, ready, stopped.

_USER = "nobody"
"""User that runs the server if the tests run as root."""


class Postgres:
    """A server on one directory."""

    def __init__(self, directory: Path) -> None:
        """Start it; it has answered."""
        (self._port,) = free_ports(1)
        self._directory = directory
        self._url = f"postgresql://spangrad@127.0.0.1:{self._port}/postgres"
        self.start()

    def start(self) -> None:
        """Start it, again after a crash on the same data."""
        options = {"listen_addresses": "127.0.0.1", "port": self._port, "unix_socket_directories": "", "fsync": "off"}
        settings = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        command = _as_nobody([_program("postgres"), "-D", str(self._directory / "data"), *settings])
        self._server = Child("postgres", command, self._directory / "log")
        wait_until(lambda: _answers(self._url), 60, "PostgreSQL", [self._server], poll_seconds=0.05)

    def crash(self) -> None:
        """End it without a word to its clients, and without writing what it holds."""
        self._end(signal.SIGQUIT)

    def stop(self) -> None:
        """End it; SIGTERM would wait for clients to leave."""
        self._end(signal.SIGINT)

    @property
    def pid(self) -> int:
        """Id of the process whose children serve the connections."""
        return self._server.process.pid

    def schema(self, name: str) -> str:
        """URL of a schema of that name, which is made where there is none."""
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(name)))
        return f"{self._url}?options=-csearch_path%3D{name}"

    def _end(self, number: signal.Signals) -> None:
        if self._server.running:
            self._server.process.send_signal(number)
            self._server.process.wait(30)


@contextmanager
def running_postgres() -> Generator[Postgres]:
    """A server, until the block ends."""
    directory = Path(tempfile.mkdtemp(prefix="spangrad-postgres-"))
    try:
        if os.geteuid() == 0:
            shutil.chown(directory, _USER)
        data = str(directory / "data")
        command = [_program("initdb"), "--pgdata", data, "--username", "spangrad", "--auth", "trust", "--no-sync", "--encoding", "UTF8"]
        done = subprocess.run(_as_nobody(command), cwd=directory, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        server = Postgres(directory)
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _as_nobody(command: list[str]) -> list[str]:
    if os.geteuid():
        return command
    return ["setpriv", f"--reuid={_USER}", "--regid=nogroup", "--clear-groups", "--pdeathsig=TERM", *command]


def _program(name: str) -> str:
    """Debian keeps the server's programs out of PATH."""
    places = os.pathsep.join([os.environ.get("PATH", ""), *map(str, Path("/usr/lib/postgresql").glob("*/bin"))])
    program = shutil.which(name, path=places)
    if not program:
        pytest.skip(f"{name} is not here: install PostgreSQL's server (Debian's package postgresql), or put its programs into PATH")
    return program


def _answers(url: str) -> bool:
    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True


# Programs that tests need and the checkout has not: the real Collector, clickhouse-go.


def binary(variable: str, name: str) -> str:
    """Return the path of a program, from an environment variable or PATH; skip the test if there is none."""
    named = os.environ.get(variable)
    if not named:
        program = shutil.which(name)
        if not program:
            pytest.skip(f"{name} is not here: set {variable} to its path, or put it into PATH")
        return program
    if not (Path(named).is_file() and os.access(named, os.X_OK)):
        pytest.fail(f"{variable} = {named!r} is no program that can be run: set it right, or unset it")
    return named


@contextmanager
def raw_server(answers: list[bytes]) -> Generator[str]:
    """Yield the URL of a server that sends raw bytes to each connection and closes it: `answers` in turn, the last one again and again."""

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return  # the test is over
            with connection, connection.makefile("rb") as request:
                # A socket that is closed before all of its request was read resets the connection, and the answer is lost.
                length = int(http.client.parse_headers(request).get("Content-Length", 0)) if request.readline() else 0
                request.read(length)
                connection.sendall(answers.pop(0) if len(answers) > 1 else answers[0])

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
