"""The one command of a recipe: it reads the data, writes the run's settings, and keeps all services and the agent running.

In: a recipe and its arguments. Out: a directory with `spangrad.toml`, `train.jsonl`, `held_out.jsonl`, logs and what the services write;
with `--steps`, a line of JSON at the end. Invariant: a command of spangrad that gets that settings file sees the run as the services do.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from commands.demo.services import make_model
from commands.demo.settings import SETTINGS, store_and_gateway, write_settings
from commands.options import flag_values
from examples.learning.run import keep_to_cores
from recipes.recipe import CHECKOUT, METHODS, SIZES, Prepared, Recipe, layers, merged, write_tasks
from spangrad.errors import GatewayError, SettingsError, SpangradError
from spangrad.probing.parallel import parallel_sizes
from spangrad.processes import end_by_interrupt, free_ports, own_command
from spangrad.settings import Settings
from spangrad.settings.sources import explain_settings, load_settings
from spangrad.supervisor.launcher import launch_without_settings
from spangrad.supervisor.run_directory import RunDirectory, fresh_directory
from spangrad.supervisor.service import NEVER, RestartPolicy, ServiceSpec
from spangrad.supervisor.supervisor import Supervisor
from spangrad.supervisor.training_services import training_services
from trainer.publish.publisher import GatewayRefusedError, Publisher

TINY_SECONDS = 480
_POLL_SECONDS = 0.25
_ENGINE_ARGUMENTS = "engine.extra_args"
"""Setting whose values add up."""


def arguments_of(recipe: Recipe, words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read a command line; None: this process's."""
    parser = argparse.ArgumentParser(prog=f"python -m recipes.{recipe.name}", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory of the instruct model; required without --tiny")
    parser.add_argument("--size", choices=SIZES, default="7b", help="which model's settings")
    parser.add_argument("--method", choices=METHODS, default="full", help="train all weights, or adapters")
    parser.add_argument("--train", default=recipe.train, help="data set that is trained on")
    parser.add_argument("--held-out", default=recipe.held_out, help="data set of held_out.jsonl")
    parser.add_argument("--rows", type=_count, help="take so many rows of each data set at most")
    parser.add_argument("--directory", type=Path, default=Path("runs") / recipe.name, help="the run's files")
    parser.add_argument("--steps", type=_count, help="end once so many versions are served; default: never, with --tiny 1")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="value of any setting of spangrad")
    parser.add_argument("--prepare", action="store_true", help="write settings and tasks, and start nothing")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model and small made data, on a CPU")
    recipe.options(parser)
    arguments = parser.parse_args(words)
    if arguments.model is None and not arguments.tiny:
        parser.error("--model is not given. Name the directory of an instruct model, or try the recipe with --tiny.")
    return arguments


def _count(text: str) -> int:
    """Read a number from 1: 0 steps would be a run without an end, and a negative number of rows would leave out as many."""
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1. Give one, or leave the option out.")
    return int(text)


def main(recipe: Recipe) -> None:
    """Run a recipe's command line."""
    arguments = arguments_of(recipe)
    end_by_interrupt()
    try:
        run(recipe, arguments)
    except KeyboardInterrupt:
        sys.exit(130)
    except SpangradError as error:
        print(f"{recipe.name}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def run(recipe: Recipe, arguments: argparse.Namespace) -> None:
    """Prepare the run and start it."""
    directory = arguments.directory.absolute()
    with fresh_directory(directory) if arguments.tiny else RunDirectory(directory) as owned:
        if arguments.tiny:
            owned.clear()
        _run(recipe, arguments, owned)


def _run(recipe: Recipe, arguments: argparse.Namespace, owned: RunDirectory) -> None:
    directory = owned.path
    if arguments.tiny:
        data = directory / "data"
        data.mkdir()
        vars(arguments).update(recipe.write_small(data))
    prepared = recipe.prepare(arguments, directory)
    write_tasks(directory / "train.jsonl", "train", prepared.train)
    write_tasks(directory / "held_out.jsonl", "held-out", prepared.held_out)
    values = settings_of(recipe, arguments, directory)
    settings = load_settings(values, env={})
    write_settings(directory / SETTINGS, explain_settings(values, env={}))
    print(f"{len(prepared.train)} tasks, {len(prepared.held_out)} held out; settings are in {directory / SETTINGS}", flush=True)
    if arguments.prepare:
        return
    if arguments.tiny:
        make_model([sys.executable, "-m", f"recipes.{recipe.name}.tiny", str(directory / "model")], directory)
    _serve(recipe, arguments, owned, settings, prepared)


def settings_of(recipe: Recipe, arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Return the run's settings, by section or dotted key."""
    model = str(directory / "model" if arguments.tiny else arguments.model.absolute())
    paths = {
        "engine": {"model": model},
        "trainer": {"model": model, "directory": str(directory / "policies")},
        "store": {"path": str(directory / "store")},
        "gateway": {"spill_path": str(directory / "gateway-spill")},
        "queue": {"db": f"sqlite:///{directory}/queue.db"},
        "runner": {"directory": str(directory / "runner")},
        "up": {"directory": str(directory)},
    }
    files = layers(recipe.name, arguments.size, arguments.method)
    if arguments.tiny:
        files = [*files[:-1], CHECKOUT / "recipes/tiny.toml"]
    values = {**merged(files, paths), **(_tiny_values(recipe, directory) if arguments.tiny else {})}
    given = flag_values(arguments.set)
    if isinstance(added := given.get(_ENGINE_ARGUMENTS), list):
        given[_ENGINE_ARGUMENTS] = [*load_settings(values, env={}).engine.extra_args, *added]
    return {**values, **given}


def _tiny_values(recipe: Recipe, directory: Path) -> dict[str, object]:
    """Return what --tiny needs on any machine: free ports, one process of vLLM that reads tool calls of words."""
    *ports, engine, queue = free_ports(6)
    plugin = str(CHECKOUT / "examples" / "learning" / "word_calls.py")
    tools = ["--enable-auto-tool-choice", "--tool-call-parser", recipe.parser, "--tool-parser-plugin", plugin] if recipe.parser else []
    return {
        **store_and_gateway(directory, ports),
        "gateway.engine_url": f"http://127.0.0.1:{engine}",
        "engine.port": engine,
        "engine.cache_dir": str(directory.parent / ".vllm-cache"),
        _ENGINE_ARGUMENTS: ["--distributed-executor-backend", "uni", *tools],
        "queue.port": queue,
        "queue.url": f"http://127.0.0.1:{queue}",
    }


def services_of(recipe: Recipe, directory: Path, settings: Settings, prepared: Prepared) -> list[ServiceSpec]:
    """Return all services of a run; on GPUs, workers of engines have one each, in order, and the trainer has the others."""
    logs, config = directory / "logs", ("--config", str(directory / SETTINGS))
    agent = [*recipe.agent, "--tasks", str(directory / "train.jsonl")]
    engines = [str(backend.url) for backend in settings.gateway.backends]
    gpus, workers = gpus_of(settings), parallel_sizes(settings.engine.extra_args).workers
    own = {"engine": gpus[:workers], "train": gpus[(1 + len(engines)) * workers :] or gpus[:workers]}
    services = list(prepared.services)
    for service in training_services(settings, logs, config, agent):
        env = {"CUDA_VISIBLE_DEVICES": ",".join(own[service.name])} if gpus and service.name in own else {}
        env = {**env, **(prepared.env or {})} if service.name == "run" else env
        needs = (*service.needs, *(extra.name for extra in prepared.services)) if service.name == "run" else service.needs
        services.append(replace(service, env={**service.env, **env}, needs=needs))
    for number, url in enumerate(engines, 1):
        words = own_command("engine", *config, "--set", f"engine.port={url.rpartition(':')[2].strip('/')}")
        name = f"engine-{number}"
        env = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[number * workers : (number + 1) * workers])}
        services.append(ServiceSpec(name, tuple(words), logs / f"{name}.log", f"{url.rstrip('/')}/health", ("store",), env))
    return services


def gpus_of(settings: Settings) -> list[str]:
    """Return the GPUs of this machine that a run takes: those of CUDA_VISIBLE_DEVICES, else the first ones.

    A trainer without ranks shares those of the first engine; with no other engine, nothing is divided: the list is empty.
    """
    ranks, further = settings.trainer.workers.per_node, len(settings.gateway.backends)
    count = (1 + further) * parallel_sizes(settings.engine.extra_args).workers + ranks if ranks or further else 0
    visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu] or [str(gpu) for gpu in range(count)]
    if len(visible) < count:
        raise SettingsError(f"the settings take {count} GPUs, and CUDA_VISIBLE_DEVICES names {len(visible)}: `spangrad plan` finds others.")
    return visible[:count]


def _served(publisher: Publisher, policy: str) -> int:
    """Return the version that is served; 0 where there is none, or the gateway does not answer, which the supervisor starts again."""
    try:
        return publisher.served(policy) or 0
    except GatewayRefusedError:
        raise
    except GatewayError:
        return 0


def _serve(recipe: Recipe, arguments: argparse.Namespace, owned: RunDirectory, settings: Settings, prepared: Prepared) -> None:
    """Keep the services running until --steps versions are served, or until Ctrl-C."""
    began, steps = time.monotonic(), arguments.steps or (1 if arguments.tiny else None)
    if arguments.tiny:
        keep_to_cores()

    def report(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    services = services_of(recipe, owned.path, settings, prepared)
    publisher, version = Publisher(settings.gateway), 0
    policy = NEVER if arguments.tiny else RestartPolicy()
    with Supervisor(services, report, policy=policy, launch=launch_without_settings) as supervisor:
        while steps is None or version < steps:
            supervisor.poll()
            owned.publish({"services": supervisor.status(), "ready": supervisor.are_ready})
            if supervisor.failed:
                raise SpangradError(supervisor.failure(supervisor.failed[0]))
            if supervisor.are_ready and (served := _served(publisher, settings.gateway.policy)) > version:
                version = served
                report(f"version {version} is served")
            if arguments.tiny and time.monotonic() - began > TINY_SECONDS:
                raise SpangradError(f"version {steps} was not served within {TINY_SECONDS} s. Look into {owned.path / 'logs'}.")
            time.sleep(_POLL_SECONDS)
    print(json.dumps({"recipe": recipe.name, "version": version, "seconds": round(time.monotonic() - began, 1)}), flush=True)
