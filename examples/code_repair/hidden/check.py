"""Hidden tests: compare functions of a repository with those that they should be, for arguments that no visible test has to have.

In: the repository's directory; on the standard input `{"right": {module: [parameters, operation, operands]}, "seed"}`. Out: exit code 0 if
all agree. Invariant: the repository's code runs in child processes, which end without a say on the result.
"""

import json
import operator
import os
import random
import sys

OPERATIONS = {
    "sum": operator.add,
    "difference": operator.sub,
    "product": operator.mul,
    "quotient": operator.floordiv,
    "larger": max,
    "smaller": min,
    "at_least": operator.ge,
    "above": operator.gt,
}
CASES = 24


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
    """Exit with 0 if all functions agree with the right ones."""
    given = json.load(sys.stdin)
    rng = random.Random(given["seed"])
    for name, (parameters, operation, operands) in given["right"].items():
        cases = [[rng.randint(1, 9) for _ in parameters] for _ in range(CASES)]
        cases += [[n] * len(parameters) for n in (1, 7)]  # where comparisons differ
        places = [parameters.index(operand) for operand in operands]
        right = [OPERATIONS[operation](*(case[place] for place in places)) for case in cases]
        if values(sys.argv[1], name, cases) != right:
            sys.exit(1)


if __name__ == "__main__":
    main()
