"""The program that stands for vLLM's interpreter in tests: what starts it sees a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spangrad.processes import Child, wait_until
from tests.programs import fork_server
from tests.support import processes
from tests.support.processes import ForkedChild, forked

PROGRAM = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print(os.getpid(), os.environ["WORD"], os.getcwd(), sys.argv[1:], flush=True)
while sys.argv[1] == "wait":
    time.sleep(0.05)
os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == "die" else sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def wrapper(tmp_path: Path) -> Iterator[Path]:
    """Return a program whose forks run PROGRAM, under vLLM's module's name."""
    module = tmp_path / "modules" / Path(*fork_server.MODULE.split(".")).with_suffix(".py")
    module.parent.mkdir(parents=True)
    module.write_text(PROGRAM)
    for package in (module.parent, module.parents[1]):
        (package / "__init__.py").touch()
    program, address = tmp_path / "python", tmp_path / "socket"
    code = "import sys; from tests.programs.fork_server import serve; serve(sys.argv[1])"
    server = Child("fork server", [sys.executable, "-c", code, str(address)], tmp_path / "log", {"PYTHONPATH": str(fork_server.ROOT)})
    try:
        wait_until(address.exists, 30, server.name, [server], poll_seconds=0.02)
        fork_server.write_wrapper(program, Path(sys.executable), address)
        yield program
    finally:
        server.stop()


def started(wrapper: Path, word: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "WORD": "word", "PYTHONPATH": str(wrapper.parent / "modules")}
    command = [str(wrapper), "-m", fork_server.MODULE, word]
    return subprocess.Popen(command, env=environment, cwd=wrapper.parent, stdout=subprocess.PIPE, text=True)


def ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_fork_has_arguments_environment_directory_output_and_exit_code_of_starter(wrapper: Path) -> None:
    for code in (0, 3):
        process = started(wrapper, str(code))
        output, _ = process.communicate(timeout=30)
        assert output.split(" ", 1)[1] == f"word {wrapper.parent} ['{code}']\n"
        assert process.returncode == code


def test_fork_signalled_through_starter_ends_with_the_same_status(wrapper: Path) -> None:
    process = started(wrapper, "wait")
    assert process.stdout
    process.stdout.readline()
    process.terminate()
    assert process.wait(30) == 7
    process = started(wrapper, "die")
    assert process.wait(30) == -signal.SIGKILL


def test_fork_ends_when_its_starter_is_killed(wrapper: Path) -> None:
    process = started(wrapper, "wait")
    assert process.stdout
    pid = int(process.stdout.readline().split()[0])
    assert not ended(pid)
    process.kill()
    wait_until(lambda: ended(pid), 60, "the fork's end", poll_seconds=0.02)


def test_fork_server_runs_other_commands_by_the_interpreter(wrapper: Path) -> None:
    done = subprocess.run([wrapper, "-c", "import sys; print(sys.argv[1:])", "a"], capture_output=True, text=True, check=True)
    assert done.stdout == "['a']\n"


SHOWN = """
import atexit, os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print(os.getpid(), os.getppid(), os.getpgrp(), os.environ["WORD"], os.getcwd(), sys.argv, file=sys.stderr, flush=True)
atexit.register(print, "ended")
while sys.argv[1] == "wait":
    time.sleep(0.05)
sys.exit(int(sys.argv[1]))
"""


def test_forked_process_is_child_with_own_group_outputs_and_environment(tmp_path: Path) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("w") as stdout, err.open("w") as stderr:
        process = forked(["-c", SHOWN, "3"], stdout, stderr, {"WORD": "word"}, tmp_path)
    assert process.wait(30) == 3
    pid = process.pid
    assert err.read_text() == f"{pid} {os.getpid()} {pid} word {tmp_path} ['-c', '3']\n"
    assert out.read_text() == "ended\n"
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 7), (signal.SIGKILL, -signal.SIGKILL)])
def test_forked_process_gets_signals_itself(tmp_path: Path, number: signal.Signals, code: int) -> None:
    child = ForkedChild("waiting", ["-c", SHOWN, "wait"], tmp_path / "log", {"WORD": "word"})
    wait_until(lambda: "word" in child.log.read_text(), 30, "the program", [child], poll_seconds=0.01)
    child.process.send_signal(number)
    assert child.process.wait(30) == code


def test_forked_by_a_server_that_dies_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die() -> None:
        connection, _ = dying.accept()
        with connection:
            head, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
            connection.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)
        for descriptor in descriptors:
            os.close(descriptor)

    monkeypatch.setattr(processes, "address_of_forks", lambda kind: tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as dying, ThreadPoolExecutor(1) as pool:
        dying.bind(str(tmp_path / "socket"))
        dying.listen()
        death = pool.submit(die)
        with pytest.raises(ChildProcessError, match=rf"fork server of services ended before it started \['-c', ''\]: see {tmp_path}/log"):
            forked(["-c", ""], 1, 2, {})
        death.result(30)


def test_forked_process_dies_with_its_starter(tmp_path: Path) -> None:
    code = (
        "import time; from pathlib import Path; from tests.support.processes import ForkedChild\n"
        f"print(ForkedChild('c', ['-c', 'import time; time.sleep(60)'], Path({str(tmp_path / 'log')!r})).process.pid, flush=True)\n"
        "time.sleep(60)"
    )
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=fork_server.ROOT)
    assert starter.stdout
    pid = int(starter.stdout.readline())
    assert not ended(pid)
    starter.kill()
    starter.wait()
    wait_until(lambda: ended(pid), 60, "its end", poll_seconds=0.01)
