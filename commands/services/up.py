"""`spangrad up`: the services of a training loop under one supervisor."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from commands.options import ConfigFile, Overrides, resolve
from commands.output_files import make_directory_of
from commands.training.agents import ProgramArguments, agents_of, command_of, handler_of, require_loadable
from spangrad.errors import SpangradError

if TYPE_CHECKING:
    from pathlib import Path

    from spangrad.settings import Settings
    from spangrad.supervisor.status_text import TrainingProgress

DETACHED_LOG = "up.log"
_POLL_SECONDS = 0.2


def up(
    agent: str | None = None,
    /,
    *arguments: ProgramArguments,
    detach: bool = False,
    queue: bool = False,
    ray: str | None = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Start store, engine, gateway, builder, trainer and page under one supervisor, and show their status until Ctrl-C or `spangrad down`.

    A service that ends is started again after a delay. Each writes a log in up.directory. The queue is started, too, where
    queue.url names it on this machine.

    Args:
        agent: agent to run on rollouts, after `--`: the arguments of `spangrad run --follow-demand` if they name --tasks, else those of
            `spangrad worker`.
        arguments: further words of the agent.
        detach: return once every service is ready, and leave them running.
        queue: start the queue of rollouts on this machine, at queue.port.
        ray: address of an existing Ray cluster on whose nodes the services run: HOST:PORT of its head, `auto` for the one of this machine,
            or ray://HOST:PORT.
    """
    settings = resolve(config, set_)
    overrides = list(set_ or ())
    if queue and settings.queue.url is None:
        overrides.append(f"queue.url=http://127.0.0.1:{settings.queue.port}")
        settings = resolve(config, overrides)
    words = list(command_of(agent, arguments) or settings.up.agent)
    if words:
        from spangrad.cli import app
        from spangrad.client.task_files import HUB, read_tasks
        from spangrad.client.task_store import STORED
        from spangrad.supervisor.training_services import agent_command

        # A wrong option, or an agent or tasks that are not here: refused before anything is started. Nodes of Ray may have other programs.
        _, bound, _ = app.parse_args([agent_command(words), *words])
        if ray is None:
            program, *rest = bound.args or (None,)
            runner = resolve(bound.kwargs.get("config", config), [*overrides, *bound.kwargs.get("set_", ())]).runner
            require_loadable(agents_of(runner, handler_of(program, rest, bound.kwargs.get("options"))), runner)
            tasks = bound.kwargs.get("tasks", STORED)
            if not tasks.startswith((STORED, HUB)):
                read_tasks(tasks)
    if detach:
        options = [*options_of(config, overrides), *(["--ray", ray] if ray else [])]
        _detach(settings, options, words)
    else:
        _supervise(settings, config, overrides, words, ray)


def options_of(config: Path | None, overrides: list[str]) -> list[str]:
    """Return the options with which another command resolves the same settings on this machine."""
    return [*(["--config", str(config)] if config else []), *(word for override in overrides for word in ("--set", override))]


def _supervise(settings: Settings, config: Path | None, overrides: list[str], agent: list[str], ray: str | None) -> None:
    from commands.services.places import on_ray, on_this_machine
    from commands.services.progress import ProgressReader
    from commands.services.status_screen import StatusScreen
    from spangrad.processes import end_by_interrupt
    from spangrad.supervisor.run_directory import RunDirectory
    from spangrad.supervisor.service import RestartPolicy
    from spangrad.supervisor.supervisor import Supervisor

    end_by_interrupt()
    directory = settings.up.directory
    with (
        RunDirectory(directory) as run,
        StatusScreen(directory) as screen,
        (
            on_ray(ray, config, overrides, agent, screen.event) if ray else on_this_machine(settings, options_of(config, overrides), agent)
        ) as placed,
    ):
        progress = ProgressReader(placed.settings)
        is_announced = False
        with Supervisor(placed.services, screen.event, policy=RestartPolicy(), launch=placed.launch) as supervisor:

            def publish(training: TrainingProgress | None = None) -> None:
                status = supervisor.status()
                run.publish({"services": status, "ready": supervisor.were_ready, "addresses": placed.addresses})
                screen.show(status, training)

            try:
                while True:
                    supervisor.poll()
                    publish(progress.newest() if supervisor.were_ready else None)
                    if not is_announced:
                        run.require_published()
                        is_announced = supervisor.were_ready
                    # Later, a failed service leaves the others to those who use them.
                    if not supervisor.were_ready and supervisor.failed:
                        raise SpangradError(supervisor.failure(supervisor.failed[0]))
                    time.sleep(_POLL_SECONDS)
            except KeyboardInterrupt:
                screen.event("stopping")
            finally:  # also after an error: a second signal would leave services to end by themselves, all at once
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, signal.SIG_IGN)
                supervisor.stop_all(publish)
            screen.event("stopped")


def _detach(settings: Settings, options: list[str], agent: list[str]) -> None:
    """Start the supervisor as a process of its own, and wait until every service is ready."""
    from spangrad.leases import shown
    from spangrad.processes import own_command
    from spangrad.supervisor.run_directory import owner_of, status_of

    directory = settings.up.directory
    if owner := owner_of(directory):
        raise SpangradError(f"`spangrad up` runs in {directory} already ({shown(owner)}). `spangrad ps` shows it, `spangrad down` ends it.")
    log = directory / DETACHED_LOG
    make_directory_of(log, "up.directory: the log")
    with log.open("wb") as out:
        command = own_command("up", *options, *(["--", *agent] if agent else []))
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    printed = 0
    try:
        while not ((status := status_of(directory)) and status.get("ready")):
            ended = process.poll() is not None
            text = log.read_text(errors="replace")
            lines = text[: text.rfind("\n") + 1].splitlines()
            for line in lines[printed:]:
                print(line, file=sys.stderr if ended else sys.stdout, flush=True)
            printed = len(lines)
            if ended and (process.returncode < 0 or not lines):
                raise SpangradError(
                    f"`spangrad up` ended with exit code {process.returncode}, and {log} does not tell why: it was killed, or the disk is"
                    " full. Look for free memory and space, and call it again."
                )
            if ended:
                sys.exit(process.returncode or 1)
            time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
    print(f"every service is ready (process {process.pid}); logs are in {directory / 'logs'}. `spangrad down` stops them.")
