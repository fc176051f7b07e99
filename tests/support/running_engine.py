"""A real vLLM and a real gateway, each in a process of its own, for tests.

In: `Settings`. Out: processes that are ready. Invariant: neither outlives the test run.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gateway.engine import command, environment
from spangrad.processes import Child, answers, free_ports, wait_until
from spangrad.settings import Settings, StoreSettings
from spangrad.settings.sources import load_settings

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


def engine_settings(model: Path, cache: Path, **changes: object) -> Settings:
    """Settings of a small vLLM on a free port, where a gateway finds it; `changes` are of section engine."""
    (port,) = free_ports(1)
    flags = {
        "engine.python": str(VLLM_PYTHON),
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
    return Child(module, [sys.executable, "-c", _SERVE, module, json.dumps(values)], log, {"PYTHONPATH": str(ROOT)})


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
