"""Processes that tests end: at a chosen boundary, by signals, under a moved clock, forked with all imported, in other environments."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import struct
import subprocess
import sys
import traceback
import venv
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from benchmarks.peers.environment import peer_environment
from spangrad.settings import Settings

# Crashes a child process at a chosen boundary, as a power cut would: no handler, no rollback code runs.

CRASHED = 42


def crashes(action: Callable[[int], object], functions: Mapping[str, set[str]]) -> Iterator[int]:
    """Run `action` in a forked child that dies at its first boundary, then at its second, until a child lives; yield after each death.

    A boundary is a line, or the return, of one of the `functions`, by source file. `action` is given its number, and opens its own
    files and connections.
    """
    boundary = 0
    while _run(action, boundary, functions) == CRASHED:
        yield boundary
        boundary += 1


def survives(action: Callable[[int], object], boundary: int) -> None:
    """Run `action` in a forked child that nothing kills, and fail when it fails."""
    assert _run(action, boundary, {}) == 0


def _run(action: Callable[[int], object], boundary: int, functions: Mapping[str, set[str]]) -> int:
    child = os.fork()
    if not child:
        code = 1
        try:
            _trace(functions, boundary)
            action(boundary)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.settrace(None)
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in {0, CRASHED}, f"the child failed by itself at boundary {boundary}"
    return code


def _trace(functions: Mapping[str, set[str]], boundary: int) -> None:
    left = boundary

    def local(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if event in {"line", "return"}:
            if left == 0:
                os._exit(CRASHED)
            left -= 1
        return local

    def watched(frame: FrameType, *_: Any) -> Any:
        return local if frame.f_code.co_name in functions.get(frame.f_code.co_filename, ()) else None

    sys.settrace(watched)


# Trains in children forked from a process that has imported everything, so that a start costs a second instead of ten.

LOADED = "is loaded on"
"""In the log once the weights are loaded."""


@dataclass
class Nursery:
    """The process that forks, as the test sees it."""

    process: subprocess.Popen[str]
    log: Path

    def start(self, settings: Settings) -> int:
        """Begin to train; the child's process id."""
        values = {"trainer": settings.trainer.model_dump(mode="json"), "store": settings.store.model_dump(mode="json")}
        assert self.process.stdin
        self.process.stdin.write(json.dumps(values) + "\n")
        self.process.stdin.flush()
        return self._number()

    def wait(self) -> int:
        """The child's exit code; negative: the signal that ended it."""
        return self._number()

    def _number(self) -> int:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        return int(line)


@contextmanager
def nursery(log: Path) -> Generator[Nursery]:
    """A process that forks trainers until the block ends."""
    root = Path(__file__).parents[2]
    # verl reads these as it is imported; the trainer would set them later.
    of_verl = {
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "trainer.optim.cpu_platform",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.processes"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, text=True, cwd=root,
            env={**os.environ, "PYTHONPATH": str(root), "SPANGRAD_CONFIG": "", **of_verl},
        )  # fmt: skip
    try:
        yield Nursery(process, log)
    finally:
        process.kill()
        process.wait()


def _serve(train: Callable[[Settings], None]) -> None:
    for line in sys.stdin:
        child = os.fork()
        if not child:
            code = 1
            try:
                train(Settings.model_validate(json.loads(line)))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


# A time of day that tests can move, for real: for a process and whatever runs in it (Python, SQLite), as if somebody had set the clock.

_SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static long long offset(void) {
    static volatile long long *place;
    if (!place) {
        int file = open(getenv("MOVED_CLOCK"), O_RDONLY);
        place = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
    }
    return *place;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset();
    return failed;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *place) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (place) *place = precise.tv_sec;
    return precise.tv_sec;
}
"""


class MovedClock:
    """A clock for processes that are started with `environment`."""

    def __init__(self, directory: Path) -> None:
        """Make it; the test is skipped where there is no C compiler."""
        compiler = shutil.which("cc") or shutil.which("gcc")
        if not compiler:
            pytest.skip("a C compiler is not here: install gcc")
        source, library, self._file = directory / "clock.c", directory / "clock.so", directory / "clock"
        source.write_text(_SOURCE)
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
        self.move(0)
        self.environment = {"LD_PRELOAD": str(library), "MOVED_CLOCK": str(self._file)}

    def move(self, seconds: int) -> None:
        """Set it to so many seconds from the real time, at once for all processes."""
        if not self._file.exists():
            self._file.write_bytes(bytes(8))
        with self._file.open("r+b") as file:
            file.write(struct.pack("q", seconds))


# Children that end by SIGINT whoever started the tests: a shell without job control has its background ignore it, for all descendants.


def heed_interrupts() -> None:
    """Take SIGINT as a program in the foreground does; give it to Popen as `preexec_fn`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


# What a process holds, as Linux counts it: memory at its height, open files.


def forget_height(pid: int) -> None:
    """Count the height of memory from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def height_mib(pid: int) -> int:
    """The most memory that was resident, in MiB."""
    return _status(pid, "VmHWM")


def resident_mib(pid: int) -> int:
    """The memory that is resident, in MiB."""
    return _status(pid, "VmRSS")


def open_files(pid: int) -> int:
    """How many descriptors are open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _status(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) // 1024


# Environments of agents as users have them: OpenTelemetry's own auto-instrumentation, and the same with our wheel installed beside it.

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


if __name__ == "__main__":
    import verl.trainer.config
    import verl.trainer.ppo.core_algos
    import verl.workers.config
    import verl.workers.engine_workers
    import verl.workers.utils.losses  # noqa: F401

    from trainer.optim import optimizer  # noqa: F401
    from trainer.run import train

    logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s", force=True)  # verl has its own
    _serve(lambda settings: train(settings, follow=False))
