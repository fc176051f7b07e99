"""Program in a bubblewrap sandbox that becomes the agent's: opens the listeners of services, hands them to the relay outside, and goes.

In: `STARTED CONTROL ADDRESSES COMMAND...`: the name of the variable that names a file's descriptor, an inherited socket, loopback addresses
`HOST:PORT` with commas, and the command that it becomes. It runs isolated and, as the supervisor, imports nothing that is written in
Python. Invariant: the listeners take connections before the command begins; the file holds `1` only if it has begun; the command inherits
nothing of all this.
"""

import _signal  # pyright: ignore[reportMissingImports]  # it has no stub
import _socket
import os
import sys

_BACKLOG = 128


def main() -> None:
    """Hand over the listeners, then become the command."""
    variable, control, addresses, command = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:]
    started = int(os.environ.pop(variable, -1))
    relay = _socket.socket(fileno=control)
    if addresses:
        _hand_over(relay, addresses.split(","))
    relay.close()
    try:
        if started >= 0:
            os.set_inheritable(started, False)
            os.pwrite(started, b"1", 0)
        # Python ignores it, a library of a worker may block it, and the command would inherit both.
        _signal.signal(_signal.SIGPIPE, _signal.SIG_DFL)
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, (_signal.SIGPIPE,))
        os.execvp(command[0], command)
    except OSError as error:
        if started >= 0:
            os.pwrite(started, b"0", 0)
        sys.exit(f"{command[0]}: {error.strerror}")


def _hand_over(relay: _socket.socket, addresses: list[str]) -> None:
    ports: list[str] = []
    listeners: list[_socket.socket] = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        listener = _socket.socket(_socket.AF_INET6 if ":" in host else _socket.AF_INET, _socket.SOCK_STREAM)
        listener.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        listener.bind((host, int(port)))
        listener.listen(_BACKLOG)
        ports.append(port)
        listeners.append(listener)
    rights = b"".join(listener.fileno().to_bytes(4, sys.byteorder) for listener in listeners)
    relay.sendmsg([",".join(ports).encode()], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])


if __name__ == "__main__":
    main()
