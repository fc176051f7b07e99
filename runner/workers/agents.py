"""The agents that can be run: a Python callable, any program, or a container image."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from spangrad.agent import prompt_client
from spangrad.agent.container import Container, reached_at
from spangrad.agent.propagation import RESOURCE_ATTRIBUTES, without_rollout
from spangrad.callables import split
from spangrad.episode.adapters.references import TOKEN_VARIABLE as ENVIRONMENTS_TOKEN
from spangrad.episode.adapters.references import names_environment
from spangrad.episode.agent import REFERENCE as EPISODES
from spangrad.episode.agent import VARIABLE as EPISODE_VARIABLE
from spangrad.http.tokens import agent_token
from spangrad.leases import this_process
from spangrad.settings import Settings, StoreSettings
from spangrad.settings.runner import ContainerSettings
from spangrad.settings.sources import variable_of, without_secrets

_NOT_FOR_HOSTS = frozenset(
    {
        "TRACEPARENT",
        "TRACESTATE",
        "BAGGAGE",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
    }
)
"""Variables that each attempt gets itself, and those that would send its spans to another store."""
_INTERPRETER = re.compile(r"python[\d.]*|uv|poetry|node|npx|bun|deno|java|ruby|php|perl|sh|bash")
_SCRIPT = re.compile(r"[^-\s]\S*\.(py|[cm]?[jt]s|jar|rb|php|pl|sh)")
_PRELOAD = re.compile(r"-r|--(require|import|preload|(experimental-)?loader)")
"""Options of interpreters before a module that is loaded first, such as an instrumentation."""
_TOOLS_TOKEN = variable_of("runner.sandbox.token")
"""Variable of a secret that workers do not use, but `spangrad tools` of an agent: what its model writes runs behind it anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Agent:
    """Code before and after an agent's run, and where it runs, whatever the agent is."""

    evaluator: str | None = None
    """`module:function`, called with (input, output), whose value is the reward; or the URL of a reward service. None: the output is the
    reward, a number or an object of numbers, which a program must print even where it rewards itself on its own spans.

    It may be None where a callable calls `span_processors.reward.reward` instead.
    """
    directory: Path = Path()
    """Directory where the modules are looked up first; a program, or the container engine's command line, runs there."""
    python: Path = Path(sys.executable)
    """Interpreter of the process that calls or starts the agent, and evaluates: the wheel `spangrad` is installed in its environment."""
    environment: str | None = None
    """`module:function`, called with the input before the agent runs; an environment with reset and step (`module:class`, `gymnasium:ID`,
    or URLs with a protocol: `openenv+http://...`, `ors+...`, `opentinker+...`); or the URL of a service that leases environments.

    Its value is passed to agent and evaluator, where they have a parameter `environment`; a program reads it as JSON from
    SPANGRAD_ENVIRONMENT. None: they have none.
    """
    on_failure: str | None = None
    """`module:function` that may give a partial result when a stage raises (`runner.handlers`). None: every failure counts."""


@dataclass(frozen=True, slots=True)
class CallableAgent(_Agent):
    """An agent that is a Python callable, several attempts of which share a process."""

    agent: str
    """`module:function` or `file.py:function`, called with a task's input (and `endpoint=`, when it has a parameter of that name).

    Without a function, the one that the module or file has decorated with `@spangrad.rollout`.
    """

    @property
    def name(self) -> str:
        """Service name of its spans, unless the environment sets another one."""
        code = self.environment if self.agent == EPISODES and self.environment else self.agent
        return Path(split(code)[0]).name.removesuffix(".py")

    def host_arguments(self) -> list[str]:
        """Return the arguments of the agent host."""
        return ["--agent", self.agent, *_stages(self)]


@dataclass(frozen=True, slots=True)
class CommandAgent(_Agent):
    """An agent that is a whole program, unmodified: one process per attempt.

    It gets the task's input as JSON on standard input. The last line of its standard output, parsed as JSON where it is JSON, is its
    output; an exit code other than 0 fails the attempt, because a program that broke says nothing about the policy.
    """

    command: tuple[str, ...]
    """Program and its arguments."""
    instrument: bool = False
    """Start it under `opentelemetry-instrument`, which must be installed beside the program or be in PATH."""

    @property
    def name(self) -> str:
        """Service name of its spans, unless the environment sets another one: the program, or the script that an interpreter runs."""
        program = next(iter(self.command), "agent")
        scripts = (word for before, word in pairwise(self.command) if _SCRIPT.fullmatch(word) and not _PRELOAD.fullmatch(before))
        return Path(next(scripts, program) if _INTERPRETER.fullmatch(Path(program).name) else program).name

    def host_arguments(self) -> list[str]:
        """Return the arguments of the agent host."""
        return ["--command", json.dumps(self.command), *(["--instrument"] if self.instrument else []), *_stages(self)]


@dataclass(frozen=True, slots=True)
class ContainerAgent(_Agent):
    """An agent that is a container image: one container per attempt, with the input and output of a program.

    Its environment, evaluator and hook run outside the container.
    """

    image: str
    """Image name, as the container engine knows it."""
    command: tuple[str, ...] = ()
    """Command that is passed to the image. Empty: the image's own command."""
    container: ContainerSettings = field(default_factory=ContainerSettings)
    """Container engine, and how containers are attached to this machine."""

    @property
    def name(self) -> str:
        """Service name of its spans, unless the environment sets another one."""
        return self.image.rpartition("/")[2].partition("@")[0].partition(":")[0]

    def host_arguments(self) -> list[str]:
        """Return the arguments of the agent host."""
        engine, network = self.container.engine, self.container.network
        address = self.container.address or reached_at(engine, network)
        container = Container(engine, self.image, self.command, network, tuple(self.container.arguments), address)
        return ["--container", json.dumps(asdict(container)), *_stages(self)]


AgentSpec = CallableAgent | CommandAgent | ContainerAgent
AgentsBySource = Mapping[str, AgentSpec]
"""Agents by the data source whose rollouts they take."""


def host_command(spec: AgentSpec) -> list[str]:
    """Return the command line of an agent host.

    The interpreter is started with -P, so that it does not look for modules in the working directory before the installed ones.
    """
    directory = str(spec.directory.resolve())
    return [
        str(spec.python),
        "-P",
        "-m",
        "spangrad.agent.host",
        "--path",
        directory,
        *(["--worker", this_process()] if isinstance(spec, ContainerAgent) else []),
        *spec.host_arguments(),
    ]


def exporter_variables(store: StoreSettings) -> dict[str, str]:
    """Return the environment variables by which OpenTelemetry's SDKs of agents and environments send spans to the store."""
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": store.otlp_endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    if store.token is not None:
        variables["OTEL_EXPORTER_OTLP_HEADERS"] = f"authorization=Bearer%20{agent_token(store.token.get_secret_value())}"
    return variables


def agent_environment(environ: Mapping[str, str], settings: Settings, agent: AgentSpec) -> dict[str, str]:
    """Build the environment variables of an agent's process: the runner's own, with the addresses of policy, store and prompts.

    It gets the tokens of agents, and none of the variables that set the servers': code of a model that reads its environment can call
    models, send spans and act in the remote sandbox of its tools, no more. The agent's name is the `service.name` of its spans, unless
    `environ`, the runner's own environment, sets another one.
    """
    variables = {name: value for name, value in without_secrets(environ).items() if name not in _NOT_FOR_HOSTS}
    if _TOOLS_TOKEN in environ:
        variables[_TOOLS_TOKEN] = environ[_TOOLS_TOKEN]
    if RESOURCE_ATTRIBUTES in variables:  # of a rollout whose program started the runner
        variables[RESOURCE_ATTRIBUTES] = without_rollout(variables[RESOURCE_ATTRIBUTES])
    variables.setdefault("OTEL_SERVICE_NAME", agent.name)
    variables |= exporter_variables(settings.store)
    if settings.queue.url is not None:
        variables[prompt_client.URL] = settings.queue.url
        variables[prompt_client.VARIABLE] = settings.prompts.variable
        if settings.queue.token is not None:
            variables[prompt_client.TOKEN] = agent_token(settings.queue.token.get_secret_value())
    policy = settings.gateway.url if settings.runner.gateway else settings.gateway.engine_url
    if isinstance(agent, CallableAgent) and agent.agent == EPISODES:
        variables[EPISODE_VARIABLE] = settings.runner.episode.model_dump_json()
    if settings.environments.token is not None and agent.environment and names_environment(agent.environment):
        variables[ENVIRONMENTS_TOKEN] = settings.environments.token.get_secret_value()
    variables["OPENAI_BASE_URL"] = policy.rstrip("/") + "/v1"
    # The openai client refuses to start without a key, even where none is asked for.
    if settings.runner.gateway:
        variables["OPENAI_API_KEY"] = agent_token(settings.gateway.token.get_secret_value()) if settings.gateway.token else "none"
    else:
        variables.setdefault("OPENAI_API_KEY", "none")
    return variables


def is_service(reference: str | None) -> bool:
    """Return whether an environment or an evaluator is a service, reached over HTTP."""
    return reference is not None and reference.startswith(("http://", "https://"))


def initialises(spec: AgentSpec) -> bool:
    """Return whether the host creates environments: no service leases them, and the agent has some."""
    return spec.environment is not None and not is_service(spec.environment)


def _stages(spec: AgentSpec) -> list[str]:
    arguments: list[str] = []
    if spec.evaluator:
        arguments += ["--outputs"] if is_service(spec.evaluator) else ["--evaluator", spec.evaluator]
    if spec.environment:
        arguments += ["--leased"] if is_service(spec.environment) else ["--environment", spec.environment]
    if spec.on_failure:
        arguments += ["--on-failure", spec.on_failure]
    return arguments
