"""Questions to a store that may have stopped.

In: where the store should be. Out: settings of one that answers, for the time of a question. Invariant: a store that runs is asked
itself; only when nobody listens on this machine is the data of a stopped one opened, and closed again.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from spangrad.errors import StoreError
from spangrad.processes import LOOPBACK
from spangrad.settings import StoreSettings


@contextmanager
def answering_store(store: StoreSettings) -> Generator[StoreSettings]:
    """The store that runs, or one opened on the data of a store that has stopped.

    Raises:
        StoreError: none runs, and there is no data of it; or somebody has the data open.
    """
    from collector.database import user_of

    if _listens(store.url):
        yield store
        return
    if urlsplit(store.url).hostname not in LOOPBACK:
        raise StoreError(f"no span store answers at {store.url}. Start it there, or set store.url to the one that you mean.")
    stopped = [path for path in (store.path, Path("runs/demo/store")) if path.is_dir()]
    if not stopped:
        raise StoreError(
            f"no span store answers at {store.url}, and {store.path} holds no data. Start one with `spangrad store`, or set store.url."
        )
    if user := user_of(stopped[0]):
        raise StoreError(
            f"no span store answers at {store.url}: process {user} has {stopped[0]} open, and answers elsewhere."
            " Set store.url to where it does."
        )
    print(f"no store answers at {store.url}: opening {stopped[0]} for this question", file=sys.stderr)
    with own_store(stopped[0], store) as opened:
        yield opened


@contextmanager
def own_store(path: Path, store: StoreSettings) -> Generator[StoreSettings]:
    """A store of one's own on the data at `path`, for the time of the block: on free ports, for this machine alone, without a token.

    Args:
        path: of the data; made where it is not there.
        store: settings that are kept as far as they do not say where.
    """
    from spangrad.processes import Child, free_ports, own_command, wait_until

    grpc, http, sql_port = free_ports(3)
    ports = ["--otlp-grpc-port", grpc, "--otlp-http-port", http, "--clickhouse-port", sql_port]
    with TemporaryDirectory() as scratch:
        config = Path(scratch) / "spangrad.toml"
        config.touch()  # the store's own settings, its token say, are for those who reach it over the network
        command = own_command("store", "--config", str(config), "--path", str(path), *map(str, ports))
        child = Child("spangrad store", command, Path(scratch) / "store.log", inherit_settings=False)
        try:
            url = f"http://127.0.0.1:{sql_port}"
            wait_until(lambda: _listens(url), 60, f"the store on {path}", [child])
            yield store.model_copy(update={"url": url, "otlp_endpoint": f"http://127.0.0.1:{http}", "token": None})
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
