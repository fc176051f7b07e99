"""Processes of tests: ended at a chosen boundary, forked with all imported, under a moved clock, measured, in other environments."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import IO, Any

import pytest

from benchmarks.peers.environment import peer_environment
from spangrad.processes import Child, wait_until
from tests.support import fork_server

# Crashes a child process at a chosen boundary, as a power cut would: no handler, no rollback code runs.

CRASHED = 42


def crashes(action: Callable[[int], object], functions: Mapping[str, set[str]]) -> Iterator[int]:
    """Run `action` in a forked child that dies at its first boundary, then at its second, until a child lives; yield after each death.

    A boundary is a line, or the return, of one of the `functions`, by source file, in whichever thread. `action` is given its number, and
    opens its own files and connections.
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
            if left <= 0:
                os._exit(CRASHED)
            left -= 1
        return local

    def watched(frame: FrameType, *_: Any) -> Any:
        return local if frame.f_code.co_name in functions.get(frame.f_code.co_filename, ()) else None

    threading.settrace(watched)
    sys.settrace(watched)


# Processes of ours that are forked from one that has imported what they import; but for that, they are as others are: children of the
# tests' process, in groups of their own, with their own outputs, environment and working directory.

IMPORTED = {
    "services": ("collector.server", "gateway.server", "runner.runner", "runner.workers.worker", "runner.queue.server", "spangrad.cli"),
    "trainer": (
        "verl.trainer.config",
        "verl.trainer.ppo.core_algos",
        "verl.workers.config",
        "verl.workers.engine_workers",
        "verl.workers.utils.losses",
        "trainer.run",
        "trainer.optim.optimizer",
        "spangrad.cli",
    ),
}
"""Modules that a server imports, by its kind: those that start no threads but such as end before a fork, as OpenBLAS's do."""
OF_VERL = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "trainer.optim.cpu_platform",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}
"""Variables that verl reads as it is imported; a trainer that is not forked sets them itself."""
_PR_SET_CHILD_SUBREAPER = 36
_adoption = threading.Lock()


class Forked(subprocess.Popen[bytes]):
    """A process that the fork server has started for us: our child."""

    def __init__(self, args: Sequence[str], pid: int) -> None:
        self.args, self.pid = list(args), pid
        self.returncode = None
        self.stdin = self.stdout = self.stderr = None
        self._waitpid_lock = threading.Lock()
        self._child_created = True


@cache
def _fork_server(kind: str) -> Path:
    """The socket of a server that forks; it starts with the first call, and ends with us."""
    directory = Path(tempfile.mkdtemp(prefix="spangrad-forks-"))
    address = directory / "socket"
    command = [sys.executable, "-P", fork_server.__file__, str(address), *IMPORTED[kind]]
    variables = OF_VERL if kind == "trainer" else {}
    server = Child(f"the fork server of {kind}", command, directory / "log", variables, inherit_settings=False)
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    atexit.register(server.stop)
    wait_until(address.exists, 180, server.name, [server], poll_seconds=0.01)
    return address


def forked(
    arguments: Sequence[str],
    stdout: IO[Any] | int,
    stderr: IO[Any] | int,
    environment: Mapping[str, str],
    directory: Path | None = None,
    kind: str = "services",
) -> Forked:
    """Start a program (`-m MODULE` or `-c CODE`, and its arguments) as a child of ours, without input."""
    address = str(_fork_server(kind))
    order = json.dumps([list(arguments), dict(environment), str(directory or Path.cwd()), os.getpid()]).encode()
    fds = [stream if isinstance(stream, int) else stream.fileno() for stream in (stdout, stderr)]
    libc = ctypes.CDLL(None)
    with _adoption, socket.socket(socket.AF_UNIX) as server, Path(os.devnull).open("rb") as empty:
        server.connect(address)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(server, [len(order).to_bytes(8, "big")], [empty.fileno(), *fds])
            server.sendall(order)
            pid = int.from_bytes(server.recv(4), "big")
            server.recv(1)  # the process between has ended
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    return Forked(arguments, pid)


class ForkedChild(Child):
    """A `Child` whose process is forked, unless its environment names a library that only a new program loads."""

    def __init__(
        self, name: str, arguments: Sequence[str], log: Path, env: Mapping[str, str] | None = None, *, inherit_settings: bool = True
    ) -> None:
        """Start `arguments` (`forked`); the others as those of `Child`."""
        if env and "LD_PRELOAD" in env:
            super().__init__(name, [sys.executable, *arguments], log, env, inherit_settings=inherit_settings)
            return
        inherited = {key: value for key, value in os.environ.items() if inherit_settings or not key.startswith("SPANGRAD_")}
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            self.process = forked(arguments, out, out, {**inherited, **(env or {})})


def run_spangrad(
    *arguments: str, directory: Path | None = None, env: Mapping[str, str] | None = None, kind: str = "services", timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run a command of `spangrad` to its end, in a fork; `env` is the whole environment, ours by default."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = forked(["-m", "spangrad", *arguments], out, err, os.environ if env is None else env, directory, kind)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read(), err.read())


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
