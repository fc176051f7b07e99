"""Directory of a supervisor's run: one owner at a time, and a status that other processes read.

Invariant: the lock is the kernel's, so that it ends with its owner, however that ends; a status counts only while its owner lives;
services of an owner that was killed have ended before the next one begins.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from spangrad.errors import JSON_ERRORS, SpangradError
from spangrad.leases import is_dead, is_here, pid_of, shown, this_process
from spangrad.processes import kill_group, lock_alone, make_private
from spangrad.supervisor.service import ServiceState

LOCK = ".spangrad-run"
"""Name of the file that marks a directory as a run's; its owner holds a lock on it and has written into it which process it is."""
CLEARED = ".spangrad-cleared"
"""Name of the file that marks a directory whose files are all of a run that may clear it: `spangrad up` keeps those that it finds."""
STATUS = "status.json"
PREDECESSOR_SECONDS = 15.0
"""Time in seconds in which services of an owner that was killed must have ended once they are killed."""
_LOCK_SECONDS = 0.5
"""Time in which a lock that is no owner's is released, in seconds: `owner_of` locks the file for a moment."""
_POLL_SECONDS = 0.05
logger = logging.getLogger(__name__)


class RunDirectory:
    """A directory whose owner is this process, from `__enter__` to `__exit__`."""

    def __init__(self, path: Path) -> None:
        """Store the path; `__enter__` takes the directory."""
        self.path = path
        self._lock: IO[str] | None = None
        self._problem = ""
        """Reason for which the status was not written. Empty: it was."""

    def __enter__(self) -> Self:
        """Create the directory and become its owner.

        Raises:
            SpangradError: another process owns it, or it cannot be made, locked or written.
        """
        try:
            make_private(self.path)
            lock = (self.path / LOCK).open("a+")
        except OSError as error:
            raise SpangradError(f"{self.path} cannot be the directory of a run ({error.strerror}). Name another directory.") from error
        with ExitStack() as unlocking:
            unlocking.callback(lock.close)
            end = time.monotonic() + _LOCK_SECONDS
            while not (locked := lock_alone(lock, str(self.path / LOCK), SpangradError)) and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)
            if not locked:
                lock.seek(0)
                owner = lock.read()
                raise SpangradError(
                    f"{shown(owner) if owner else 'another process'} runs in {self.path} already. Stop it (`spangrad down` ends what"
                    " `spangrad up` started), or name another directory."
                )
            try:
                os.truncate(lock.fileno(), 0)
                os.write(lock.fileno(), this_process().encode())
            except OSError as error:
                raise SpangradError(
                    f"{self.path / LOCK} cannot be written ({error.strerror}). Free space, or name another directory."
                ) from error
            self._await_predecessors()
            unlocking.pop_all()
        self._lock = lock
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._lock:
            (self.path / STATUS).unlink(missing_ok=True)
            self._lock.close()

    def _await_predecessors(self) -> None:
        """Wait until the services of an owner that was killed have ended, as the kernel told them to; until then they hold their ports.

        Their grace is as long as the owner would have given them, and then they are killed, too.
        """
        # Of another boot, container or machine, none has a port or a process of this one.
        running = [service for service in _status(self.path)["services"] if is_here(service.get("holder", ""))]
        # An interrupted wait leaves them to the next owner.
        self.publish({"services": [{**service, "state": ServiceState.STOPPING} for service in running], "ready": False})
        self.require_published()
        grace = time.monotonic() + max((service["grace_seconds"] for service in running), default=0.0)
        logged = False
        while running := [service for service in running if not is_dead(service["holder"])]:
            names = ", ".join(f"{service['name']} ({shown(service['holder'])})" for service in running)
            if not logged:
                logger.warning("waiting for services of an earlier run in %s, which was killed: %s", self.path, names)
                logged = True
            if time.monotonic() > grace + PREDECESSOR_SECONDS:
                raise SpangradError(
                    f"services of an earlier run in {self.path}, which was killed, do not end: {names}. Stop these processes with"
                    " `kill -9`, or name another directory."
                )
            if time.monotonic() > grace:
                for service in running:
                    with suppress(PermissionError):  # it is another user's
                        kill_group(pid_of(service["holder"]))
            time.sleep(_POLL_SECONDS)
        (self.path / STATUS).unlink(missing_ok=True)

    def clear(self) -> None:
        """Mark the directory as one that may be cleared, and delete everything else in it but the lock."""
        (self.path / CLEARED).touch()
        for entry in self.path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name not in {LOCK, CLEARED}:
                entry.unlink()

    def publish(self, status: Mapping[str, object]) -> None:
        """Replace the status that other processes read; where that fails, log it once, since services go on without."""
        temporary = self.path / f"{STATUS}.new"
        try:
            temporary.write_text(json.dumps(status))
            temporary.replace(self.path / STATUS)
        except OSError as error:
            if not self._problem:
                logger.warning("the status in %s cannot be written (%s), and stays as it was", self.path / STATUS, error.strerror)
            self._problem = error.strerror or str(error)
        else:
            self._problem = ""

    def require_published(self) -> None:
        """Raise if the newest status was not written: others would neither see the services nor that they are ready.

        Raises:
            SpangradError: it was not.
        """
        if self._problem:
            raise SpangradError(f"{self.path / STATUS} cannot be written ({self._problem}). Free space, or name another directory.")


def fresh_directory(path: Path) -> RunDirectory:
    """Return a run's directory that is new, or is empty, or was cleared by an earlier run; the caller enters it, then clears it.

    Raises:
        SpangradError: the directory is not empty, and no earlier run cleared it.
    """
    if path.is_dir() and any(entry.name != LOCK for entry in path.iterdir()) and not (path / CLEARED).exists():
        raise SpangradError(f"{path} is not empty, and not of an earlier run that may be deleted. Name another --directory.")
    return RunDirectory(path)


def owner_of(path: Path) -> str | None:
    """Return the process that owns a run's directory, as `spangrad.leases` knows it. None: none does, or has not written so yet.

    Raises:
        SpangradError: the directory is closed to this user.
    """
    try:
        with (path / LOCK).open("r") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = lock.read()
                return owner if owner and not is_dead(owner) else None
            except OSError:
                pass  # no process can own it on a file system without locks
    except (FileNotFoundError, NotADirectoryError):
        pass
    except PermissionError as error:
        raise SpangradError(
            f"{path.absolute()} cannot be read ({error.strerror}): the run is another user's. Call this as that user, or set up.directory."
        ) from error
    return None


def none_runs(path: Path) -> SpangradError:
    """Return the error of a command that needs an owner of a run's directory, where there is none."""
    return SpangradError(
        f"no `spangrad up` runs in {path.absolute()}. Call this in the directory where it was started, or set up.directory to its"
        " absolute path."
    )


def status_of(path: Path) -> dict[str, Any] | None:
    """Return the status that the owner of a run's directory published last. None: no process owns it.

    Raises:
        SpangradError: the directory is closed to this user.
    """
    return None if owner_of(path) is None else _status(path)


def _status(path: Path) -> dict[str, Any]:
    try:
        return json.loads((path / STATUS).read_text())
    except (FileNotFoundError, *JSON_ERRORS):  # a power failure may leave the file empty
        return {"services": []}
