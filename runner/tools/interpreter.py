"""Program in a sandbox that runs Python code in one namespace, piece by piece, as a notebook does.

In, on descriptor 3: pieces, each ended by a NUL. Out, on the standard output: what they print, the value of a last expression, tracebacks;
then on descriptor 4 the status, the working directory and a NUL; then on the standard output the marker that is the argument. Invariant: an
interruption reaches pieces alone, so that each has its status and its marker. It imports the standard library alone.
"""

import ast
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 2**16


def main() -> None:
    """Run pieces until there are no more."""
    marker = sys.argv[1].encode()
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    sys.path.insert(0, str(Path.cwd()))
    sys.stdin = Path(os.devnull).open()  # noqa: SIM115
    interruption = _ignore_interruptions()
    rest = b""
    while True:
        while b"\0" not in rest:
            if not (data := os.read(3, _CHUNK_BYTES)):
                return
            rest += data
        piece, _, rest = rest.partition(b"\0")
        try:
            signal.signal(signal.SIGINT, interruption)
            status = _run(piece.decode(errors="surrogateescape"), namespace)
            sys.stdout.flush()
            sys.stderr.flush()
        except KeyboardInterrupt:
            status = 1
        interruption = _ignore_interruptions()
        os.write(4, b"%d %s\0" % (status, _directory()))
        os.write(1, marker)


def _ignore_interruptions() -> Any:
    """Ignore interruptions from now on, and return their handler, which a piece may have set."""
    while True:
        try:
            return signal.signal(signal.SIGINT, signal.SIG_IGN) or signal.default_int_handler
        except KeyboardInterrupt:  # it came just before
            pass


def _directory() -> bytes:
    """Return the working directory; empty if it has been deleted."""
    try:
        return os.fsencode(Path.cwd())
    except OSError:
        return b""


def _run(code: str, namespace: dict[str, Any]) -> int:
    """Run a piece, show the value of its last expression, and return 1 if it raised."""
    try:
        tree = ast.parse(code, "<tool>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<tool>", "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<tool>", "eval"), namespace)
            if value is not None:
                print(repr(value))
    except BaseException as error:  # exit and an interruption end the piece, not the interpreter
        own = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, own)
        return 1
    return 0


if __name__ == "__main__":
    main()
