"""Rules of a sandbox: files, services and limits of a program in it.

Invariant: a path that is not named, or below one that is, does not exist for the program; its own temporary directory alone is writable.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import span_processors
import spangrad
from runner.sandboxes.images import UnpackedImage
from spangrad.errors import SandboxError
from spangrad.processes import LOOPBACK
from spangrad.types import SandboxRung

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt")
"""Directories of programs and libraries; links are kept as links."""
CONFIGURATION = tuple(
    f"/etc/{name}"
    for name in (
        "alternatives", "ca-certificates", "fonts", "gai.conf", "group", "host.conf", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d",
        "localtime", "mime.types", "nsswitch.conf", "passwd", "pki", "protocols", "services", "ssl", "terminfo",
        "timezone",
    )
)  # fmt: skip
"""Files of /etc that programs need and that hold no secret."""
PRIVATE_DIRECTORY = "/tmp"
"""Private, writable directory in a sandbox: home and temporary directory."""
PRIVATE_VARIABLES: Mapping[str, str] = {"HOME": PRIVATE_DIRECTORY, "TMPDIR": PRIVATE_DIRECTORY, "USER": "agent", "LOGNAME": "agent"}
"""Environment variables of a program in a sandbox that are not those of this process."""
_SYSTEM_INTERPRETER = Path("/usr/bin/python3")
_HOME = re.compile(r"^home\s*=\s*(.+?)\s*$", re.MULTILINE)
NAME_SERVERS = "/etc/resolv.conf"
"""Visible where the program may use this machine's network."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Resources of one sandbox."""

    processes: int
    """Largest number of processes and threads at once."""
    memory_bytes: int
    """Largest data segment of a process: its heap and its private writable memory, in bytes."""
    disk_bytes: int
    """Largest size of a file; and, where the temporary directory is a file system of its own, of all files in it, in bytes."""
    files: int = 1024
    """Largest number of open files of a process."""

    def rlimits(self) -> dict[str, int]:
        """Return the resource limits of its processes, by the part of the names of setrlimit after RLIMIT_."""
        sizes = {"NPROC": self.processes, "DATA": self.memory_bytes, "FSIZE": self.disk_bytes, "NOFILE": self.files}
        return {**sizes, "CORE": 0}


@dataclass(frozen=True, slots=True)
class RemoteServer:
    """Server that is a sandbox, by SWE-ReX's protocol."""

    url: str
    key: str | None = field(default=None, repr=False)
    """API key that it requires. None: it requires none."""


@dataclass(frozen=True, slots=True)
class SandboxPolicy:
    """Rules of a sandbox."""

    directory: Path
    """Working directory, which the program can read."""
    readable: tuple[Path, ...]
    """Files and directories that the program can read, beside those of the system."""
    services: Mapping[int, tuple[str, int]]
    """Services that the program reaches on loopback, by port: the host and port outside."""
    host_network: bool
    """True if the program may use this machine's network; it then reaches the services there."""
    limits: SandboxLimits
    image: UnpackedImage | None = None
    """File system that programs see in place of this machine's programs and libraries. None: they see those."""
    remote: RemoteServer | None = None
    """Server of the rung `remote`. None: there is none."""
    engine: SandboxRung | Literal["auto"] = "auto"
    """Rung that confines programs, other than `none`. Auto: the strongest that works here."""
    least: SandboxRung = SandboxRung.LANDLOCK
    """Weakest rung that `auto` may choose."""

    def visible(self) -> list[Path]:
        """Return the files and directories that exist and are visible beside `SYSTEM`, none below another."""
        fixed = [*(CONFIGURATION if self.image is None else ()), *([NAME_SERVERS] if self.host_network else [])]
        paths = {Path(os.path.normpath(path)) for path in (*map(Path, fixed), self.directory, *self.readable) if path.exists()}
        covered = {*paths, *(map(Path, SYSTEM) if self.image is None else ())}
        return sorted(path for path in paths if not covered & set(path.parents))


def require_narrow(policy: SandboxPolicy) -> None:
    """Refuse directories that would show the program more than its own files.

    Raises:
        SandboxError: the working directory, or a readable one, holds the user's home, or the root of the machine.
    """
    for path in (policy.directory, *policy.readable):
        if _holds_home(path):
            raise SandboxError(
                f"a sandbox would show its program all of {path}, the home directory of this user included. "
                "Start the agent from a directory of its own (--directory), or name narrower ones in runner.sandbox.readable."
            )


def inner_interpreter(image: UnpackedImage | None) -> Path:
    """Return an interpreter that programs in sandboxes can run: the image's; else this one, or the system's where others cannot read this.

    Raises:
        SandboxError: the image has none.
    """
    if image is not None:
        if image.interpreter is None:
            raise SandboxError(f"image {image.digest} has no python3 in its PATH, which a sandbox needs (3.9 or newer). Add it.")
        return image.interpreter
    own = Path(sys.executable)
    readable = os.geteuid() != 0 or is_open_to_others(own)
    return own if readable or not _SYSTEM_INTERPRETER.exists() else _SYSTEM_INTERPRETER


def inner_environment(image: UnpackedImage | None) -> dict[str, str]:
    """Return the environment variables of programs in sandboxes: the image's or this process's own, and those of a private home."""
    names = ("PATH", "LANG", "LC_ALL", "TZ")
    kept = {name: os.environ[name] for name in names if name in os.environ} if image is None else dict(image.variables)
    return {**kept, **PRIVATE_VARIABLES}


def interpreter_paths(program: Path) -> Iterator[Path]:
    """Yield the directories that a program needs of its interpreter's: its virtual environment's, and those of that one's base.

    The program's file is as PATH names it: a link leads to where its libraries are.
    """
    environment = program.parent.parent
    if (configuration := environment / "pyvenv.cfg").is_file():
        yield environment
        if (home := _HOME.search(configuration.read_text())) is not None:
            yield Path(home[1]).resolve().parent
    resolved = program.resolve()
    prefix = resolved.parent.parent
    yield prefix if resolved.parent.name == "bin" and not _holds_home(prefix) else resolved


def _holds_home(path: Path) -> bool:
    home = Path.home()
    return path == home or path in home.parents


def is_open_to_others(path: Path) -> bool:
    """Return whether users other than its owner can read a path, and pass through all directories above it."""
    resolved = path.resolve()
    above = all(parent.stat().st_mode & stat.S_IXOTH for parent in resolved.parents)
    return above and bool(resolved.stat().st_mode & stat.S_IROTH)


def own_packages() -> list[Path]:
    """Return the directories of the packages that instrumented agents import."""
    return [Path(package.__path__[0]).resolve() for package in (spangrad, span_processors)]


def services_of(urls: Sequence[str]) -> dict[int, tuple[str, int]]:
    """Return services by the port under which they are reached.

    Raises:
        SandboxError: a service is not on loopback.
    """
    services: dict[int, tuple[str, int]] = {}
    for url in urls:
        parts = urlsplit(url)
        if parts.hostname not in LOOPBACK:
            raise SandboxError(
                f"agents in a sandbox reach services of this machine alone, and {url} is elsewhere. "
                "Run the worker beside it, or set runner.sandbox.network = host."
            )
        port = parts.port or (443 if parts.scheme == "https" else 80)
        services[port] = (parts.hostname or "", port)
    return services
