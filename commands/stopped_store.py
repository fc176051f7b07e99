"""Queries to a store that may have stopped.

In: the address of the store. Out: settings of a store that answers, for the time of one query. Invariant: a running store is queried
directly; only when nothing listens on this machine is the data of a stopped store opened, for this command alone, and closed again
afterwards.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pydantic import SecretStr

from spangrad.errors import StoreError
from spangrad.http.json_http import status_of
from spangrad.http.service import without_userinfo
from spangrad.processes import LOOPBACK
from spangrad.settings import StoreSettings
from spangrad.store.clickhouse import connect, store_errors

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client


@contextmanager
def answering_store(store: StoreSettings) -> Generator[StoreSettings]:
    """Yield the settings of the running store, or of one that is opened on the data of a stopped store.

    Raises:
        StoreError: no store runs and there is no data to open, or another process has the data open.
    """
    from collector.database import user_of

    if _listens(store.url):
        yield store
        return
    shown_url = without_userinfo(store.url)
    if urlsplit(store.url).hostname not in LOOPBACK:
        raise StoreError(f"no span store answers at {shown_url}. Start it there, or set store.url to the one that you mean.")
    stopped = [path for path in (store.path, Path("runs/demo/store")) if path.is_dir()]
    if not stopped:
        raise StoreError(
            f"no span store answers at {shown_url}, and {store.path} holds no data. Start one with `spangrad store`, or set store.url."
        )
    if user := user_of(stopped[0]):
        raise StoreError(
            f"no span store answers at {shown_url}: process {user} has {stopped[0]} open, and answers elsewhere."
            " Set store.url to where it does."
        )
    print(f"no store answers at {shown_url}: opening {stopped[0]} until this command ends", file=sys.stderr)
    with own_store(stopped[0], store) as opened:
        yield opened


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
