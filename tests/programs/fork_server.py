"""An interpreter that forks where another would start: what tests start often imports once what it imports.

In: a socket's path, and the modules to import; none: vLLM's, six CPU seconds in each of its three processes. Out: forks. vLLM, and what
scripts start, is started through a program that takes an interpreter's arguments (`write_wrapper`): it has the fork's output and exit code,
its signals reach the fork, and both end together. Our own commands are started by `processes.forked`, whose children the forks become.
Invariant: the server imports, and no more: it runs Python in one thread only, so that a fork has all that it needs.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import logging
import multiprocessing
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
import traceback
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULE = "gateway.vllm_plugin.launch"
"""vLLM's program."""
PRELOADED = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)

_WRAPPER = """#!{own} -IS
import json, os, signal, socket, sys
if sys.argv[1:3] != ["-m", {module!r}]:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
passed = (signal.SIGTERM, signal.SIGINT)
signal.pthread_sigmask(signal.SIG_BLOCK, passed)  # they wait until there is a fork that they can be passed to
server = socket.socket(socket.AF_UNIX)
server.connect({path!r})
order = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd(), None]).encode()
socket.send_fds(server, [len(order).to_bytes(8, "big")], [0, 1, 2])
server.sendall(order)
for number in passed:
    signal.signal(number, lambda number, _: server.send(bytes([number])))
signal.pthread_sigmask(signal.SIG_UNBLOCK, passed)
code = server.recv(1)
if not code:
    os.kill(os.getpid(), signal.SIGKILL)
if code[0] > 128:
    if code[0] - 128 != signal.SIGKILL:
        signal.signal(code[0] - 128, signal.SIG_DFL)
    os.kill(os.getpid(), code[0] - 128)
sys.exit(code[0])
"""


def write_wrapper(wrapper: Path, python: Path, path: Path, module: str = MODULE) -> None:
    """Write the program that asks the server on a socket for a fork that runs a module; for all else it starts the interpreter."""
    wrapper.write_text(_WRAPPER.format(own=sys.executable, module=module, python=str(python), path=str(path)))
    wrapper.chmod(0o755)


def serve(path: str) -> None:
    """Fork for each connection until this process is killed."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{path}.new")
        listener.listen()
        Path(f"{path}.new").rename(path)  # who sees the path may connect
        forks: dict[socket.socket, tuple[int, int]] = {}
        while True:
            ready = select.select([listener, *forks, *(pidfd for _, pidfd in forks.values())], [], [])[0]
            for connection, (pid, pidfd) in list(forks.items()):
                if pidfd in ready:
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)  # as who started it in a group of its own would end the rest
                    _answer(connection, code if code >= 0 else 128 - code)
                elif connection in ready:
                    number = connection.recv(1)
                    if number:
                        os.kill(pid, number[0])
                        continue
                    os.killpg(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                else:
                    continue
                os.close(pidfd)
                connection.close()
                del forks[connection]
            if listener in ready:
                connection, _ = listener.accept()
                if pid := _fork(connection, [listener, *forks]):
                    forks[connection] = pid, os.pidfd_open(pid)


def _answer(connection: socket.socket, code: int) -> None:
    try:
        connection.send(bytes([code]))
    except OSError:
        pass  # nobody waits for it any more


def _fork(connection: socket.socket, others: list[socket.socket]) -> int:
    head, fds, _, _ = socket.recv_fds(connection, 8, 3)
    order = b""
    while len(order) < int.from_bytes(head, "big"):
        order += connection.recv(1 << 20)
    arguments, environment, directory, parent = json.loads(order)
    server = os.getpid()
    pid = os.fork()
    if pid:
        for fd in fds:
            os.close(fd)
        if parent:
            os.waitpid(pid, 0)
            connection.close()
        return 0 if parent else pid
    code = 1
    try:
        if parent:
            _adopt(connection, parent)
        else:
            _die_with(server, signal.SIGKILL)
        os.setsid()
        for inherited in (connection, *others):
            inherited.close()
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
            os.close(fd)
        # The server's own remembers whether its file was one that seeks.
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", buffering=1 if os.isatty(1) else -1, closefd=False)
        _run(arguments, environment, directory)
        code = 0
    except SystemExit as error:
        code = _code(error)
    except BaseException:
        traceback.print_exc()
    finally:
        if parent:
            _finish()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _adopt(connection: socket.socket, parent: int) -> None:
    """Become a child of the process that asks, which takes in orphans just now: the process between ends."""
    between = os.getpid()
    if pid := os.fork():
        connection.sendall(pid.to_bytes(4, "big"))
        os._exit(0)
    while os.getppid() == between:
        time.sleep(0.0002)
    _die_with(parent, signal.SIGTERM)


def _die_with(parent: int, number: signal.Signals) -> None:
    ctypes.CDLL(None).prctl(1, number, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def _code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _finish() -> None:
    """End as an interpreter does: its threads first, then what was registered for the exit."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def _run(arguments: list[str], environment: dict[str, str], directory: str) -> None:
    """Run what an interpreter's arguments name: `-m MODULE` or `-c CODE`, and its own arguments."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    option, program, *_ = arguments
    if option == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(program, "<string>", "exec"), sys.modules["__main__"].__dict__)


def _preload() -> None:
    """Import vLLM; have it fork its engine and its worker, and inspect a model's class itself, where it would start others anew."""
    launch = importlib.import_module(MODULE)
    launch.answer_for_cpu_build()
    for name in [name for name in sys.modules if name.partition(".")[0] in {"gateway", "spangrad"}]:
        del sys.modules[name]  # each fork imports them as if it were the first
    for name in PRELOADED:
        importlib.import_module(name)
    launch.inspect_models_here_on_cpu()
    for name in ("vllm.v1.engine.coordinator", "vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor"):
        importlib.import_module(name).get_mp_context = lambda: multiprocessing.get_context("fork")
    # API servers are spawned whatever vLLM's settings say.
    forking = types.ModuleType("multiprocessing")
    vars(forking).update(vars(multiprocessing), get_context=lambda _=None: multiprocessing.get_context("fork"))
    importlib.import_module("vllm.v1.utils").multiprocessing = forking


if __name__ == "__main__":
    for module in sys.argv[2:]:
        importlib.import_module(module)
    if not sys.argv[2:]:
        _preload()
    logging.root.handlers.clear()  # verl's: a process sets up its own before it imports verl
    logging.root.setLevel(logging.WARNING)
    gc.freeze()
    serve(sys.argv[1])
