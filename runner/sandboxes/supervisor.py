"""Program that stays in a sandbox and acts there for the process outside: starts and ends programs, opens files, connects to ports.

In: requests on an inherited socket, a message each: a number, what to do, and its arguments, with the descriptors that it needs. Out: an
answer for each, the number with `ok` and a value, or with `error`, its errno and its text, and with the descriptor that was opened;
`ended`, a process and its exit code when a program has ended. Invariant: paths of requests are looked up inside, so a link leads nowhere
else; contents go through descriptors, never through messages.

Each sandbox starts it: it imports nothing that is written in Python, since json, socket, selectors and typing would take twice the time of
all the rest. `_signal` and `_socket` are the modules behind signal and socket.
"""

import _signal  # pyright: ignore[reportMissingImports]  # it has no stub
import _socket
import fcntl
import os
import select
import stat
import sys
import termios

MESSAGE_BYTES = 3 * 2**16
"""Longest message; a socket takes 200 kB by default."""
SEPARATOR = b"\0"
"""Byte between the fields of a message: no path, word of a command or variable can hold it."""
_MOST_DESCRIPTORS = 8
_CHUNK_BYTES = 2**20


class SandboxSupervisor:
    """Answers requests until the other end of its socket is closed."""

    def __init__(self, control: _socket.socket) -> None:
        self._control = control
        self._poll = select.poll()
        self._poll.register(control.fileno(), select.POLLIN)
        self._programs: dict[int, int] = {}
        """Processes of programs, by the descriptor that becomes readable when one ends."""

    def serve(self) -> None:
        """Answer requests; when there are no more, this process ends, and the sandbox with it."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._programs:
                    self._end(descriptor)
                elif not self._answer():
                    return

    def _answer(self) -> bool:
        data, ancillary, _, _ = self._control.recvmsg(MESSAGE_BYTES, _socket.CMSG_SPACE(4 * _MOST_DESCRIPTORS))
        if not data:
            return False
        descriptors = [descriptor for _, _, rights in ancillary for descriptor in memoryview(rights).cast("i")]
        number, do, *arguments = data.split(SEPARATOR)
        opened: list[int] = []
        try:
            answer = b"ok", getattr(self, "do_" + do.decode())(arguments, descriptors, opened)
        except OSError as error:
            answer = b"error", b"%d" % (error.errno or 0), os.fsencode(error.strerror or str(error))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        rights = b"".join(descriptor.to_bytes(4, sys.byteorder) for descriptor in opened)
        self._send(number, *answer, rights=rights)
        for descriptor in opened:
            os.close(descriptor)
        return True

    def _send(self, *fields: bytes, rights: bytes = b"") -> None:
        self._control.sendmsg([SEPARATOR.join(fields)], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)] if rights else [])

    def do_start(self, arguments: list[bytes], descriptors: list[int], opened: list[int]) -> bytes:
        """Start a program in a session of its own, with the descriptors as its first ones, and return its process.

        Arguments: `terminal` where its output is its terminal, its directory or nothing, the number of its words, words, variables.
        """
        del opened
        terminal, directory, count, *rest = arguments
        words, variables = rest[: int(count)], rest[int(count) :]
        read_end, write_end = os.pipe()  # closed by exec: whatever comes before it is the reason for which it failed
        try:
            pid = os.fork()
        except OSError:
            os.close(read_end)
            os.close(write_end)
            raise
        if not pid:
            try:
                os.setsid()
                # Python ignores it, a library may block it, and programs would inherit both.
                _signal.signal(_signal.SIGPIPE, _signal.SIG_DFL)
                _signal.pthread_sigmask(_signal.SIG_UNBLOCK, (_signal.SIGPIPE,))
                if terminal:
                    fcntl.ioctl(descriptors[1], termios.TIOCSCTTY, 0)
                for number, descriptor in enumerate(descriptors):
                    os.dup2(descriptor, number)
                if directory:
                    os.chdir(directory)
                added = {name: value for name, _, value in (variable.partition(b"=") for variable in variables)}
                os.execvpe(words[0], words, {**os.environb, **added})
            except OSError as error:
                os.write(write_end, b"%d " % (error.errno or 0) + os.fsencode(error.strerror or str(error)))
            os._exit(127)
        os.close(write_end)
        number, _, reason = os.read(read_end, 4096).partition(b" ")
        os.close(read_end)
        if reason:
            os.waitpid(pid, 0)
            raise OSError(int(number), os.fsdecode(words[0] + b": " + reason))
        descriptor = os.pidfd_open(pid)
        self._programs[descriptor] = pid
        self._poll.register(descriptor, select.POLLIN)
        return b"%d" % pid

    def do_kill(self, arguments: list[bytes], descriptors: list[int], opened: list[int]) -> bytes:
        """Send a signal to a program's session: its process, the signal's number."""
        del descriptors, opened
        process, signal = map(int, arguments)
        if process in self._programs.values():
            try:
                os.killpg(process, signal)
            except ProcessLookupError:
                pass  # it has ended, and will be reported
        return b""

    def do_open(self, arguments: list[bytes], descriptors: list[int], opened: list[int]) -> bytes:
        """Open a regular file to read: its path."""
        del descriptors
        opened.append(_open_regular(arguments[0], os.O_RDONLY))
        return b""

    def do_write(self, arguments: list[bytes], descriptors: list[int], opened: list[int]) -> bytes:
        """Write the content of a descriptor to a regular file, its path, in directories that are created as they are needed."""
        del opened
        (path,) = arguments
        os.makedirs(os.path.dirname(path) or b".", exist_ok=True)  # noqa: PTH103, PTH120  # pathlib takes long to import
        with open(_open_regular(path, os.O_WRONLY | os.O_CREAT), "wb") as file:
            file.truncate()
            while data := os.read(descriptors[0], _CHUNK_BYTES):
                file.write(data)
        return b""

    def do_connect(self, arguments: list[bytes], descriptors: list[int], opened: list[int]) -> bytes:
        """Connect to a port of the sandbox's loopback."""
        del descriptors
        connection = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            connection.connect(("127.0.0.1", int(arguments[0])))
        except BlockingIOError:
            pass  # a server that is busy takes it later: who uses the connection waits for that, and not this program
        opened.append(connection.detach())
        return b""

    def _end(self, descriptor: int) -> None:
        pid = self._programs.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        self._send(b"ended", b"%d" % pid, b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _open_regular(path: bytes, flags: int) -> int:
    """Open a regular file; a pipe would wait for its other end, and hold up this program, and with it the sandbox."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is no regular file")
    return descriptor


def main() -> None:
    """Serve the socket whose descriptor is the argument."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    control = _socket.socket(fileno=descriptor)
    control.send(SEPARATOR.join((b"ready", os.environb[b"HOME"])))
    SandboxSupervisor(control).serve()


if __name__ == "__main__":
    main()
