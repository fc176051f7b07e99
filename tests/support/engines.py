"""A real vLLM and a real gateway, each in a process of its own, and a server before an engine that makes calls fail or take long."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from gateway.engine import command, environment
from spangrad.processes import Child, answers, free_ports, wait_until
from spangrad.settings import Settings, StoreSettings
from spangrad.settings.sources import load_settings
from tests.support import fork_server
from tests.support.processes import ForkedChild

# A real vLLM and a real gateway, each in a process of its own, for tests.

ROOT = Path(__file__).resolve().parents[2]
VLLM_PYTHON = ROOT / ".venv-vllm/bin/python"
KV_CACHE_BYTES = 64 * 2**20

_SERVE = """
import importlib, json, logging, sys
from spangrad.errors import SpangradError
from spangrad.settings import Settings
logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
try:
    importlib.import_module(sys.argv[1]).serve(Settings.model_validate(json.loads(sys.argv[2])))
except SpangradError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


@cache
def forking_python() -> Path:
    """Return an interpreter of vLLM whose servers are forked from a process that has imported vLLM; it starts with the first call.

    The demo's tests start vLLM as users do.
    """
    directory = Path(tempfile.mkdtemp(prefix="spangrad-vllm-"))
    wrapper, address = directory / "python", directory / "socket"
    settings = load_settings({"engine.python": str(VLLM_PYTHON), "engine.cache_dir": str(directory / "cache")}, env={})
    command = [str(VLLM_PYTHON), "-P", fork_server.__file__, str(address)]
    child = Child("vLLM's fork server", command, directory / "log", environment(settings, directory), inherit_settings=False)
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    atexit.register(child.stop)
    wait_until(address.exists, 180, child.name, [child])
    fork_server.write_wrapper(wrapper, VLLM_PYTHON, address)
    return wrapper


def engine_settings(model: Path, cache: Path, **changes: object) -> Settings:
    """Settings of a small vLLM on a free port, where a gateway finds it; `changes` are of section engine."""
    (port,) = free_ports(1)
    flags = {
        "engine.python": str(forking_python()),
        "engine.model": str(model),
        "engine.port": port,
        "engine.dtype": "float32",
        "engine.max_model_len": 128,
        "engine.enforce_eager": True,
        "engine.kv_cache_bytes": KV_CACHE_BYTES,
        "engine.cache_dir": str(cache),
        "gateway.engine_url": f"http://127.0.0.1:{port}",
        **{f"engine.{name}": value for name, value in changes.items()},
    }
    return load_settings(flags, env={})


def gateway_settings(engine: Settings, store: StoreSettings, **changes: object) -> Settings:
    """Settings of a gateway on a free port between an engine and a store; `changes` are of section gateway."""
    (port,) = free_ports(1)
    spill = engine.engine.cache_dir.parent / f"spill-{port}"
    where = {"port": port, "url": f"http://127.0.0.1:{port}", "spill_path": spill}
    return engine.model_copy(update={"store": store, "gateway": engine.gateway.model_copy(update={**where, **changes})})


def start(module: str, settings: Settings, log: Path) -> Child:
    """Start `module.serve(settings)`; it may not be ready yet."""
    values = settings.model_dump(mode="json")
    # Secrets hide themselves in a dump.
    for section, token in (("store", settings.store.token), ("gateway", settings.gateway.token)):
        values[section]["token"] = token.get_secret_value() if token else None
    return ForkedChild(module, ["-c", _SERVE, module, json.dumps(values)], log, {"PYTHONPATH": str(ROOT)})


@contextmanager
def running_engine(settings: Settings, log: Path) -> Generator[Child]:
    """A vLLM that is warmed up, stopped at the end."""
    child = start("gateway.engine", settings, log)
    try:
        url = f"{settings.gateway.engine_url}/spangrad/info"
        wait_until(lambda: fetch(url).get("warm", False), 180, "vLLM", [child], poll_seconds=0.2)
        yield child
    finally:
        child.stop()


@contextmanager
def running_bare_vllm(settings: Settings, log: Path) -> Generator[Child]:
    """A vLLM as `running_engine` starts it, but without our plugin: what it answers is what agents shall get."""
    model = Path(str(settings.engine.model))
    words = command(settings, model)
    for option in ("--middleware", "--worker-extension-cls"):
        at = words.index(option)
        del words[at : at + 2]
    child = Child("a bare vLLM", words, log, environment(settings, model))
    try:
        wait_until(lambda: answers(f"{settings.gateway.engine_url}/health"), 180, "a bare vLLM", [child], poll_seconds=0.2)
        yield child
    finally:
        child.stop()


@contextmanager
def running_gateway(settings: Settings, log: Path) -> Generator[Child]:
    """A gateway that has admitted its engine, stopped at the end."""
    child = start("gateway.server", settings, log)
    try:
        url = f"{settings.gateway.url}/readyz"
        wait_until(lambda: fetch(url).get("status") == "serving", 30, "the gateway", [child], poll_seconds=0.05)
        yield child
    finally:
        child.stop()


def fetch(url: str, body: object | None = None) -> dict[str, Any]:
    """JSON of an answer, an error's too; empty while nobody answers."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=60) as answer:
            text = answer.read()
    except urllib.error.HTTPError as error:
        text = error.read()
    except OSError:
        return {}
    try:
        return json.loads(text)
    except ValueError:
        return {"text": text.decode(errors="replace")}


# A server before an engine that makes happen what agents meet in real life: a call that must be tried again, a stream that takes its time.

LINE_SECONDS = 0.02


class EngineFront:
    """A context manager; serves on a free port of loopback in threads of its own."""

    def __init__(self, engine: str, *, again: str, slow: str) -> None:
        """Stand before the engine at a URL."""
        front = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                if again.encode() in body and not front.refused:
                    front.refused = True
                    self._say(503, {"content-type": "application/json"}, b'{"error": {"message": "come again"}}')
                elif slow.encode() in body:
                    self._dawdle(body)
                else:
                    self._say(307, {"location": engine + self.path}, b"")

            def _say(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response(status)
                for name, value in {**headers, "content-length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def _dawdle(self, body: bytes) -> None:
                self.close_connection = True
                request = urllib.request.Request(engine + self.path, body, {"content-type": "application/json"})
                with urllib.request.urlopen(request, timeout=60) as answer:
                    self.send_response(answer.status)
                    self.send_header("content-type", answer.headers["content-type"])
                    self.send_header("connection", "close")
                    self.end_headers()
                    try:
                        for line in answer:
                            self.wfile.write(line)
                            self.wfile.flush()
                            time.sleep(LINE_SECONDS)
                    except OSError:
                        pass  # the reader has left, which is what this is for

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.refused = False
        """Whether somebody was told to come again; set to False to do so once more."""

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
