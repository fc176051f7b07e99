"""`spangrad`: parses the command line first, and imports what a command needs only once it is known.

In: argv. Out: an exit code. Invariant: `spangrad --help` loads nothing heavy, and an error that a user can mend is one
sentence on stderr, never a traceback.
"""

from __future__ import annotations

import os
import signal
import sys

from cyclopts import App

from spangrad import __version__
from spangrad.errors import SpangradError

COMMANDS = {
    "store": "Run the embedded span store: OTLP in, ClickHouse's HTTP interface out.",
    "collector": "Run the OpenTelemetry Collector in front of the store, with a queue on disk.",
    "engine": "Run vLLM in its own environment, ready to take new weights.",
    "gateway": "Run the recording gateway in front of the engine.",
    "backends": "Look at the backends of a running gateway, add and remove them.",
    "build": "Build transitions from complete rollouts, once or as they finish.",
    "export": "Write transitions and their texts as files for other tools.",
    "train": "Train on finished groups of rollouts, once or as they finish.",
    "tune": "Train on files: supervised (SFT) or on preferences (DPO).",
    "policy": "Look at policy versions, publish one, go back to one, keep one.",
    "lineage": "What a policy version was made from, and what a span has made.",
    "environments": "Serve environments for agents to work in, leased to one attempt at a time.",
    "queue": "Serve the queue of rollouts; look at them, cancel them, retry the dead.",
    "run": "Run an agent on tasks, several rollouts a task.",
    "worker": "Run an agent on the rollouts that a queue hands out.",
    "prompt": "Prompts that agents fetch: keep versions of them, look for better ones.",
    "demo": "See the whole loop learn, on this machine.",
    "sql": "Ask the span store a question in SQL.",
    "rewards": "Look at rewards, and define new ones over spans that are there already.",
    "rollout": "Look at one rollout: its tree of spans, and why it was or was not trained.",
    "inspect": "Build files of spans in a store of their own, and say what became of each call.",
    "schema": "Bring the span store's tables up to date, show them, expire old rows.",
    "config": "Print the resolved settings and where each value came from.",
}

app = App(name="spangrad", version=__version__, help="Train the language model inside any agent, from the spans that it already emits.")
for _name, _help in COMMANDS.items():
    app.command(f"commands.{_name}:{_name}", name=_name, help=_help)


def main() -> None:
    """Entry point of the console script."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read what we print has enough: `| head`. The interpreter would complain of what is still unwritten.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except SpangradError as error:
        print(f"spangrad: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
