"""`spangrad sql`."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from commands.options import ConfigFile, Overrides, resolve
from spangrad.errors import StoreError
from spangrad.settings import StoreSettings


def sql(statement: str, /, *, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Ask the span store a question in SQL, and print the answer as a table.

    Asks the store at store.url. When nobody answers there, the data of a store that has stopped (store.path, else the last
    demo's) is opened for the time of the question.

    Args:
        statement: one SELECT, SHOW or DESCRIBE; tables live in the database `otel`.
    """
    from rich.console import Console
    from rich.table import Table

    from spangrad.clickhouse import connect, store_errors

    with _running_store(resolve(config, set_).store) as store:
        client = connect(store)
        with store_errors(store.url):
            answer = client.query(statement)
        client.close()
    table = Table(*(str(name) for name in answer.column_names), box=None, pad_edge=False)
    for row in answer.result_rows:
        table.add_row(*(str(value) for value in row))
    Console(width=None if sys.stdout.isatty() else 10_000).print(table)


@contextmanager
def _running_store(store: StoreSettings) -> Generator[StoreSettings]:
    """The store that runs, or one opened on the data of a store that has stopped.

    Raises:
        StoreError: none runs, and there is no data.
    """
    from spangrad.processes import Child, free_ports, own_command, wait_until

    stopped = [path for path in (store.path, Path("runs/demo/store")) if path.is_dir()]
    if _listens(store.url):
        yield store
        return
    if not stopped:
        raise StoreError(
            f"no span store answers at {store.url}, and {store.path} holds no data. Start one with `spangrad store`, or set store.url."
        )
    print(f"no store answers at {store.url}: opening {stopped[0]} for this question", file=sys.stderr)
    grpc, http, sql_port = free_ports(3)
    ports = ["--otlp-grpc-port", grpc, "--otlp-http-port", http, "--clickhouse-port", sql_port]
    with TemporaryDirectory() as scratch:
        config = Path(scratch) / "spangrad.toml"
        config.touch()  # the store's own settings, its token say, are for those who reach it over the network
        command = own_command("store", "--config", str(config), "--path", str(stopped[0]), *map(str, ports))
        child = Child("spangrad store", command, Path(scratch) / "store.log", inherit_settings=False)
        try:
            url = f"http://127.0.0.1:{sql_port}"
            wait_until(lambda: _listens(url), 60, f"the store on {stopped[0]}", [child])
            yield store.model_copy(update={"url": url, "token": None})
        finally:
            child.stop()


def _listens(url: str) -> bool:
    """Whether anybody is there, one who refuses included: then the refusal is the answer to show."""
    try:
        urllib.request.urlopen(f"{url}/ping", timeout=2).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
