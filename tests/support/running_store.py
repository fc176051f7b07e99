"""A real store in a process of its own, for tests: settings on free ports, started, ready, stopped.

In: a directory. Out: `StoreSettings` of a store that answers. Invariant: the process never outlives the test run.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from spangrad.processes import Child, free_ports, wait_until
from spangrad.settings import StoreSettings

_SERVE = """
import json, logging, sys
from collector.server import serve
from spangrad.errors import SpangradError
from spangrad.settings import StoreSettings
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


def start_store(settings: StoreSettings, log: Path) -> Child:
    """Start a store; it may not be ready yet."""
    values = settings.model_dump(mode="json")
    # Secrets hide themselves in a dump.
    for name in ("token", "read_token"):
        secret = getattr(settings, name)
        values[name] = secret.get_secret_value() if secret else None
    return Child("store", [sys.executable, "-c", _SERVE, json.dumps(values)], log)


@contextmanager
def running_store(settings: StoreSettings, log: Path) -> Generator[Child]:
    """A store that answers, stopped at the end."""
    child = start_store(settings, log)
    try:
        wait_until(lambda: answers(settings), 60, "the store", [child], poll_seconds=0.05)
        yield child
    finally:
        child.stop(grace_seconds=5)


def answers(settings: StoreSettings) -> bool:
    """Whether ClickHouse's interface answers at all; it is the last to be opened."""
    try:
        urllib.request.urlopen(f"{settings.url}/ping", timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
