"""System calls that no program in a sandbox may make, as a filter for the kernel.

In: nothing but a choice. Out: a file with a BPF program, which bubblewrap and the Landlock launcher load. What is refused answers EPERM:
programs see a refusal, as of a missing privilege, and go on.
"""

from __future__ import annotations

import errno
import socket
import tempfile
from pathlib import Path
from typing import Any

from spangrad.errors import SandboxError

_REFUSED = (
    # Namespaces and mounts, by which a program could build a machine of its own.
    "chroot", "fsconfig", "fsmount", "fsopen", "fspick", "mount", "mount_setattr", "move_mount", "name_to_handle_at", "open_by_handle_at",
    "open_tree", "pivot_root", "setns", "umount2", "unshare",
    # Other processes.
    "kcmp", "pidfd_getfd", "process_vm_readv", "process_vm_writev", "ptrace",
    # Parts of the kernel with a long record of holes.
    "add_key", "bpf", "io_uring_enter", "io_uring_register", "io_uring_setup", "keyctl", "perf_event_open", "request_key", "userfaultfd",
    # The machine's own state.
    "acct", "adjtimex", "clock_adjtime", "clock_settime", "delete_module", "finit_module", "init_module", "ioperm", "iopl",
    "kexec_file_load", "kexec_load", "quotactl", "reboot", "sethostname", "setdomainname", "settimeofday", "swapoff", "swapon", "syslog",
    "vhangup",
)  # fmt: skip
_INTER_PROCESS = (
    "mq_getsetattr", "mq_notify", "mq_open", "mq_timedreceive", "mq_timedsend", "mq_unlink", "msgctl", "msgget", "msgrcv", "msgsnd",
    "semctl", "semget", "semop", "semtimedop", "shmat", "shmctl", "shmdt", "shmget",
)  # fmt: skip
"""System V's shared memory, semaphores and messages, and POSIX message queues: neither is a file, so that no rule on files holds them."""
_CLONE_NEWUSER = 0x10000000
_INT = 0xFFFFFFFF
"""Bits of an argument that the kernel takes for an int."""
_SOCKET_TYPE = 0xF
"""Bits of a socket's type, without its flags."""
_OTHER_PROCESSES = (
    ("prlimit64", 0), ("setpriority", 0), ("setpriority", 1), ("ioprio_set", 1),
    ("sched_setattr", 0), ("sched_setparam", 0), ("sched_setscheduler", 0),
)  # fmt: skip
"""System calls that change another process where this argument is not 0; a program's own limits and priority are its to change.

`sched_setaffinity` stays: programs set the processors of their threads by it, which are not 0 either.
"""


def write_filter(file: Path, *, shared_network: bool, shared_ipc: bool) -> None:
    """Write the filter to a file, at once or not at all.

    Args:
        file: overwritten.
        shared_network: True if the sandbox is in this machine's network and must be kept to TCP: no datagrams, no raw packets, and no
            sockets of other programs in the file system.
        shared_ipc: True if the sandbox has this machine's processes, shared memory, semaphores, message queues and sockets in the file
            system, and must be kept from them.

    Raises:
        SandboxError: the library libseccomp is missing.
    """
    try:
        import pyseccomp
    except (ImportError, RuntimeError, OSError) as error:  # it raises RuntimeError where libseccomp is not installed
        raise SandboxError(f"sandboxes need libseccomp ({error}). Install the system's package libseccomp2.") from None
    seccomp: Any = pyseccomp  # it has no types
    refused = seccomp.ERRNO(errno.EPERM)
    program = seccomp.SyscallFilter(seccomp.ALLOW)
    for name in _REFUSED:
        program.add_rule(refused, name)
    if shared_ipc:
        for name in _INTER_PROCESS:
            program.add_rule(refused, name)
        for name, argument in _OTHER_PROCESSES:
            program.add_rule(refused, name, seccomp.Arg(argument, seccomp.NE, 0))
        if not shared_network:
            program.add_rule(seccomp.ERRNO(errno.EACCES), "socket", seccomp.Arg(0, seccomp.MASKED_EQ, _INT, socket.AF_UNIX.value))
    program.add_rule(refused, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, _CLONE_NEWUSER, _CLONE_NEWUSER))
    # Its flags are behind a pointer. The C library goes back to clone.
    program.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")
    if shared_network:
        _keep_to_tcp(program, seccomp)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as written:
        program.export_bpf(written)
    Path(written.name).chmod(0o644)
    Path(written.name).replace(file)


def _keep_to_tcp(program: Any, seccomp: Any) -> None:
    refused = seccomp.ERRNO(errno.EACCES)
    inet = {socket.AF_INET.value, socket.AF_INET6.value}
    for family in range(64):
        if family not in inet:
            program.add_rule(refused, "socket", seccomp.Arg(0, seccomp.EQ, family))
    program.add_rule(refused, "socket", seccomp.Arg(0, seccomp.GE, 64))
    for family in inet:
        for kind in range(_SOCKET_TYPE + 1):
            if kind != socket.SOCK_STREAM:
                same = seccomp.Arg(0, seccomp.EQ, family)
                program.add_rule(refused, "socket", same, seccomp.Arg(1, seccomp.MASKED_EQ, _SOCKET_TYPE, kind))
    # MPTCP is no TCP for Landlock.
    program.add_rule(refused, "socket", seccomp.Arg(2, seccomp.GT, socket.IPPROTO_TCP))
