"""Connection of a process to a Ray cluster: a quick refusal where none answers, and the process's own handler of SIGTERM.

In: an address. Out: a connection, or an error that names the address. Invariant: Ray is imported when a connection is made, not before.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Generator

_PROBE_SECONDS = 5.0
_CLIENT = "ray://"


def connect_to_ray(address: str) -> None:
    """Connect this process to an existing cluster.

    Args:
        address: HOST:PORT of the cluster's head, `auto` for the one of this machine, or ray://HOST:PORT.

    Raises:
        ConnectionError: no cluster answers there, or it refuses this process.
        ImportError: Ray is not installed.
    """
    import ray

    host, _, port = address.removeprefix(_CLIENT).rpartition(":")
    if host and port.isdigit():
        # Ray itself would try again for minutes, and write a dozen lines.
        try:
            socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS).close()
        except OSError as error:
            raise ConnectionError(f"nothing answers at {host}:{port}: {error}") from error
    try:
        with signals_kept():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray has no family of errors for this
        raise ConnectionError(first_line(error)) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; Ray's have many."""
    return str(error).strip().split("\n")[0]


@contextlib.contextmanager
def signals_kept() -> Generator[None]:
    """Restore the handler of SIGTERM, which Ray replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:  # by Ray's handler, of a signal that was meant for ours
        signal.signal(signal.SIGTERM, handler)
        signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, handler)
