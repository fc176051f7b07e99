"""Processes of tests: ended at a chosen boundary, forked with all imported, measured; vLLM and gateways, started and ready."""

from __future__ import annotations

import atexit
import ctypes
import gc
import hashlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import IO, Any

from gateway.engine import command, environment
from spangrad.processes import Child, answers, free_ports, wait_until
from spangrad.settings import Settings, StoreSettings
from spangrad.settings.sources import load_settings
from tests.programs import fork_server

# Children that die at a boundary, as by a power cut: no handler, no rollback code runs.

Boundaries = Mapping[str, set[str]]
"""Source file -> names of functions: each of their lines and returns is a boundary, in whichever thread."""


def crashes(action: Callable[[int], object], functions: Boundaries) -> Iterator[int]:
    """Run `action` in a forked child that dies at its first boundary, then at its second, until a child lives; yield after each death.

    `action` is given the boundary's number, and opens its own files and connections.
    """
    for boundary in itertools.count():
        child = _forked(partial(action, boundary), functions, first=boundary)
        if not _stands_still(child):
            return
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        yield boundary


def left_by_crashes(action: Callable[[], object], functions: Boundaries, directory: Path) -> Iterator[int]:
    """Run `action` once; then yield the number of each boundary, with `directory` as a death of the process there leaves it.

    At each boundary the directory is copied while all threads stand still; deaths that leave it equal byte by byte count once. What is
    yielded was left by a process that has ended by then.
    """
    child = _forked(action, functions)
    copies = dict[bytes, tuple[int, Path]]()
    for boundary in itertools.count():
        if not _stands_still(child):
            break
        content = hashlib.sha256()
        for path in sorted(directory.rglob("*")):
            content.update(f"\0{path}\0".encode() + (path.read_bytes() if path.is_file() else b""))
        if content.digest() not in copies:
            copies[content.digest()] = boundary, directory.with_name(f"{directory.name}-{boundary}")
            shutil.copytree(directory, copies[content.digest()][1])
        os.kill(child, signal.SIGCONT)
    for boundary, copy in copies.values():
        shutil.rmtree(directory)
        copy.rename(directory)
        yield boundary


def survives(action: Callable[[], object]) -> None:
    """Run `action` in a forked child that nothing kills, and fail when it fails."""
    assert not _stands_still(_forked(action, {}))


def _forked(action: Callable[[], object], functions: Boundaries, first: int = 0) -> int:
    """Run `action` in a forked child that stands still at each boundary from its `first` one on; return the child's id."""
    child = os.fork()
    if not child:
        code = 1
        try:
            _stop_at(functions, first)
            action()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.settrace(None)
            os._exit(code)
    return child


def _stands_still(child: int) -> bool:
    """Wait until a child stands still, all its threads, or has ended well."""
    status = os.waitpid(child, os.WUNTRACED)[1]
    assert os.WIFSTOPPED(status) or status == 0, "the child failed by itself"
    return os.WIFSTOPPED(status)


def _stop_at(functions: Boundaries, first: int) -> None:
    numbers = itertools.count()

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event in {"line", "return"} and next(numbers) >= first:
            os.kill(os.getpid(), signal.SIGSTOP)
        return local

    def watched(frame: FrameType, *_: Any) -> Any:
        return local if frame.f_code.co_name in functions.get(frame.f_code.co_filename, ()) else None

    threading.settrace(watched)
    sys.settrace(watched)


# Processes of ours that are forked from one that has imported what they import; but for that, they are as others are: children of the
# tests' process, in groups of their own, with their own outputs, environment and working directory.

IMPORTED = {
    "services": (
        "collector.server",
        "gateway.server",
        "runner.runner",
        "runner.workers.worker",
        "runner.queue.server",
        "clickhouse_connect",
        "commands.console",
        "cyclopts.help",
        "docstring_parser",
        "rich.markdown",
        "spangrad.cli",
    ),
    "trainer": (
        "verl.trainer.config",
        "verl.trainer.ppo.core_algos",
        "verl.workers.config",
        "verl.workers.engine_workers",
        "verl.workers.utils.losses",
        "trainer.run",
        "trainer.optim.optimizer",
        "trainer.optim.verl_worker",
        "transformers.models.llama.modeling_llama",
        "clickhouse_connect",
        "commands.training.train",
        "spangrad.cli",
    ),
}
"""Modules that a server imports, by its kind: those that start no threads but such as end before a fork, as OpenBLAS's do."""
OF_VERL = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "trainer.optim.cpu_platform",
    "VERL_LOGGING_LEVEL": "ERROR",
    "TQ_LOGGING_LEVEL": "ERROR",
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
def address_of_forks(kind: str) -> Path:
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
    address = address_of_forks(kind)
    order = json.dumps([list(arguments), dict(environment), str(directory or Path.cwd()), os.getpid()]).encode()
    fds = [stream if isinstance(stream, int) else stream.fileno() for stream in (stdout, stderr)]
    libc = ctypes.CDLL(None)
    with _adoption, socket.socket(socket.AF_UNIX) as server, Path(os.devnull).open("rb") as empty:
        server.connect(str(address))
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(server, [len(order).to_bytes(8, "big")], [empty.fileno(), *fds])
            server.sendall(order)
            pid = int.from_bytes(server.recv(4, socket.MSG_WAITALL), "big")
            server.recv(1)  # the process between has ended
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    if not pid:  # a signal to process 0 would be one to our own group
        raise ChildProcessError(f"the fork server of {kind} ended before it started {list(arguments)}: see {address.with_name('log')}")
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
        self.name, self.log, self._asked = name, log, False
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
    """Return the number of open file descriptors of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def own_open_files() -> int:
    """Return the number of open file descriptors of this process, once what earlier tests have left is closed."""
    gc.collect()
    return open_files(os.getpid())


def _status(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) // 1024


# vLLM, started through the fork server, and gateways before it.

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


def start(module: str, settings: Settings, log: Path, before: str = "") -> Child:
    """Start `module.serve(settings)`, after the statements `before`; it may not be ready yet."""
    values = settings.model_dump(mode="json")
    # Secrets hide themselves in a dump.
    tokens = {"store": settings.store.token, "gateway": settings.gateway.token, "engine": settings.engine.token}
    for section, token in tokens.items():
        values[section]["token"] = token.get_secret_value() if token else None
    return ForkedChild(module, ["-c", before + _SERVE, module, json.dumps(values)], log, {"PYTHONPATH": str(ROOT)})


@contextmanager
def running_engine(settings: Settings, log: Path) -> Generator[Child]:
    """A vLLM that is warmed up, stopped at the end."""
    child = start("gateway.engine", settings, log)
    try:
        url = f"{settings.gateway.engine_url}/spangrad/info"
        wait_until(lambda: fetch(url).get("warm", False), 300, "vLLM", [child], poll_seconds=0.2)
        yield child
    finally:
        child.stop()


def processes_of(settings: Settings) -> list[int]:
    """Return the processes of a vLLM: API servers, engine cores, workers; it begins a session."""
    session = os.getsid(fetch(f"{settings.gateway.engine_url}/spangrad/info")["pid"])
    processes = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    # Python's resource tracker is not missed: it removes what others left behind.
    return [pid for pid in processes if _session_of(pid) == session and b"resource_tracker" not in _command_of(pid)]


def _command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


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
        wait_until(lambda: answers(f"{settings.gateway.engine_url}/health"), 300, "a bare vLLM", [child], poll_seconds=0.2)
        yield child
    finally:
        child.stop()


@contextmanager
def running_gateway(settings: Settings, log: Path) -> Generator[Child]:
    """A gateway that has admitted its engine, stopped at the end."""
    child = start("gateway.server", settings, log)
    try:
        url = f"{settings.gateway.url}/readyz"
        wait_until(lambda: fetch(url).get("status") == "serving", 120, "the gateway", [child], poll_seconds=0.05)
        yield child
    finally:
        child.stop()


def fetch(url: str, body: object | None = None) -> dict[str, Any]:
    """Return the JSON of an answer, an error's too; an empty dictionary when the server does not answer."""
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
