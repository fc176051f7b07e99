"""Program that stays in a sandbox and acts there for the process outside: starts and ends programs, opens files, connects to ports.

In: requests on an inherited socket, a JSON object a message, `{"id", "do", ...}` with the descriptors that it needs. Out: an answer for
each, `{"id"}` with `error` and `errno` or with the descriptor that was opened, and `{"ended": process, "code"}` when a program has ended.
It imports the standard library alone and runs isolated. Invariant: paths of requests are looked up inside, so a link leads nowhere else;
contents go through descriptors, never through messages.
"""

import fcntl
import json
import os
import selectors
import socket
import stat
import sys
import termios
from typing import Any

_MESSAGE_BYTES, _MOST_DESCRIPTORS = 2**18, 8
_CHUNK_BYTES = 2**20


class SandboxSupervisor:
    """Answers requests until the other end of its socket is closed."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._programs: dict[int, int] = {}
        """Descriptors that become readable when a program ends, by its process."""

    def serve(self) -> None:
        """Answer requests; when there are no more, this process ends, and the sandbox with it."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._control:
                    self._end(key.data)
                elif not self._answer():
                    return

    def _answer(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES, _MOST_DESCRIPTORS)
        if not data:
            return False
        request = json.loads(data)
        opened: list[int] = []
        try:
            answer = getattr(self, "do_" + request["do"])(request, descriptors, opened)
        except OSError as error:
            answer = {"error": error.strerror or str(error), "errno": error.errno}
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        socket.send_fds(self._control, [json.dumps({"id": request["id"], **answer}).encode()], opened)
        for descriptor in opened:
            os.close(descriptor)
        return True

    def do_start(self, request: dict[str, Any], descriptors: list[int], opened: list[int]) -> dict[str, Any]:
        """Start a program in a session of its own, with the descriptors as its first ones; `terminal`: its output is its terminal."""
        del opened
        read_end, write_end = os.pipe()  # closed by exec: whatever comes before it is the reason for which it failed
        if not (pid := os.fork()):
            try:
                os.setsid()
                if request.get("terminal"):
                    fcntl.ioctl(descriptors[1], termios.TIOCSCTTY, 0)
                for number, descriptor in enumerate(descriptors):
                    os.dup2(descriptor, number)
                if request["directory"] is not None:
                    os.chdir(request["directory"])
                command = request["command"]
                os.execvpe(command[0], command, {**os.environ, **request["environment"]})
            except OSError as error:
                os.write(write_end, (error.strerror or str(error)).encode())
            os._exit(127)
        os.close(write_end)
        reason = os.read(read_end, 4096).decode()
        os.close(read_end)
        if reason:
            os.waitpid(pid, 0)
            return {"error": f"{request['command'][0]}: {reason}"}
        self._programs[pid] = os.pidfd_open(pid)
        self._selector.register(self._programs[pid], selectors.EVENT_READ, pid)
        return {"process": pid}

    def do_kill(self, request: dict[str, Any], descriptors: list[int], opened: list[int]) -> dict[str, Any]:
        """Send a signal to a program's session."""
        del descriptors, opened
        if request["process"] in self._programs:
            try:
                os.killpg(request["process"], request["signal"])
            except ProcessLookupError:
                pass  # it has ended, and will be reported
        return {}

    def do_open(self, request: dict[str, Any], descriptors: list[int], opened: list[int]) -> dict[str, Any]:
        """Open a regular file to read."""
        del descriptors
        descriptor = os.open(request["path"], os.O_RDONLY | os.O_NONBLOCK)
        opened.append(descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(opened.pop())
            return {"error": "it is no regular file"}
        return {}

    def do_write(self, request: dict[str, Any], descriptors: list[int], opened: list[int]) -> dict[str, Any]:
        """Write the content of a descriptor to a file, in directories that are created as they are needed."""
        del opened
        path = request["path"]
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)  # noqa: PTH103, PTH120  # pathlib takes long to import
        with open(path, "wb") as file:  # noqa: PTH123
            while data := os.read(descriptors[0], _CHUNK_BYTES):
                file.write(data)
        return {}

    def do_connect(self, request: dict[str, Any], descriptors: list[int], opened: list[int]) -> dict[str, Any]:
        """Connect to a port of the sandbox's loopback."""
        del descriptors
        with socket.create_connection(("127.0.0.1", request["port"])) as connection:
            opened.append(os.dup(connection.fileno()))
        return {}

    def _end(self, pid: int) -> None:
        """Report a program that has ended."""
        descriptor = self._programs.pop(pid)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._control.send(json.dumps({"ended": pid, "code": code}).encode())


def main() -> None:
    """Serve the socket whose descriptor is the argument."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    with socket.socket(fileno=descriptor) as control:
        control.send(json.dumps({"ready": True, "home": os.environ["HOME"]}).encode())
        SandboxSupervisor(control).serve()


if __name__ == "__main__":
    main()
