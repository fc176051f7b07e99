"""A real PostgreSQL in a directory of its own, for tests: started, ready, stopped.

In: PATH. Out: URLs of places that begin empty. Invariant: the server never outlives the test run. It refuses to run as root, so it
runs as nobody there.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from spangrad.processes import Child, free_ports, wait_until

_USER = "nobody"
"""Who runs the server where the tests run as root."""


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
        made = [_program("initdb"), "--pgdata", data, "--username", "spangrad", "--auth", "trust", "--no-sync", "--encoding", "UTF8"]
        done = subprocess.run(_as_nobody(made), cwd=directory, capture_output=True, text=True, check=False)
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
    found = shutil.which(name, path=places)
    if not found:
        pytest.skip(f"{name} is not here: install PostgreSQL's server (Debian's package postgresql), or put its programs into PATH")
    return found


def _answers(url: str) -> bool:
    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True
