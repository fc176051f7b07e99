"""Child processes that never outlive their parent: started in a group of their own, stopped as a group, with logs; and locks of files.

In: a command. Out: a `Child`. Invariant: when this process ends, for whatever reason, so do its children.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import IO

from spangrad.errors import SpangradError
from spangrad.http.json_http import status_of

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
"""Loopback names and addresses of this machine."""
_TAIL_BYTES = 2**16
_SERVER_PORTS = range(20000, 32768)
"""Ports that Linux assigns to no outgoing connection by default (net.ipv4.ip_local_port_range)."""


class Child:
    """A running process group with a log file."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None, *, inherit_settings: bool = True
    ) -> None:
        """Start `command` in a session of its own, with both outputs appended to the log, and `env` added to our environment.

        Where it is not to inherit the settings, because its own are resolved already, its environment lacks our SPANGRAD_ variables.
        """
        inherited = {key: value for key, value in os.environ.items() if inherit_settings or not key.startswith("SPANGRAD_")}
        self.name = name
        self.log = log
        self._asked = False
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                dying_with_parent(command, environment := {**inherited, **(env or {})}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        """Return whether the process still runs."""
        return self.process.poll() is None

    def check(self) -> None:
        """Raise when the process has ended.

        Raises:
            SpangradError: with the end of its log.
        """
        if not self.running:
            raise SpangradError(f"{self.name} ended with exit code {self.process.returncode}. The end of {self.log}:\n{self.tail()}")

    def tail(self, lines: int = 20) -> str:
        """Return the last lines of the log, as far as they are among its last bytes: it may be larger than the memory."""
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])

    def ask_to_end(self) -> None:
        """Send SIGTERM, once: a second one would cut the end of some programs short."""
        if not self._asked:
            self._asked = True
            self.process.terminate()

    def stop(self, grace_seconds: float = 15) -> None:
        """Ask the process to end, then make its whole group end; idempotent."""
        self.ask_to_end()
        _end_group(self.process, grace_seconds)


def own_command(*arguments: str) -> list[str]:
    """Return the command line of `spangrad` in this environment.

    -P keeps modules of the working directory, such as an agent's own `runner.py`, from hiding ours.
    """
    return [sys.executable, "-P", "-m", "spangrad", *arguments]


def end_by_interrupt() -> None:
    """Have SIGTERM and the end of the terminal do what Ctrl-C does, also where a script has begun this process in the background.

    There Ctrl-C is ignored. With `nohup`, the end of the terminal stays without effect.

    asyncio cancels its main task then; an exception in the midst of its loop could leave tasks that never end.
    """

    def interrupt(_signum: int, _frame: object) -> None:
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, interrupt)


def stop_group(process: subprocess.Popen[bytes], grace_seconds: float) -> None:
    """Send SIGTERM to the leader, so that it may end its own children in order; then SIGKILL to the rest of the group."""
    process.terminate()
    _end_group(process, grace_seconds)


def _end_group(process: subprocess.Popen[bytes], grace_seconds: float) -> None:
    """Wait until the leader has ended by itself, then send SIGKILL to what is left of its group."""
    try:
        process.wait(grace_seconds)
    except subprocess.TimeoutExpired:
        pass
    kill_group(process.pid)
    process.wait()


def kill_group(leader: int) -> None:
    """Send SIGKILL to what is left of a process group; safe to call in a signal handler."""
    with suppress(ProcessLookupError):  # nothing is left of it
        os.killpg(leader, signal.SIGKILL)


_inherited_files: int | None = None
"""Limit of open files that this process had at its start. None: it still has it."""


def raise_files_limit() -> None:
    """Raise this process's limit of open files to the largest that it may have: each attempt and each of its connections takes some."""
    global _inherited_files
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        _inherited_files = soft


_BEGIN = """[ "$PPID" = "$0" ] || exit 143
[ -z "$1" ] || ulimit -S -n "$1"
shift
exec "$@"
"""
"""Script that begins a program, unless the parent has died before its signal was requested; its words: parent, limit of files, command."""


def dying_with_parent(
    command: Sequence[str], environment: Mapping[str, str] | None = None, directory: Path = Path(), *, inherits_limit: bool = False
) -> list[str]:
    """Return the command line that runs a program which gets SIGTERM from Linux when the thread that starts it ends, even by SIGKILL.

    Popen's `preexec_fn` is no way to request that: it forks a process without its other threads, whose locks are held and whose changes
    of the heap are half done, and copies the page tables of a large process. Without it, Popen runs nothing of ours in the child.

    Args:
        command: the program and its arguments.
        environment: its variables, as Popen gets them. None: ours.
        directory: its working directory.
        inherits_limit: True has it open no more files than this process could at its start (`raise_files_limit`): programs that call
            select() fail with descriptors above 1023, so only a process that knows of it may have a higher limit.

    Raises:
        OSError: the program, its interpreter or, on Linux, util-linux's setpriv is missing; or the program may not be run.
    """
    name, *arguments = command
    variables = os.environ if environment is None else environment
    place = str((directory / name).absolute()) if os.sep in name else name
    folders = variables.get("PATH", os.defpath).split(os.pathsep)
    path = shutil.which(place, path=os.pathsep.join(str((directory / folder).absolute()) for folder in folders))
    if path is None:
        code = errno.EACCES if os.sep in name and Path(place).exists() else errno.ENOENT
        raise OSError(code, os.strerror(code), name)
    if (interpreter := _interpreter(path)) and not os.access(directory / interpreter, os.X_OK):
        raise FileNotFoundError(errno.ENOENT, f"its interpreter {interpreter!r} cannot be run", name)
    # Shells set PWD, and some drop variables whose names they cannot use, such as those with a dot, or functions that bash exports.
    undo = [] if "PWD" in variables else ["-u", "PWD"]
    undo += [f"{key}={value}" for key, value in variables.items() if not (key.isascii() and key.isidentifier())]
    if undo:  # env would take a path with = for a variable, and nice takes it for the program
        undo = ["/usr/bin/env", *undo, *(["/usr/bin/nice", "-n", "0"] if "=" in path else [])]
    limit = str((inherits_limit and _inherited_files) or "")
    script = ["/bin/sh", "-c", _BEGIN, str(os.getpid()), limit, *undo, path, *arguments]
    if sys.platform != "linux":
        return script
    if (setpriv := shutil.which("setpriv")) is None:
        raise FileNotFoundError(errno.ENOENT, "programs are started by setpriv, which is missing. Install util-linux", "setpriv")
    return [setpriv, "--pdeathsig", "TERM", "--", *script]


def _interpreter(program: str) -> str:
    """Return the interpreter that a program's first line names; empty: it names none, or cannot be read."""
    with suppress(OSError), Path(program).open("rb") as file:
        if first := re.match(rb"#![ \t]*([^ \t\n]+)", file.readline(256)):
            return os.fsdecode(first[1])
    return ""


MARK = "SPANGRAD_HOST"
"""Environment variable whose value all descendants of one agent host inherit."""

_KILL_LOOKS, _KILL_SECONDS = 8, 0.4
"""Looks of `kill_marked`, and its time in seconds, of which it takes both before it gives up: on a busy machine each look takes long, and
on one that is not, a killed process may take longer to end than many looks."""


def kill_marked(mark: str) -> None:
    """Send SIGKILL to every process but this one that has inherited a mark, with its group; safe to call in a signal handler.

    Processes are found in /proc, so that children that were just started, or whose parent has died, are killed as well. One look misses
    what is forked during it, and cannot tell of a process within exec, whose environment is not there yet: it looks until it has seen
    neither twice, and gives up where processes are forked faster than they are killed. Without /proc it does nothing.
    """
    end = time.monotonic() + _KILL_SECONDS
    count = clean_looks = 0
    while clean_looks < 2 and (count < _KILL_LOOKS or time.monotonic() < end):
        count += 1
        clean_looks = 0 if _kill_marked_once(f"{MARK}={mark}".encode()) else clean_looks + 1


def _kill_marked_once(variable: bytes) -> bool:
    """Kill the processes that have a variable in their environment now; return whether there were any, or one that may have it soon."""
    own_pid, own_group = os.getpid(), os.getpgrp()
    any_there = False
    for path in Path("/proc").glob("[0-9]*/environ"):
        pid = int(path.parent.name)
        try:
            if pid == own_pid:
                continue
            environment = path.read_bytes()
            any_there |= not environment and _is_starting(pid)
            if variable not in environment.split(b"\0"):
                continue
            any_there = True
            # A group dies at once: what a member forks meanwhile, too.
            if (group := os.getpgid(pid)) == own_group:
                os.kill(pid, signal.SIGKILL)
            else:
                os.killpg(group, signal.SIGKILL)
        except OSError:
            continue  # it has ended meanwhile, or belongs to another user
    return any_there


_STARTING_SECONDS = 2.0
"""Age up to which a process without an environment may be within exec; an older one was started without."""


def _is_starting(pid: int) -> bool:
    """Return whether a process began a moment ago.

    Raises:
        OSError: it runs no program: it is dead, or a thread of the kernel's; they have no environment either.
    """
    Path(f"/proc/{pid}/exe").readlink()
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    start = process_start(pid)
    return bool(start) and uptime - int(start) / os.sysconf("SC_CLK_TCK") < _STARTING_SECONDS


def process_start(pid: int) -> str | None:
    """Return a process's start, in ticks since boot; empty: it is a zombie or dead. None: /proc shows no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name in brackets may hold anything; state is the third field, the start the 22nd.
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] in {"Z", "X"} else fields[19]


@cache
def _server_ports() -> Iterator[int]:
    """Return an endless iterator over all server ports, in a random order of this process's own."""
    return cycle(random.SystemRandom().sample(_SERVER_PORTS, len(_SERVER_PORTS)))


def free_ports(count: int) -> list[int]:
    """Return ports that no process listens on, all different.

    They lie below those that the kernel assigns to outgoing connections, one of which could take them before their server does; and no
    port is returned twice before all others were, so that ports of separate calls differ, too. They are for servers in processes of
    their own; one in this process binds port 0, and tells its port.

    Raises:
        SpangradError: there are not so many.
    """
    ports: list[int] = []
    for port in islice(_server_ports(), len(_SERVER_PORTS)):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            ports.append(port)
        if len(ports) == count:
            return ports
    raise SpangradError(f"there are no {count} free ports on 127.0.0.1 between {_SERVER_PORTS.start} and {_SERVER_PORTS.stop}.")


def require_free_port(host: str, port: int, setting: str) -> None:
    """Raise with a remedy when another process listens already.

    Raises:
        SpangradError: the port is in use.
    """
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise SpangradError(
            f"cannot listen on {host}:{port} ({error.strerror}). Stop what uses it, or set {setting} to another port."
        ) from None


def require_safe_bind(host: str, token: object | None, section: str) -> None:
    """Refuse to bind beyond loopback without a token; the error names the section of the settings that has both.

    Raises:
        SpangradError: `host` is not loopback and there is no token.
    """
    if host not in LOOPBACK and not token:
        raise SpangradError(
            f"{section}.host = {host!r} would listen beyond this machine without a token. Set {section}.token, or bind 127.0.0.1."
        )


def wait_until(
    ready: Callable[[], bool], timeout_seconds: float, what: str, children: Sequence[Child] = (), poll_seconds: float = 0.1
) -> None:
    """Poll `ready()` until it is true, and raise at once when a child dies.

    Raises:
        SpangradError: a child died, or the time limit was exceeded.
    """
    end = time.monotonic() + timeout_seconds
    while not ready():
        for child in children:
            child.check()
        if time.monotonic() > end:
            raise SpangradError(f"{what} is not ready after {timeout_seconds:g} s.")
        time.sleep(poll_seconds)


def answers(url: str) -> bool:
    """Return whether a GET gets the status 200."""
    return status_of(url) == 200


def lock_alone(file: int | IO[str], what: str, error: type[SpangradError]) -> bool:
    """Lock an open file for this process, until it is closed; return False if another process has locked it.

    Raises:
        SpangradError: an `error`: the file system of `what` has no locks. The file is closed then.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as failure:
        if isinstance(file, int):
            os.close(file)
        else:
            file.close()
        raise error(f"{what} cannot be locked ({failure.strerror}). Name a place on a file system with locks.") from None
    return True


def make_private(directory: Path) -> None:
    """Make a directory, closed to other users of the machine, unless it exists."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
