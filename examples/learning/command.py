"""Command line of an example: seed, steps and directory in, a line of JSON out, and an end by Ctrl-C or SIGTERM.

In: a name, and a function that runs the example. Out: its report as the last line, or an error's sentence and exit code.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from spangrad.errors import SpangradError
from spangrad.processes import end_by_interrupt


def run_command(
    name: str,
    steps: int,
    run: Callable[[Path, int, int], Mapping[str, object]],
    options: Sequence[str] | None = None,
    parents: Sequence[argparse.ArgumentParser] = (),
    description: str | None = None,
) -> None:
    """Read the command line of an example, run it, and print what it reports.

    Args:
        name: of the example, which names its module and its directory.
        steps: training steps unless the command line says otherwise.
        run: runs the example: (directory, seed, steps) -> report.
        options: the command line without what `parents` have read. None: the process's own.
        parents: the example's own options, for --help.
        description: text of --help.
    """
    parser = argparse.ArgumentParser(prog=f"python -m examples.{name}", description=description, parents=list(parents))
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn: questions or openings, model, sampling")
    parser.add_argument("--steps", type=int, default=steps, help=f"training steps (default {steps})")
    parser.add_argument("--directory", type=Path, default=Path("runs") / name, help="where the run's files go; emptied at the start")
    arguments = parser.parse_args(options)
    end_by_interrupt()
    try:
        print(json.dumps(run(arguments.directory, arguments.seed, arguments.steps)), flush=True)
    except SpangradError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
