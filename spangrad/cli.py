"""Command line of `spangrad`: parses first, and imports what a command needs only once the command is known.

In: argv. Out: an exit code. Invariant: `spangrad --help` loads nothing heavy, and an error that a user can fix is one
sentence on stderr, never a traceback.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from io import TextIOWrapper

from cyclopts import App, Group

from spangrad import __version__
from spangrad.errors import SpangradError

_MODULES = {
    "Services": {
        "commands.services.init": "Probe machine and model, write a settings file.",
        "commands.services.up": "Start all services under one supervisor.",
        "commands.services.down": "Stop what `spangrad up` started.",
        "commands.services.ps": "Show what `spangrad up` runs.",
        "commands.services.store": "Run the span store: OTLP in, ClickHouse over HTTP out.",
        "commands.services.collector": "Run the OpenTelemetry Collector before the store.",
        "commands.services.engine": "Run vLLM in its own environment, ready to take new weights.",
        "commands.services.gateway": "Run the recording gateway in front of the engine.",
        "commands.services.backends": "Show, add and remove backends of a running gateway.",
        "commands.services.queue": "Serve the queue of rollouts; show, cancel, retry them.",
        "commands.training.env": "Serve environments with reset and step, by OpenEnv's protocol.",
        "commands.tools": "Serve shell, Python and file tools in a sandbox, by MCP.",
        "commands.services.environments": "Serve environments, leased to one attempt at a time.",
    },
    "Training": {
        "commands.training.plan": "Plan memory, time and settings of a run on any GPUs.",
        "commands.training.run": "Run an agent on tasks, several rollouts a task.",
        "commands.training.play": "Play an episode of an environment in the terminal.",
        "commands.training.worker": "Run an agent on the rollouts that a queue hands out.",
        "commands.training.build": "Build transitions from complete rollouts, once or as they finish.",
        "commands.training.train": "Train on finished groups of rollouts, once or as they finish.",
        "commands.training.finetune": "Train on files: supervised (SFT) or on preferences (DPO).",
        "commands.training.policy": "List policy versions; publish, restore, pin one.",
        "commands.demo": "Run the whole loop on this machine until it has learned.",
    },
    "Inspect": {
        "commands.inspection.page": "Serve the web page: rollouts, calls token by token, steps.",
        "commands.inspection.watch": "Show the overview and the rollouts in the terminal, live.",
        "commands.inspection.rollout": "Show a rollout's spans, and why it was trained or not.",
        "commands.inspection.lineage": "Show a version's spans, or a span's versions.",
        "commands.inspection.sql": "Query the span store in SQL.",
        "commands.inspection.inspect": "Build files of spans, and report on each call.",
        "commands.inspection.config": "Print the settings and where each value came from.",
    },
    "Data and prompts": {
        "commands.data.export": "Write transitions and their texts as files for other tools.",
        "commands.data.rewards": "Show rewards, and define new ones over stored spans.",
        "commands.data.schema": "Migrate and show the store's tables, expire old rows.",
        "commands.prompts.prompt": "Keep versions of agents' prompts, search better ones.",
    },
}
"""Group -> module of a command -> help of the command. The command, and its function in the module, have the module's name."""

_OPTIONAL = ("prompts", "commands.prompts")
"""Packages that an installation may lack; the extra that brings them is named like the last part."""

app = App(name="spangrad", version=__version__, help="Train the language model inside any agent, from the spans that it already emits.")
for _place, (_group_name, _commands) in enumerate(_MODULES.items()):
    _group = Group(_group_name, sort_key=_place)
    for _module, _help in _commands.items():
        _name = _module.rpartition(".")[2]
        app.command(f"{_module}:{_name}", name=_name, help=_help, group=_group)


def main() -> None:
    """Entry point of the console script."""
    # None where it is closed: no file or socket may get its number, at which children write.
    sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal's encoding may lack what a text holds
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output has closed the pipe: `| head`.
        _drop_output()
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _drop_output()
        print(f"spangrad: {error}. Free space on the disk, of the output or of the files of this command.", file=sys.stderr)
        sys.exit(1)
    except SpangradError as error:
        print(f"spangrad: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        package = next((name for name in _OPTIONAL if f"{error.name}.".startswith(f"{name}.")), None)
        if package is None:
            raise
        extra = package.rpartition(".")[2]
        print(f"spangrad: {error}. Install the part: pip install 'spangrad-server[{extra}]'.", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _drop_output() -> None:
    """Write what is still unwritten nowhere: the interpreter would complain of it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
