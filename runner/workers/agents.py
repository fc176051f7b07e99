"""The agents that can be run: a Python callable, any program, or a container image.

In: what a user names. Out: the command line of an agent host (`spangrad.agent.host`) for it, and the environment that it starts in.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from spangrad.agent import prompt_client
from spangrad.agent.container import Container, reached_at
from spangrad.callables import split
from spangrad.leases import this_process
from spangrad.settings import Settings

_NOT_FOR_HOSTS = frozenset(
    {"TRACEPARENT", "TRACESTATE", "BAGGAGE", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"}
)
"""What an attempt is given itself, and what would take its spans to another store than ours."""


@dataclass(frozen=True, slots=True)
class CallableAgent:
    """An agent that is a Python callable, several attempts of which share a process."""

    agent: str
    """`module:function` or `file.py:function`, called with a task's input (and `endpoint=`, when it has a parameter of that name).

    Without a function it is the one that the module or file has decorated with `@spangrad.rollout`."""
    evaluator: str | None = None
    """`module:function`, called with (input, output), whose value is the reward; or the URL of a reward service. None: the agent's own
    value is.

    It may be None where the agent calls `span_processors.reward.reward` instead."""
    directory: Path = Path()
    """Where the modules are looked for first."""
    python: Path = Path(sys.executable)
    """The interpreter of the agent's environment, where the wheel `spangrad` is installed."""
    environment: str | None = None
    """`module:function`, called with the input before the agent runs; or the URL of a service that leases environments. What it gives is
    handed to agent and evaluator, where they have a parameter `environment`. None: they have none."""

    @property
    def name(self) -> str:
        """What its spans call their service, unless the environment names it."""
        return Path(split(self.agent)[0]).name.removesuffix(".py")

    def host_arguments(self) -> list[str]:
        """Arguments of the agent host."""
        return ["--agent", self.agent, *_stages(self)]


@dataclass(frozen=True, slots=True)
class CommandAgent:
    """An agent that is a whole program, unmodified: a process an attempt.

    It gets the task's input as JSON on standard input. The last line of its standard output, parsed as JSON where it is JSON, is its
    output; an exit code other than 0 fails the attempt, because a program that broke says nothing about the policy.
    """

    command: tuple[str, ...]
    """The program and its arguments."""
    evaluator: str | None = None
    """As `CallableAgent.evaluator`. None: the last line of standard output is the reward, a number or an object of numbers.

    The line is needed even where the program rewards itself on its own spans."""
    directory: Path = Path()
    """The program's working directory, and where the evaluator's module is looked for first."""
    instrument: bool = False
    """Start it under `opentelemetry-instrument`, which must be installed beside the program or be in PATH."""
    python: Path = Path(sys.executable)
    """The interpreter of the process that starts it and evaluates."""
    environment: str | None = None
    """As `CallableAgent.environment`. The program finds it as JSON in SPANGRAD_ENVIRONMENT."""

    @property
    def name(self) -> str:
        """What its spans call their service, unless the environment names it."""
        return Path(self.command[0]).name if self.command else "agent"

    def host_arguments(self) -> list[str]:
        """Arguments of the agent host."""
        return ["--command", json.dumps(self.command), *(["--instrument"] if self.instrument else []), *_stages(self)]


@dataclass(frozen=True, slots=True)
class ContainerAgent:
    """An agent that is a container image: a container an attempt, which is told and answers as a program does."""

    image: str
    """As the container engine knows it."""
    command: tuple[str, ...] = ()
    """Given to the image. Empty: its own command."""
    evaluator: str | None = None
    """As `CommandAgent.evaluator`. It runs outside the container."""
    environment: str | None = None
    """As `CommandAgent.environment`. What makes it runs outside the container."""
    directory: Path = Path()
    """Where the evaluator's module is looked for first, and the container engine's command line runs."""
    engine: str = "docker"
    """The container engine's program."""
    network: str = "host"
    """That the container is attached to."""
    arguments: tuple[str, ...] = ()
    """Further arguments of `docker run`."""
    address: str | None = None
    """Under which it reaches the services of this machine. None: under the same as we where it shares our network, else under the
    name that the engine gives."""
    python: Path = Path(sys.executable)
    """The interpreter of the process that starts it and evaluates."""

    @property
    def name(self) -> str:
        """What its spans call their service, unless the environment names it."""
        return self.image.rpartition("/")[2].partition("@")[0].partition(":")[0]

    def host_arguments(self) -> list[str]:
        """Arguments of the agent host."""
        address = self.address or reached_at(self.engine, self.network)
        container = Container(self.engine, self.image, self.command, self.network, self.arguments, address)
        return ["--container", container.write(), *_stages(self)]


AgentSpec = CallableAgent | CommandAgent | ContainerAgent


@dataclass(frozen=True, slots=True)
class Limits:
    """What a host allows beside the number of attempts."""

    initialisations: int
    """Initialisers at once."""
    ahead: int
    """Attempts that may have an environment before they run."""
    evaluations: int
    """Evaluators at once."""
    log_bytes: int
    """That each attempt may print into its log."""


def host_command(spec: AgentSpec, limits: Limits) -> list[str]:
    """The command line of an agent host.

    The interpreter is asked (-P) not to look for modules in the working directory before ours are imported.
    """
    directory = str(spec.directory.resolve())
    return [
        str(spec.python),
        "-P",
        "-m",
        "spangrad.agent.host",
        "--path",
        directory,
        "--log-bytes",
        str(limits.log_bytes),
        *(["--worker", this_process()] if isinstance(spec, ContainerAgent) else []),
        *spec.host_arguments(),
    ]


def agent_environment(environ: Mapping[str, str], settings: Settings, service: str) -> dict[str, str]:
    """The environment that an agent's process starts in: ours, with the addresses of policy, store and prompts.

    Args:
        environ: the runner's own environment.
        settings: where gateway, engine and store are.
        service: `service.name` of the agent's spans, unless the environment names one.
    """
    found = {name: value for name, value in environ.items() if name not in _NOT_FOR_HOSTS}
    found.setdefault("OTEL_SERVICE_NAME", service)
    found["OTEL_EXPORTER_OTLP_ENDPOINT"] = settings.store.otlp_endpoint
    if settings.store.token is not None:
        found["OTEL_EXPORTER_OTLP_HEADERS"] = f"authorization=Bearer%20{quote(settings.store.token.get_secret_value(), safe='')}"
    if settings.runner.queue_url is not None:
        found[prompt_client.URL] = settings.runner.queue_url
        found[prompt_client.VARIABLE] = settings.prompts.variable
        if settings.runner.queue_token is not None:
            found[prompt_client.TOKEN] = settings.runner.queue_token.get_secret_value()
    policy = settings.gateway.url if settings.runner.gateway else settings.gateway.engine_url
    found["OPENAI_BASE_URL"] = policy.rstrip("/") + "/v1"
    # The openai client refuses to start without a key, even where none is asked for.
    if settings.runner.gateway:
        found["OPENAI_API_KEY"] = settings.gateway.token.get_secret_value() if settings.gateway.token else "none"
    else:
        found.setdefault("OPENAI_API_KEY", "none")
    return found


def is_service(reference: str | None) -> bool:
    """Whether an environment or an evaluator is asked for over HTTP."""
    return reference is not None and reference.startswith(("http://", "https://"))


def initialises(spec: AgentSpec) -> bool:
    """Whether the host makes environments: a service may lease them instead, or there are none."""
    return spec.environment is not None and not is_service(spec.environment)


def _stages(spec: AgentSpec) -> list[str]:
    """What the host does before the agent runs, and after."""
    found: list[str] = []
    if spec.evaluator:
        found += ["--outputs"] if is_service(spec.evaluator) else ["--evaluator", spec.evaluator]
    if spec.environment:
        found += ["--leased"] if is_service(spec.environment) else ["--environment", spec.environment]
    return found
