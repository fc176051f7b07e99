"""Real services of benchmarks: vLLM as `spangrad engine` runs it, and others by their commands.

In: settings by dotted key. Out: processes that end with an exit stack. Invariant: no setting comes from the environment.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from spangrad.processes import Child, answers, free_ports, own_command, wait_until

ROOT = Path(__file__).parents[1]


def start_service(service: str, settings: Mapping[str, object], log: Path, stack: ExitStack) -> Child:
    """Start the process of a service."""
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    child = Child(service, own_command(service, *words), log, inherit_settings=False)
    stack.callback(child.stop)
    return child


def start_engine(model: Path, cache: Path, log: Path, stack: ExitStack, **changes: object) -> tuple[Child, str]:
    """Start a small vLLM and return its process and its URL, before it answers; `changes` are of section engine."""
    (port,) = free_ports(1)
    engine = {
        "python": ROOT / ".venv-vllm/bin/python",
        "model": model,
        "port": port,
        "enforce_eager": True,
        "cache_dir": cache,
        **changes,
    }
    child = start_service("engine", {f"engine.{name}": value for name, value in engine.items()}, log, stack)
    return child, f"http://127.0.0.1:{port}"


def wait_for_engines(urls: Sequence[str], children: Sequence[Child]) -> None:
    """Wait until engines have answered their first requests."""
    for url in urls:
        wait_until(
            lambda url=url: answers(f"{url}/health") and json.loads(get(f"{url}/spangrad/info"))["warm"],
            500,
            "vLLM",
            children,
            poll_seconds=0.2,
        )


def get(url: str) -> str:
    """Return the text of an answer."""
    with urllib.request.urlopen(url, timeout=60) as response:
        return response.read().decode()
