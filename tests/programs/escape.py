"""Attacks of a program on what is outside of its sandbox: `escape.py ATTACKS FACTS` prints, of each, `escaped`, or why it was held.

It imports the standard library alone, and is run by any Python.
"""

import ctypes
import json
import os
import resource
import socket
import sys
import time
from pathlib import Path
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWUSER, _PTRACE_ATTACH, _PTRACE_DETACH, _GET_NO_NEW_PRIVS = 0x10000000, 16, 17, 39


def _require(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def read_file(facts: dict[str, Any]) -> None:
    assert Path(facts["secret"]).read_text() == "secret"


def write_file(facts: dict[str, Any]) -> None:
    Path(facts["outside"], "written").write_text("x")


def symlink_read(facts: dict[str, Any]) -> None:
    link = Path(os.environ["TMPDIR"], "link")
    link.symlink_to(facts["secret"])
    assert link.read_text() == "secret"


def symlink_write(facts: dict[str, Any]) -> None:
    link = Path(os.environ["TMPDIR"], "directory")
    link.symlink_to(facts["outside"])
    (link / "written").write_text("x")


def hard_link(facts: dict[str, Any]) -> None:
    link = Path(os.environ["TMPDIR"], "hard")
    link.hardlink_to(facts["secret"])
    assert link.read_text() == "secret"


def change_directory(facts: dict[str, Any]) -> None:
    Path(facts["directory"], "written").write_text("x")


def tcp(facts: dict[str, Any]) -> None:
    socket.create_connection(("127.0.0.1", facts["tcp"]), 5).close()


def udp(facts: dict[str, Any]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.connect(("127.0.0.1", facts["udp"]))
        sender.send(b"x")
        sender.settimeout(5)
        assert sender.recv(1) == b"y"


def unix_socket(facts: dict[str, Any]) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(facts["unix"])


def abstract_socket(facts: dict[str, Any]) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect("\0" + facts["abstract"])


def list_processes(facts: dict[str, Any]) -> None:
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    words = facts["sdrow"][::-1].encode()  # its own command line has them in reverse
    assert any(words in line for line in lines), "it sees its own processes alone"


def signal_process(facts: dict[str, Any]) -> None:
    os.kill(facts["pid"], 0)


def limit_process(facts: dict[str, Any]) -> None:
    if not os.geteuid():  # outside of a sandbox: root of a container may lack the right to
        os.setresgid(*[facts["user"]] * 3)
        os.setresuid(*[facts["user"]] * 3)
    resource.prlimit(facts["pid"], resource.RLIMIT_CORE, (0, 0))


def slow_process(facts: dict[str, Any]) -> None:
    os.setpriority(os.PRIO_PROCESS, facts["pid"], 19)


def schedule_process(facts: dict[str, Any]) -> None:
    os.sched_setscheduler(facts["pid"], os.SCHED_IDLE, os.sched_param(0))


def change_mode(facts: dict[str, Any]) -> None:
    Path(facts["own"]).chmod(0o644)


def trace_process(facts: dict[str, Any]) -> None:
    _require(_libc.ptrace(_PTRACE_ATTACH, facts["pid"], None, None))
    os.waitpid(facts["pid"], 0)
    _require(_libc.ptrace(_PTRACE_DETACH, facts["pid"], None, None))


def signal_worker(facts: dict[str, Any]) -> None:
    os.kill(facts["worker"], 0)


def memory_of_process(facts: dict[str, Any]) -> None:
    process = Path("/proc", str(facts["pid"]))
    first = int((process / "maps").read_text().partition("-")[0], 16)
    with (process / "mem").open("rb") as memory:
        memory.seek(first)
        assert memory.read(4) == b"\x7fELF"


def variables_of_process(facts: dict[str, Any]) -> None:
    assert Path("/proc", str(facts["pid"]), "environ").read_bytes()


def root_of_process(facts: dict[str, Any]) -> None:
    assert Path(f"/proc/{facts['pid']}/root{facts['secret']}").read_text() == "secret"


def symlink_tmp(facts: dict[str, Any]) -> None:
    link = Path(os.environ["TMPDIR"], "tmp")
    link.symlink_to(facts["tmp"])
    assert facts["name"] in os.listdir(link), "it sees its own /tmp"  # noqa: PTH208 - that follows the link


def shared_memory(facts: dict[str, Any]) -> None:
    segment = _libc.shmget(facts["key"], 0, 0)
    _require(segment)
    _libc.shmat.restype = ctypes.c_void_p
    address = _libc.shmat(segment, None, 0o10000)  # read only
    assert ctypes.string_at(address, 6) == b"secret"


def semaphores(facts: dict[str, Any]) -> None:
    semaphore = _libc.semget(facts["key"], 1, 0)
    _require(semaphore)
    _require(_libc.semctl(semaphore, 0, 16, 1))  # SETVAL


def message_queue(facts: dict[str, Any]) -> None:
    _require(_libc.mq_open(facts["queue"].encode(), os.O_RDWR))


def unshare_user(facts: dict[str, Any]) -> None:
    _require(_libc.unshare(_CLONE_NEWUSER))


def fork_bomb(facts: dict[str, Any]) -> None:
    children: list[int] = []
    try:
        for _ in range(2 * facts["processes"]):
            if not (pid := os.fork()):
                time.sleep(60)
                os._exit(0)
            children.append(pid)
    finally:
        for pid in children:
            os.kill(pid, 9)


def fill_disk(facts: dict[str, Any]) -> None:
    for number in range(8):
        Path(os.environ["TMPDIR"], str(number)).write_bytes(b"x" * (facts["disk"] // 4))


def large_file(facts: dict[str, Any]) -> None:
    Path(os.environ["TMPDIR"], "large").write_bytes(b"x" * (2 * facts["disk"]))


def fill_memory(facts: dict[str, Any]) -> None:
    bytearray(2 * facts["memory"])


def gain_privileges(facts: dict[str, Any]) -> None:
    assert not _libc.prctl(_GET_NO_NEW_PRIVS, 0, 0, 0, 0), "programs that gain privileges by their files do not"


def outlive(facts: dict[str, Any]) -> None:
    if not os.fork():
        os.setsid()
        if not os.fork():
            os.execve("/bin/sleep", ["sleep", facts["sleep"]], {})
        os._exit(0)
    time.sleep(0.2)


def main() -> None:
    facts = json.loads(sys.argv[2])
    for name in sys.argv[1].split(","):
        print(name, end=" ", flush=True)
        if not (pid := os.fork()):
            try:
                globals()[name](facts)
            except (OSError, MemoryError, AssertionError) as error:
                print(f"held: {type(error).__name__} {error}", flush=True)
            else:
                print("escaped", flush=True)
            os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
