"""Environments of agents as users have them: OpenTelemetry's own auto-instrumentation, and the same with our wheel installed beside it.

In: pins in benchmarks/peers/stock_agents.txt, and the checkout. Out: directories of programs. Invariant: the first knows nothing of us.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

from benchmarks.peers.environment import peer_environment

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = Path(__file__).resolve().parents[1] / "agents" / "clients"
THREADING = "opentelemetry-instrumentation-threading==0.66b1"
"""What the wheel needs and the stock environment lacks."""


def stock() -> Path:
    """`pip install opentelemetry-distro opentelemetry-exporter-otlp` and the instrumentors: its `bin`; made once, in half a minute."""
    return peer_environment("stock_agents")


def with_wheel(directory: Path) -> Path:
    """The stock environment after `pip install spangrad`: its `bin`, in a new directory."""
    venv.create(directory, with_pip=False)
    (site,) = directory.glob("lib/python*/site-packages")
    (stock_site,) = stock().parent.glob("lib/python*/site-packages")
    (site / "stock.pth").write_text(f"{stock_site}\n")
    (directory / "bin" / "opentelemetry-instrument").symlink_to(stock() / "opentelemetry-instrument")
    _pip("wheel", "--no-build-isolation", "--wheel-dir", str(directory), str(ROOT / "packaging" / "agent"))
    (made,) = directory.glob("spangrad-*.whl")
    _pip("--python", str(directory / "bin" / "python"), "install", str(made), THREADING)
    return directory / "bin"


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments, "--quiet", "--no-deps"], check=True)


def run(environment: Path, program: Path, arguments: list[str], variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """`opentelemetry-instrument python PROGRAM ARGUMENTS` with these variables, and nothing else that could matter, set."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    command = [str(environment / "opentelemetry-instrument"), str(environment / "python"), str(program), *arguments]
    return subprocess.run(command, env={**kept, **variables}, capture_output=True, text=True, timeout=120, check=False)
