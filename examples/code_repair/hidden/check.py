"""Hidden tests: compare what functions of a repository return with what they should, for arguments that no visible test has to have.

In: the repository's directory; on the standard input `{module: [lists of arguments, values]}`. Out: exit code 0 if all agree.
Invariant: the repository's code runs in child processes, which end without a say on the result.
"""

import json
import os
import sys


def values(directory: str, name: str, cases: list[list[int]]) -> list[object]:
    """Return what a module's function returns for each case; nothing where it fails."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        try:
            os.close(reading)
            sys.path.insert(0, directory)
            function = getattr(__import__(name), name)
            os.write(writing, json.dumps([function(*case) for case in cases]).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    try:
        return json.loads(text)
    except ValueError:
        return []


def main() -> None:
    """Exit with 0 if all functions return what they should."""
    for name, (cases, right) in json.load(sys.stdin).items():
        if values(sys.argv[1], name, cases) != right:
            sys.exit(1)


if __name__ == "__main__":
    main()
