"""Confinement of the store's process to its own directory and to what programs need, by Linux's Landlock where the kernel has it.

In: the store's directory. Out: a process that cannot open anything else, and whose secrets are in no file. Invariant: the confinement does
not depend on the text of a statement: the database has functions that read files by any name, and a name can be composed of pieces.

It holds for the calling thread and for all that it starts, so that it comes before the database is opened.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

logger = logging.getLogger(__name__)

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""System calls, the same on every architecture that has them."""
_ONLY_VERSION, _PATH_BENEATH, _NO_NEW_PRIVILEGES = 1, 1, 38
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIRECTORY, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_READ = _EXECUTE | _READ_FILE | _READ_DIRECTORY
_SINCE = {2: (1 << 14) - 1, 3: (1 << 15) - 1}
"""Version of Landlock -> mask of the accesses that it can forbid; version 1 is left out, as it forbids all moves between directories."""
_PACKAGES = Path(__file__).parents[1]
_READABLE = (
    *(Path(sys.prefix), Path(sys.base_prefix)),
    *(_PACKAGES / name for name in ("collector", "spangrad", "commands")),
    *map(Path, ("/usr", "/lib", "/lib64", "/proc", "/sys", "/dev/urandom", "/dev/random", "/dev/zero")),
    # Names of hosts, time zones and libraries; nothing of users.
    *(
        Path("/etc", name)
        for name in ("localtime", "timezone", "ld.so.cache", "hosts", "host.conf", "resolv.conf", "nsswitch.conf", "gai.conf")
    ),
)
_WRITABLE = (Path("/dev/null"),)
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|KEY|HEADERS", re.IGNORECASE)


def confine(directory: Path) -> bool:
    """Restrict the process to a directory and to what programs need to run; return whether the kernel enforces it.

    The directory must exist; temporary files go into it as well.
    """
    _forget_secrets()
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _ONLY_VERSION)
    if version < min(_SINCE):
        logger.warning(
            "this kernel has no Landlock (Linux 5.19 and later, where it is not switched off): that statements read no files of this "
            "machine rests on what they say alone. Give the read token only to users who may read what this process can."
        )
        return False
    handled = _SINCE[min(version, max(_SINCE))]
    rules = _checked(libc.syscall(_CREATE_RULESET, struct.pack("Q", handled), ctypes.c_size_t(8), 0))
    try:
        _allow(libc, rules, _READABLE, _READ)
        _allow(libc, rules, (directory, *_WRITABLE), handled)
        _checked(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
        _checked(libc.syscall(_RESTRICT_SELF, rules, 0))
    finally:
        os.close(rules)
    os.environ["TMPDIR"] = str(directory)
    return True


def _allow(libc: ctypes.CDLL, rules: int, paths: Iterable[Path], access: int) -> None:
    """Allow access to paths, and to what is beneath them; missing paths are left out."""
    for path in paths:
        try:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            allowed = access if path.is_dir() else access & _OF_FILES
            _checked(libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", allowed, opened), 0))
        finally:
            os.close(opened)


def _forget_secrets() -> None:
    """Overwrite secrets in the process's initial environment, which /proc/self/environ shows. Python keeps its own copy."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    for name, value in os.environb.items():
        if _SECRET.search(name.decode(errors="replace")) and (address := libc.getenv(name)):
            ctypes.memset(address, 0, len(value))


def _checked(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"Landlock: {os.strerror(error)}")
    return result
