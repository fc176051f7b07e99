"""Program that runs a command confined by Landlock, a filter of system calls, limits, and a user of its own where root starts it.

In: `PLAN COMMAND...`, with the plan as JSON (`runner.sandboxes.landlock` writes it). It imports the standard library alone, runs isolated
and stays as the parent: it makes the private directory, takes in processes whose parents ended, and removes all of them, and the directory,
when the command has ended or SIGTERM asks. Its exit code is the command's, or 128 and the signal that ended it. The file whose descriptor
the variable of the plan names holds `1` only if the command has begun.

Landlock's numbers are those of the kernel's include/uapi/linux/landlock.h.
"""

import ctypes
import json
import os
import resource
import shutil
import signal
import stat
import struct
import sys
import tempfile
from typing import Any

_CREATE, _ADD, _RESTRICT = 444, 445, 446
"""System calls, the same on all architectures."""
_VERSION_FLAG, _PATH_BENEATH, _NET_PORT = 1, 1, 2
_ALL_FILE_RIGHTS = (1 << 16) - 1
_READ, _READ_EXECUTE = 0b1100, 0b1101
_WRITE = _ALL_FILE_RIGHTS & ~(1 << 6 | 1 << 11)  # all but making device files
_FILE_RIGHTS = 1 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
"""Rights that a rule for a file may have: those of a directory's content are refused."""
_BIND, _CONNECT = 1, 2
_SCOPES = 0b11
"""Abstract Unix sockets and signals of processes outside."""
_SET_PDEATHSIG, _SET_NO_NEW_PRIVS, _SET_SECCOMP, _SET_SUBREAPER = 1, 38, 22, 36
_FILTER = 2
_KILL_LOOKS = 1000

_libc = ctypes.CDLL(None, use_errno=True)


def abi() -> int:
    """Return the version of Landlock's interface in this kernel; 0 if there is none."""
    return max(0, _libc.syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG)))


def _checked(result: int, doing: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{doing}: {os.strerror(ctypes.get_errno())}")
    return result


def _prctl(option: int, *values: int) -> None:
    _checked(_libc.prctl(option, *(ctypes.c_ulong(value) for value in (*values, *[0] * (4 - len(values))))), f"prctl {option}")


def _restrict(plan: dict[str, Any], private: str) -> None:
    """Confine this process, and all that it will start, to the plan's files and ports."""
    ports = plan["ports"]
    attributes = struct.pack("=QQQ", _ALL_FILE_RIGHTS, 0 if ports is None else _BIND | _CONNECT, _SCOPES)
    ruleset = _checked(_libc.syscall(_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0)), "a set of rules")
    rules = [*((path, _READ_EXECUTE) for path in plan["readable"]), *((path, _READ | 1 << 1 | 1 << 15) for path in plan["devices"])]
    for path, rights in [*rules, (private, _WRITE | _READ_EXECUTE)]:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        directory = stat.S_ISDIR(os.fstat(opened).st_mode)
        allowed = rights if directory else rights & _FILE_RIGHTS
        rule = struct.pack("=Qi", allowed, opened)
        _checked(_libc.syscall(_ADD, ruleset, _PATH_BENEATH, rule, ctypes.c_uint32(0)), f"a rule for {path}")
        os.close(opened)
    for port in ports or ():
        rule = struct.pack("=QQ", _CONNECT, port)
        _checked(_libc.syscall(_ADD, ruleset, _NET_PORT, rule, ctypes.c_uint32(0)), f"a rule for port {port}")
    _checked(_libc.syscall(_RESTRICT, ruleset, ctypes.c_uint32(0)), "the rules")
    os.close(ruleset)


def _load_filter(program: bytes) -> None:
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    _checked(_libc.prctl(_SET_SECCOMP, ctypes.c_ulong(_FILTER), header, ctypes.c_ulong(0), ctypes.c_ulong(0)), "the filter")


def _become(plan: dict[str, Any], private: str, user: int | None, command: list[str]) -> None:
    """Turn this process into the confined command."""
    with open(plan["filter"], "rb") as file:  # noqa: PTH123  # pathlib takes longer to import than all of this
        program = file.read()
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)  # changing the user forgets it
    for name, value in plan["limits"].items():
        limit = value + (_tasks_of_user() if name == "RLIMIT_NPROC" and user is None else 0)
        most = resource.getrlimit(getattr(resource, name))[1]
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(getattr(resource, name), (limit, limit))
    os.environ.update(dict.fromkeys(("HOME", "TMPDIR"), private))
    started = int(os.environ.pop(plan["started"], -1))
    os.chdir(plan["directory"])
    _prctl(_SET_NO_NEW_PRIVS, 1)
    _restrict(plan, private)
    _load_filter(program)
    # Python ignores it, a library of a worker may block it, and the command would inherit both.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGPIPE,))
    if started >= 0:
        os.set_inheritable(started, False)
        os.pwrite(started, b"1", 0)
    try:
        os.execvp(command[0], command)
    except OSError:
        if started >= 0:
            os.pwrite(started, b"0", 0)
        raise


def _tasks_of_user() -> int:
    """Count the threads of this process's user: the limit counts those that were there before as well."""
    count = 0
    for name in os.listdir("/proc"):  # noqa: PTH208
        try:
            if name.isdecimal() and os.stat(f"/proc/{name}").st_uid == os.getuid():  # noqa: PTH116
                count += len(os.listdir(f"/proc/{name}/task"))  # noqa: PTH208
        except OSError:
            continue  # it has ended
    return count


def _kill_all() -> None:
    """Kill all descendants: each that loses its parent becomes a child of this process, so none can hide."""
    for _ in range(_KILL_LOOKS):
        with open(f"/proc/self/task/{os.getpid()}/children") as file:  # noqa: PTH123
            children = [int(pid) for pid in file.read().split()]
        if not children:
            return
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)


def main() -> None:
    """Run the command, and leave nothing of it."""
    plan, command = json.loads(sys.argv[1]), sys.argv[2:]
    _prctl(_SET_SUBREAPER, 1)
    user = plan["first_user"] + os.getpid() if os.geteuid() == 0 else None
    private = tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=plan["scratch"])
    if user is not None:
        os.chown(private, user, user)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        pid = os.fork()
        if not pid:
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                _become(plan, private, user, command)
            except OSError as error:
                os.write(2, f"{command[0]}: {error}\n".encode())
            os._exit(126)
        while (ended := os.waitpid(-1, 0))[0] != pid:
            pass  # an orphan: until it is waited for, it counts as a process of its user
        status = os.waitstatus_to_exitcode(ended[1])
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _kill_all()
        shutil.rmtree(private, ignore_errors=True)
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
