"""Queries to a store that may have stopped.

In: the address of the store. Out: settings of a store that answers, for the time of one query. Invariant: a running store is queried
directly; only when nothing listens on this machine is the data of a stopped store opened, for this command alone, and closed again
afterwards.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pydantic import SecretStr

from spangrad.errors import SpangradError, StoreError
from spangrad.http.json_http import status_of
from spangrad.http.service import without_userinfo
from spangrad.processes import LOOPBACK
from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import connect, store_errors

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

_START_SECONDS = 15.0
"""Time in which a store that has opened its data must answer, in seconds."""
_POLL_SECONDS = 0.2


@contextmanager
def answering_store(store: StoreSettings) -> Generator[StoreSettings]:
    """Yield the settings of the running store, or of one that is opened on the data of a stopped store.

    Raises:
        StoreError: no store runs and there is no data to open, or another process has the data open, and does not answer in time.
    """
    from collector.database import user_of

    shown_url = without_userinfo(store.url)
    end, waiting = time.monotonic() + _START_SECONDS, False
    while not _listens(store.url):
        if urlsplit(store.url).hostname not in LOOPBACK:
            raise StoreError(f"no span store answers at {shown_url}. Start it there, or set store.url to the one that you mean.")
        stopped = next((path for path in (store.path, Path("runs/demo/store")) if path.is_dir()), None)
        if stopped is None:
            raise StoreError(
                f"no span store answers at {shown_url}, and {store.path} holds no data. Start one with `spangrad store`, or set store.url."
            )
        if not (user := user_of(stopped)):
            print(f"no store answers at {shown_url}: opening {stopped} until this command ends", file=sys.stderr)
            with ExitStack() as opening:
                try:
                    opened = opening.enter_context(own_store(stopped, store))
                except SpangradError:
                    if not user_of(stopped):
                        raise
                    continue  # a store that started meanwhile was first
                yield opened
                return
        if time.monotonic() > end:
            raise StoreError(
                f"no span store answers at {shown_url}: process {user} has {stopped} open, and answers elsewhere."
                " Set store.url to where it does, or stop that process."
            )
        if not waiting:
            print(f"waiting for process {user}, which has {stopped} open, to answer at {shown_url}", file=sys.stderr)
            waiting = True
        time.sleep(_POLL_SECONDS)
    yield store


@contextmanager
def answering_client(store: StoreSettings) -> Generator[tuple[Client, StoreSettings]]:
    """Yield a client of `answering_store`, and its settings; the driver's errors in the block become `StoreError`."""
    with answering_store(store) as answering, closing(connect(answering)) as client, store_errors(client):
        yield client, answering


@contextmanager
def own_store(path: Path, store: StoreSettings) -> Generator[StoreSettings]:
    """Run a private store on the data at `path` while the block runs: on free ports of the loopback interface, with a token of its own.

    The directory is created if it does not exist. Yield a copy of the settings with the private store's addresses and token.
    """
    from spangrad.processes import Child, free_ports, own_command, wait_until

    grpc, http, sql_port = free_ports(3)
    ports = ["--otlp-grpc-port", grpc, "--otlp-http-port", http, "--clickhouse-port", sql_port]
    token = secrets.token_urlsafe(24)  # other users of this machine reach its ports as well
    with TemporaryDirectory() as scratch:
        config = Path(scratch) / "spangrad.toml"
        config.write_text(f'[store]\ntoken = "{token}"\n')  # others cannot read a temporary directory
        command = own_command("store", "--config", str(config), "--path", str(path), *map(str, ports))
        child = Child("spangrad store", command, Path(scratch) / "store.log", inherit_settings=False)
        try:
            url = f"http://127.0.0.1:{sql_port}"
            wait_until(lambda: _listens(url), 60, f"the store on {path}", [child])
            addresses = {"url": url, "otlp_endpoint": f"http://127.0.0.1:{http}"}
            yield store.model_copy(update={**addresses, "token": SecretStr(token), "read_token": None})
        finally:
            child.stop()


def _listens(url: str) -> bool:
    """Return whether a server answers at the URL. An HTTP error counts as an answer: the command then shows that error."""
    return bool(status_of(f"{url}/ping"))
