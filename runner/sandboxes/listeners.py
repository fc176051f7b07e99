"""Program in a sandbox's own network, before the agent's: opens the listeners of services, hands them to the relay outside, and goes.

In: `CONTROL PORTS COMMAND...`: an inherited socket, ports with commas, and the command that it becomes. It imports the standard library
alone and runs isolated. Invariant: the listeners take connections before the command begins, and the command inherits neither them nor the
socket.
"""

import os
import socket
import sys

_BACKLOG = 128


def main() -> None:
    """Hand over the listeners, then run the command."""
    control, ports, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    listeners: list[socket.socket] = []
    for port in ports.split(","):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", int(port)))
        listener.listen(_BACKLOG)
        listeners.append(listener)
    with socket.socket(fileno=control) as relay:
        socket.send_fds(relay, [ports.encode()], [listener.fileno() for listener in listeners])
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
