"""The OpenTelemetry Collector in front of a ClickHouse server: located, checked, and run in place of this process.

In: the settings. Out: a running Collector with otel-config.yaml. Invariant: it starts only before a store whose tables are those of
this installation; after that, signals and exit code are the Collector's own: this process was replaced by it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn
from urllib.parse import unquote, urlsplit

from pydantic import SecretStr

from collector.schema.cluster import Layout
from collector.schema.migrations import pending
from spangrad.errors import SpangradError, StoreError
from spangrad.http.service import in_url, without_userinfo
from spangrad.http.tokens import agent_token
from spangrad.processes import LOOPBACK, require_free_port, require_safe_bind
from spangrad.settings import CollectorSettings, Settings, StoreSettings
from spangrad.store.clickhouse import executing

VARIABLE = "SPANGRAD_OTELCOL"
NAMES = ("otelcol-spangrad", "otelcol-contrib", "otelcol")
"""Names of the Collector's program; the first that is in PATH is used."""
DISTRIBUTION = Path(__file__).parent / "distribution"
CONFIG = DISTRIBUTION / "otel-config.yaml"
"""Configuration of the Collector: a link to the file at the checkout's root; a copy of it in a wheel."""
GO_GC_PERCENT = 200
"""GOGC, percent of live memory that garbage may reach: a quarter less CPU than at Go's own 100, for about 120 MB more."""
GO_MEMORY_LIMIT = "768MiB"
"""GOMEMLIMIT: three quarters of the memory limit of otel-config.yaml, beyond which senders are asked to retry later."""
SIGNALS = ("traces", "logs")
"""Signals that the Collector receives; each has a queue of its own."""
_CHECK_SECONDS = 60


def run(settings: Settings) -> NoReturn:
    """Check everything that can be checked, then replace this process by the Collector.

    Raises:
        SpangradError: there is no usable binary, a port is in use, the address needs a token, or the configuration is refused.
        StoreError: the store does not answer, or its tables are not those of this installation.
    """
    binary = find_binary(os.environ)
    collector = settings.collector
    require_safe_bind(collector.host, _token(settings), "collector")
    for host, port, name in (
        (collector.host, collector.otlp_grpc_port, "otlp_grpc_port"),
        (collector.host, collector.otlp_http_port, "otlp_http_port"),
        ("127.0.0.1", collector.health_port, "health_port"),
    ):
        require_free_port(host, port, f"collector.{name}")
    require_room(collector)
    require_schema(settings.store)
    configs = [f"--config={file}" for file in config_files(settings)]
    variables = environment(settings, os.environ)
    _require_accepted(binary, configs, variables)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(binary, [binary, *configs], variables)


def find_binary(environ: Mapping[str, str]) -> str:
    """Return the path of the Collector's program: that in SPANGRAD_OTELCOL, else the first of NAMES in PATH.

    Raises:
        SpangradError: there is none, or the variable names no program.
    """
    named = environ.get(VARIABLE)
    if not named:
        for name in NAMES:
            if program := shutil.which(name, path=environ.get("PATH")):
                return program
        raise SpangradError(
            f"no OpenTelemetry Collector: none of {', '.join(NAMES)} is in PATH. Build it with `make otelcol` (Go), install"
            f" otelcol-contrib, or set {VARIABLE} to the program."
        )
    if not Path(named).is_file():
        raise SpangradError(f"{VARIABLE} = {named!r} is no file. Set it to the OpenTelemetry Collector's program, or unset it.")
    if not os.access(named, os.X_OK):
        raise SpangradError(f"{VARIABLE} = {named!r} may not be executed. Make it executable: chmod +x {named}")
    return named


def require_room(collector: CollectorSettings) -> None:
    """Raise unless the queue fits on its disk: on a full disk, the Collector loses requests that it has acknowledged.

    Raises:
        SpangradError: it does not fit.
    """
    queue = collector.queue_path.absolute()
    held = sum(file.stat().st_size for file in queue.glob("*") if file.is_file())
    disk = next(path for path in (queue, *queue.parents) if path.exists())
    room, needed = shutil.disk_usage(disk).free + held, len(SIGNALS) * collector.queue_bytes
    if room < needed:
        raise SpangradError(
            f"collector.queue_path = {str(collector.queue_path)!r} has room for {room // 2**20} MiB, and the queues of"
            f" {' and '.join(SIGNALS)} may take {needed // 2**20}. Set collector.queue_bytes to {room // len(SIGNALS)} or less,"
            " or the path to a larger disk."
        )


def require_schema(store: StoreSettings) -> None:
    """Raise unless the store answers and has the tables of this installation.

    Raises:
        StoreError: it does not answer, or lacks some.
    """
    with executing(store) as execute:
        lacking = pending(execute, Layout.of(store), incomplete=False)
    if lacking:
        names = ", ".join(migration.name for migration in lacking)
        raise StoreError(
            f"the span store at {without_userinfo(store.url)} lacks {names}. Apply what is missing: `spangrad schema migrate`."
        )


def config_files(settings: Settings) -> list[Path]:
    """Return otel-config.yaml and the files that are merged over it; later ones take precedence.

    Raises:
        SpangradError: only one of certificate and key is set, or one of the files does not exist.
    """
    collector = settings.collector
    files = [CONFIG]
    if _token(settings):
        files.append(DISTRIBUTION / "token.yaml")
    if bool(collector.tls_certificate) != bool(collector.tls_key):
        raise SpangradError("collector.tls_certificate and collector.tls_key need each other: set both, or neither.")
    for name, file in (("tls_certificate", collector.tls_certificate), ("tls_key", collector.tls_key)):
        if file and not file.is_file():
            raise SpangradError(f"collector.{name} = {str(file)!r} is no file. Give the path of a PEM file.")
    if collector.tls_certificate:
        files.append(DISTRIBUTION / "tls.yaml")
    return [*files, *collector.configs]


def environment(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the Collector's environment: `environ`, and every variable that otel-config.yaml reads.

    GOGC, GOMEMLIMIT and CLICKHOUSE_COMPRESS are no settings of ours: their values in `environ` take precedence.
    """
    collector, store = settings.collector, settings.store
    parts = urlsplit(store.url)
    port = parts.port or (8443 if parts.scheme == "https" else 8123)
    values: dict[str, object] = {
        **{_variable(name): value for name, value in collector if name != "configs" and value is not None},
        _variable("host"): in_url(collector.host),
        "SPANGRAD_STORE__URL": f"{parts.scheme}://{in_url(parts.hostname or '')}:{port}",
        "CLICKHOUSE_USER": unquote(parts.username or "default"),
        "CLICKHOUSE_PASSWORD": unquote(parts.password) if parts.password else store.token or "",
    }
    if token := _token(settings):
        values |= {_variable("token"): token, "COLLECTOR_AGENT_TOKEN": agent_token(token.get_secret_value())}
    defaults = {
        "GOGC": str(GO_GC_PERCENT),
        "GOMEMLIMIT": GO_MEMORY_LIMIT,
        # Bytes that leave the machine are worth the CPU.
        "CLICKHOUSE_COMPRESS": "none" if parts.hostname in LOOPBACK else "lz4",
    }
    return {**defaults, **environ, **{name: _text(value) for name, value in values.items()}}


def _require_accepted(binary: str, configs: list[str], variables: Mapping[str, str]) -> None:
    """Have the program itself check the configuration; raise if it refuses it."""
    try:
        checked = subprocess.run(
            [binary, "validate", *configs], env=dict(variables), capture_output=True, text=True, timeout=_CHECK_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no answer within {_CHECK_SECONDS} s"
        raise SpangradError(f"{binary} does not run ({reason}). Set {VARIABLE} to an OpenTelemetry Collector for this machine.") from None
    if checked.returncode:
        reason = " ".join(checked.stderr.split())[:1000]
        raise SpangradError(f"{binary} refuses {' '.join(configs)} ({reason}). Fix what it names, or set {VARIABLE} to otelcol-contrib.")


def _token(settings: Settings) -> SecretStr | None:
    return settings.collector.token or settings.store.token


def _variable(name: str) -> str:
    return f"SPANGRAD_COLLECTOR__{name.upper()}"


def _text(value: object) -> str:
    text = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
    # The Collector expands dollars in what it reads from the environment, too.
    return text.replace("$", "$$")
