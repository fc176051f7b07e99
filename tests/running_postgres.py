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
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from spangrad.processes import Child, free_ports, wait_until

_USER = "nobody"
"""Who runs the server where the tests run as root."""


@contextmanager
def running_postgres() -> Generator[Callable[[str], str]]:
    """A server, as a function that gives the URL of a schema of that name, which it makes where there is none."""
    directory = Path(tempfile.mkdtemp(prefix="spangrad-postgres-"))
    data, (port,) = directory / "data", free_ports(1)
    try:
        if os.geteuid() == 0:
            shutil.chown(directory, _USER)
        made = [_program("initdb"), "--pgdata", str(data), "--username", "spangrad", "--auth", "trust", "--no-sync", "--encoding", "UTF8"]
        done = subprocess.run(_as_nobody(made), cwd=directory, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        options = {"listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": "", "fsync": "off"}
        settings = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        server = Child("postgres", _as_nobody([_program("postgres"), "-D", str(data), *settings]), directory / "log")
        try:
            url = f"postgresql://spangrad@127.0.0.1:{port}/postgres"
            wait_until(lambda: _answers(url), 60, "PostgreSQL", [server], poll_seconds=0.05)

            def schema(name: str) -> str:
                with psycopg.connect(url, autocommit=True) as connection:
                    connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(name)))
                return f"{url}?options=-csearch_path%3D{name}"

            yield schema
        finally:
            server.process.send_signal(signal.SIGINT)  # SIGTERM would wait for clients to leave
            server.stop(grace_seconds=5)
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
