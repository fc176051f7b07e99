"""Attacks from inside sandboxes: each rung holds those that the table of docs/guides/sandboxes.md says, and no others."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Generator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from runner.sandboxes import bubblewrap, landlock
from runner.sandboxes.engines import choose, scratch_directory
from runner.sandboxes.policy import SandboxLimits, SandboxPolicy
from runner.sandboxes.seccomp import write_filter
from spangrad.errors import SandboxError
from spangrad.processes import kill_group
from spangrad.types import SandboxRung
from tests.conftest import DocsTable

BUBBLEWRAP, LANDLOCK = SandboxRung.BUBBLEWRAP, SandboxRung.LANDLOCK
BOTH = frozenset({BUBBLEWRAP, LANDLOCK})
ATTACKS: dict[str, tuple[str, frozenset[SandboxRung]]] = {
    "read_file": ("read a file of this machine that everyone may read", BOTH),
    "write_file": ("write to a directory that everyone may write to", BOTH),
    "change_mode": ("change the mode of a file outside that its user owns", frozenset({BUBBLEWRAP})),
    "change_directory": ("change its own working directory", BOTH),
    "symlink_read": ("read through a symbolic link in its own directory", BOTH),
    "symlink_write": ("write through a symbolic link to a directory outside", BOTH),
    "hard_link": ("make a hard link to a file outside", BOTH),
    "tcp": ("connect to a TCP port of this machine", BOTH),
    "udp": ("send a datagram to this machine", BOTH),
    "unix_socket": ("connect to a socket in the file system", BOTH),
    "abstract_socket": ("connect to an abstract socket", BOTH),
    "list_processes": ("list the command lines of other processes", BOTH),
    "signal_process": ("signal a process outside", BOTH),
    "limit_process": ("change the limits of a process outside", BOTH),
    "slow_process": ("lower the priority of a process outside", BOTH),
    "schedule_process": ("leave a process outside only idle processors", BOTH),
    "trace_process": ("trace a process outside", BOTH),
    "signal_worker": ("signal the process that started it", BOTH),
    "memory_of_process": ("read the memory of a process outside (/proc/PID/mem)", BOTH),
    "variables_of_process": ("read the environment of a process outside", BOTH),
    "root_of_process": ("read files through the root of a process outside (/proc/PID/root)", BOTH),
    "symlink_tmp": ("list this machine's /tmp through a symbolic link", BOTH),
    "shared_memory": ("read a segment of System V's shared memory", BOTH),
    "semaphores": ("change a System V semaphore", BOTH),
    "message_queue": ("open a POSIX message queue", BOTH),
    "unshare_user": ("create a user namespace", BOTH),
    "gain_privileges": ("gain privileges by a program's file (setuid)", BOTH),
    "fork_bomb": ("start more processes than its limit", BOTH),
    "fill_memory": ("allocate more memory than its limit", BOTH),
    "large_file": ("write a file larger than its limit", BOTH),
    "fill_disk": ("write more files than its limit in all", frozenset({BUBBLEWRAP})),
    "outlive": ("leave a process without a parent, session or environment behind", BOTH),
}
"""Attacks by name: what the program tries, and the rungs that hold it."""
_libc = ctypes.CDLL(None, use_errno=True)
_SIZE, _IPC_RMID, _CREATE = 4096, 0, 0o1666
"""Bytes of the segment; the order to remove something; IPC_CREAT, for everyone."""


class InterProcess:
    """A segment of shared memory, a semaphore and a message queue that everyone may use, and that programs are to be kept from."""

    def __init__(self, name: str) -> None:
        key = int(name[-7:], 16)
        _libc.shmat.restype = ctypes.c_void_p
        self._segment = _required(_libc.shmget(key, _SIZE, _CREATE))
        address = _libc.shmat(self._segment, None, 0)
        ctypes.memmove(address, b"secret", 6)
        _libc.shmdt(ctypes.c_void_p(address))
        self._semaphore = _required(_libc.semget(key, 1, _CREATE))
        short = f"/{name[-12:]}"  # the whole name would be in the command lines of attacks, where others are looked for
        self._name = short.encode()
        mask = os.umask(0)
        try:
            self._queue = _required(_libc.mq_open(self._name, os.O_CREAT | os.O_RDWR, 0o666, None))
        finally:
            os.umask(mask)
        self.facts = {"key": key, "queue": short}

    def close(self) -> None:
        """Remove all three."""
        _libc.shmctl(self._segment, _IPC_RMID, None)
        _libc.semctl(self._semaphore, 0, _IPC_RMID)
        os.close(self._queue)
        _libc.mq_unlink(self._name)


def _required(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


PROGRAM = Path(__file__).parents[1] / "programs/escape.py"
# An interpreter that every user can run: this one may be in a home.
PYTHON = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
LIMITS = SandboxLimits(processes=32, memory_bytes=256 * 2**20, disk_bytes=8 * 2**20)
NOBODY = 65534
AS_A_USER, LANDLOCK_AS_A_USER, UNCONFINED = "bubblewrap of a user", "landlock of a user", "no sandbox"
Facts = dict[str, Any]


FACTS: Facts = {}
PREFIXES: dict[str, list[str]] = {UNCONFINED: []}
SHORTCOMINGS: dict[str, str] = {}
"""Rungs that this machine has not, and why."""


@pytest.fixture(scope="module", autouse=True)
def outside() -> Generator[None]:
    """Targets outside the sandbox: files, sockets and a process that every user of the machine can reach."""
    words = f"outside-{uuid.uuid4().hex}"
    with tempfile.TemporaryDirectory() as base, tempfile.NamedTemporaryFile() as beside:
        directory, open_directory = Path(base, "agent"), Path(base, "outside")
        for path in (Path(base), directory, open_directory):
            path.mkdir(exist_ok=True)
            path.chmod(0o777)
        shutil.copy(PROGRAM, directory)
        secret = open_directory / "secret"
        secret.write_text("secret")
        own = open_directory / "own"
        own.touch(mode=0o600)
        # Of the user who attacks, so that it is the sandbox that holds, and not the system's rules of other users.
        user = os.geteuid() or NOBODY
        group = os.getegid() or NOBODY
        shutil.chown(own, user)
        process = subprocess.Popen(["sh", "-c", "sleep 600; :", words], start_new_session=True, user=user, group=group)
        sockets = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)]
        sockets += [socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
        tcp, udp, unix, abstract = sockets
        udp.bind(("127.0.0.1", 0))
        unix.bind(str(open_directory / "socket"))
        (open_directory / "socket").chmod(0o777)
        abstract.bind("\0@" + words[:20])
        for listener in (unix, abstract):
            listener.listen(16)
        between = InterProcess(words)
        threading.Thread(target=_answer, args=(udp,), daemon=True).start()
        try:
            FACTS.update(
                secret=str(secret),
                own=str(own),
                user=user,
                outside=str(open_directory),
                directory=str(directory),
                sdrow=words[::-1],
                pid=process.pid,
            )
            FACTS.update(tcp=tcp.getsockname()[1], udp=udp.getsockname()[1], unix=unix.getsockname(), abstract=f"@{words[:20]}")
            FACTS.update(worker=os.getpid(), tmp=str(Path(beside.name).parent), name=Path(beside.name).name, **between.facts)
            FACTS.update(processes=LIMITS.processes, disk=LIMITS.disk_bytes, memory=LIMITS.memory_bytes)
            _prepare(SandboxPolicy(directory, (), {}, False, LIMITS))
            yield
        finally:
            between.close()
            kill_group(process.pid)
            process.wait()
            for opened in sockets:
                opened.close()


def _answer(udp: socket.socket) -> None:
    try:
        while True:
            udp.sendto(b"y", udp.recvfrom(1)[1])
    except OSError:
        return  # it was closed


def _prepare(policy: SandboxPolicy) -> None:
    """Prepare the command line of each rung, or keep why this machine has it not."""
    for rung in (SandboxRung.BUBBLEWRAP, SandboxRung.LANDLOCK):
        try:
            PREFIXES[rung] = list(choose(replace(policy, engine=rung)).prefix)
        except SandboxError as error:
            SHORTCOMINGS[rung] = str(error)
    for rung, of_root in ((AS_A_USER, SandboxRung.BUBBLEWRAP), (LANDLOCK_AS_A_USER, SandboxRung.LANDLOCK)):
        if os.geteuid():
            SHORTCOMINGS[rung] = "these tests run as a user already"
        elif of_root in SHORTCOMINGS:
            SHORTCOMINGS[rung] = SHORTCOMINGS[of_root]
        else:
            PREFIXES[rung] = _of_a_user(policy, of_root)


def _of_a_user(policy: SandboxPolicy, rung: SandboxRung) -> list[str]:
    """The command line as a user has it, run by one."""
    filter_file = scratch_directory() / f"{rung}-of-a-user.bpf"
    write_filter(filter_file, shared_network=rung is SandboxRung.LANDLOCK, shared_ipc=rung is SandboxRung.LANDLOCK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: NOBODY)
        patch.setattr(sys, "executable", PYTHON)
        if rung is SandboxRung.BUBBLEWRAP:
            command = bubblewrap.command(policy, filter_file, None)
        else:
            scratch = policy.directory.parent / "scratch"
            scratch.mkdir()
            shutil.chown(scratch, NOBODY)
            command = landlock.command(policy, filter_file, scratch)
    return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *command]


DANGEROUS = {"fork_bomb", "fill_memory", "large_file", "fill_disk", "outlive", "unshare_user"}
"""Attacks that are not tried outside of a sandbox."""
SECONDS = {rung: f"{600 + number}.{os.getpid()}" for number, rung in enumerate((*SandboxRung, AS_A_USER, LANDLOCK_AS_A_USER))}
"""Arguments by which the processes that attacks leave behind are known."""


@cache
def attacked(rung: str) -> dict[str, str]:
    """Results of all attacks on a rung, by attack."""
    prefix, environment = PREFIXES[rung], {"PATH": "/usr/bin:/bin", "TMPDIR": "/tmp" if PREFIXES[rung] else FACTS["outside"]}
    names = [name for name in ATTACKS if prefix or name not in DANGEROUS]
    facts = {**FACTS, "sleep": SECONDS.get(rung, "0")}
    words = [*prefix, PYTHON, "-I", "-S", str(Path(FACTS["directory"], "escape.py")), ",".join(names), json.dumps(facts)]
    result = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment, check=False)
    lines = result.stdout.splitlines()
    assert [line.partition(" ")[0] for line in lines] == names, result
    return dict(line.split(" ", 1) for line in lines)


@pytest.mark.parametrize("rung", [SandboxRung.BUBBLEWRAP, AS_A_USER, SandboxRung.LANDLOCK, LANDLOCK_AS_A_USER])
@pytest.mark.parametrize("name", ATTACKS)
def test_sandbox_under_attack_holds_all_that_the_table_claims(name: str, rung: str) -> None:
    if (why_not := SHORTCOMINGS.get(rung)) is not None:
        pytest.skip(why_not)
    held = {AS_A_USER: SandboxRung.BUBBLEWRAP, LANDLOCK_AS_A_USER: SandboxRung.LANDLOCK}.get(rung, rung) in ATTACKS[name][1]
    # Root's programs have a user of their own, who owns nothing outside.
    held |= name == "change_mode" and rung is SandboxRung.LANDLOCK and not os.geteuid()
    result = attacked(rung)[name]
    if name == "outlive":
        assert (_running(SECONDS[rung]) == []) == held
    else:
        assert result.startswith("held: " if held else "escaped"), result


@pytest.mark.parametrize("name", sorted(set(ATTACKS) - DANGEROUS))
def test_attack_without_a_sandbox_succeeds(name: str) -> None:
    assert attacked(UNCONFINED)[name] == "escaped"


def test_landlock_with_host_network_keeps_from_sockets_in_files() -> None:
    if (why_not := SHORTCOMINGS.get(LANDLOCK)) is not None:
        pytest.skip(why_not)
    policy = SandboxPolicy(Path(FACTS["directory"]), (), {}, True, LIMITS, engine=LANDLOCK)
    program = [PYTHON, "-I", "-S", str(policy.directory / "escape.py"), "unix_socket,tcp", json.dumps(FACTS)]
    result = subprocess.run([*choose(policy).prefix, *program], capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout.splitlines() == ["unix_socket held: PermissionError [Errno 13] Permission denied", "tcp escaped"], result


def test_table_of_the_page_is_that_of_the_tests(docs_table: DocsTable) -> None:
    lines = ["| a program tries to | bubblewrap | landlock |", "| --- | --- | --- |"]
    for text, holding in ATTACKS.values():
        marks = ["held" if rung in holding else "**not held**" for rung in (BUBBLEWRAP, LANDLOCK)]
        lines.append(f"| {text} | {' | '.join(marks)} |")
    docs_table("guides/sandboxes.md", lines)


def _running(seconds: str) -> list[str]:
    """Processes of the attack that are left; they are killed."""
    left: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().split(b"\0")[:2] == [b"sleep", seconds.encode()]:
                left.append(path.parent.name)
                os.kill(int(path.parent.name), 9)
        except OSError:
            continue
    return left
