"""An interpreter of vLLM that forks where another would start: vLLM's imports, six CPU seconds in each of its three processes, happen once.

In: a socket's path. Out: forks, for a program that takes an interpreter's arguments (`write_wrapper`). Invariants: what
starts vLLM has the fork's output and exit code, its signals reach it, and both end together, however the one or the other ends. The
server runs Python in one thread only, so that a fork has all that it needs.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULE = "gateway.vllm_plugin.launch"
"""Started by a fork; all else is started as it would be without us."""
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
server = socket.socket(socket.AF_UNIX)
server.connect({path!r})
order = json.dumps([sys.argv[2:], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(server, [len(order).to_bytes(8, "big")], [0, 1, 2])
server.sendall(order)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: server.send(bytes([number])))
code = server.recv(1)
if not code:
    os.kill(os.getpid(), signal.SIGKILL)
if code[0] > 128:
    if code[0] - 128 != signal.SIGKILL:
        signal.signal(code[0] - 128, signal.SIG_DFL)
    os.kill(os.getpid(), code[0] - 128)
sys.exit(code[0])
"""


def write_wrapper(wrapper: Path, python: Path, path: Path) -> None:
    """Write the program that asks the server on a socket for a fork."""
    wrapper.write_text(_WRAPPER.format(own=sys.executable, module=MODULE, python=str(python), path=str(path)))
    wrapper.chmod(0o755)


def serve(path: str) -> None:
    """Fork for each connection until this process is killed."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        forks: dict[socket.socket, tuple[int, int]] = {}
        while True:
            ready = select.select([listener, *forks, *(pidfd for _, pidfd in forks.values())], [], [])[0]
            for connection, (pid, pidfd) in list(forks.items()):
                if pidfd in ready:
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
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
                pid = _fork(connection, [listener, *forks])
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
    arguments, environment, directory = json.loads(order)
    pid = os.fork()
    if pid:
        for fd in fds:
            os.close(fd)
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: it ends with this server
        os.setsid()
        for inherited in (connection, *others):
            inherited.close()
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
            os.close(fd)
        _run(arguments, environment, directory)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _run(arguments: list[str], environment: dict[str, str], directory: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.argv = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


def _preload() -> None:
    """Import vLLM; have it fork its engine and its worker, and inspect a model's class itself, where it would start others anew."""
    importlib.import_module(MODULE).answer_for_cpu_build()
    for name in [name for name in sys.modules if name.partition(".")[0] in {"gateway", "spangrad"}]:
        del sys.modules[name]  # each fork imports them as if it were the first
    for name in PRELOADED:
        importlib.import_module(name)
    importlib.import_module("vllm.model_executor.models.registry")._run_in_subprocess = lambda look: look()
    for name in ("vllm.v1.engine.coordinator", "vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor"):
        importlib.import_module(name).get_mp_context = lambda: multiprocessing.get_context("fork")


if __name__ == "__main__":
    _preload()
    serve(sys.argv[1])
