"""Settings of the runner of agents."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from spangrad.settings.section import Section, Token
from spangrad.types import POLICY_FAILURES, AttemptFailure, SandboxRung

END_SECONDS = 30.0
"""Time that a worker has for hosts and spans once its attempts are done or given back, in seconds."""

FailureReward = Annotated[float | None, Field(allow_inf_nan=False)]


class FailureRewards(Section):
    """Rewards of failures that the policy caused. Failures of infrastructure have none, and are retried."""

    timeout: FailureReward = 0.0
    """Reward of an attempt whose agent exceeded its time limit. None: no reward; its calls are dropped, and it is retried."""
    exception: FailureReward = 0.0
    """Reward of an attempt whose agent raised an exception. None: as for `timeout`."""
    exit_code: FailureReward = 0.0
    """Reward of an attempt whose command ended with an exit code other than 0. None: as for `timeout`."""
    context_overflow: FailureReward = 0.0
    """Reward of an attempt that ended because its prompt outgrew the model's context. None: as for `timeout`."""
    invalid_output: FailureReward = 0.0
    """Reward of an attempt whose agent gave an invalid reward or unreadable output. None: as for `timeout`."""
    max_turns: FailureReward = 0.0
    """Reward of an attempt whose agent used up its turns. None: as for `timeout`."""
    token_budget: FailureReward = 0.0
    """Reward of an attempt that failed when its generated tokens were used up (runner.max_output_tokens). None: as for `timeout`."""
    call_budget: FailureReward = 0.0
    """Reward of an attempt that failed when its calls were used up (runner.max_calls). None: as for `timeout`."""

    def of(self, failure: AttemptFailure | None) -> float | None:
        """Return the reward of a failure, or None where it has none."""
        return getattr(self, failure) if failure is not None and failure in POLICY_FAILURES else None


class ValidationSampling(Section):
    """Sampling parameters that the gateway sets in policy calls, whatever the agents ask for."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    """Temperature. None: the agent's."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Probability mass that tokens are sampled from. None: the agent's."""
    top_k: int | None = Field(default=None, ge=1)
    """Number of most likely tokens that are sampled from. None: the agent's."""


class ContainerSettings(Section):
    """Container images as agents (`spangrad run --image`)."""

    engine: str = Field(default="docker", min_length=1)
    """Program that runs container images (`spangrad run --image`): docker, podman, or one that accepts docker's arguments."""
    network: str = Field(default="host", min_length=1)
    """Network that containers of agents are attached to. Any other than `host` needs services that listen beyond loopback."""
    arguments: list[str] = Field(default=[])
    """Further arguments of `docker run`: mounts, limits, GPUs."""
    images: list[str] = Field(default=[])
    """Patterns of images that a request may name in place of the agent's own, such as registry.local/swe/*. Empty: none."""
    address: str | None = None
    """Address at which containers reach the services that this machine reaches on loopback. None: the same on Linux with the network
    `host`, else the container engine's own name for this machine (host.docker.internal)."""


class SandboxSettings(Section):
    """Sandboxes of programs as agents (`spangrad run -- PROGRAM`)."""

    engine: SandboxRung | Literal["auto"] = SandboxRung.NONE
    """Kind of sandbox that each attempt's program runs in: bubblewrap, landlock, none; or auto, the strongest that this machine can do.
    remote, a server that speaks SWE-ReX, is for `spangrad tools` alone."""
    least: SandboxRung = SandboxRung.LANDLOCK
    """Weakest kind that `auto` may choose; the worker ends where the machine can do none."""
    url: str | None = Field(default=None, pattern=r"^https?://\S+$")
    """URL of the server of engine `remote`. None: there is none."""
    token: Token | None = None
    """API key that this server requires. None: it requires none."""
    network: Literal["services", "host"] = "services"
    """Network of the programs: gateway, queue and store alone, at their usual addresses; or all that this machine reaches."""
    image: Path | None = None
    """OCI image, a layout's directory or tar archive, whose file system programs see in place of this machine's programs and libraries
    (docs/guides/sandboxes.md#images); it is unpacked once, below runner.directory. None: they see this machine's."""
    readable: list[Path] = Field(default=[])
    """Files and directories that programs can read, beside the agent's directory and the system's programs and the agent's interpreter,
    or the image's files."""
    variables: list[str] = Field(default=["PATH", "LANG", "LC_ALL", "TZ"])
    """Environment variables of the worker that programs get, beside those of the attempt itself (OTEL_*, OPENAI_*, prompts)."""
    processes: int = Field(default=256, ge=1)
    """Largest number of processes and threads of an attempt."""
    memory_bytes: int = Field(default=4 * 2**30, ge=2**20)
    """Largest private memory of each process of an attempt, in bytes."""
    disk_bytes: int = Field(default=2**30, ge=2**16)
    """Largest size of each file that a program writes, in bytes; with bubblewrap also of its temporary directory, which is in memory."""


class PlayerSettings(Section):
    """Player of one role, in environments of several."""

    model: str | None = None
    """Name of the model in its calls: a policy that trains, or one that does not. None: runner.episode.model."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature of its calls. None: runner.episode.temperature."""
    script: str | None = None
    """Function that writes its replies in place of a model, as MODULE:FUNCTION; it takes the messages so far. None: a model does."""


class EpisodeSettings(Section):
    """Episodes of the agent without code (`spangrad run --environment MODULE:CLASS`)."""

    model: str = "policy"
    """Name of the model in its calls."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature of its calls."""
    turns: int | None = Field(default=32, ge=1)
    """Largest number of replies in an episode. None: no limit."""
    tokens: int | None = Field(default=None, ge=1)
    """Largest number of generated tokens in an episode. None: no limit."""
    turn_tokens: int | None = Field(default=None, ge=1)
    """Largest number of tokens of a reply. None: the engine's own limit."""
    turn_seconds: float | None = Field(default=None, gt=0)
    """Time limit of a reply, in seconds. A player of several forfeits by it; alone it ends the episode. None: no limit."""
    players: dict[str, PlayerSettings] = Field(default={})
    """Players by role, in environments of several; any other role is played by runner.episode.model."""
    seconds: float | None = Field(default=None, gt=0)
    """Time limit of an episode, in seconds, checked between turns; its attempt then ends well, unlike one that exceeds
    runner.timeout_seconds. None: no limit."""


class HandlerSettings(Section):
    """Handler of the rollouts of one data source: agent, environment and evaluator. What is null is as in the runner's own settings."""

    agent: str | None = None
    """Python callable of the agent, as MODULE:FUNCTION or FILE.py:FUNCTION. None: `command`, `image` or `environment` names the agent."""
    command: list[str] = Field(default=[])
    """Program of the agent and its arguments; with `image`, the arguments of the container."""
    image: str | None = None
    """Container image of the agent. None: it is no image."""
    instrument: bool = False
    """True if the command is started under opentelemetry-instrument."""
    environment: str | None = None
    """Environment, as `--environment` of `spangrad worker` names it. None: there is none."""
    evaluator: str | None = None
    """Evaluator, as `--evaluator` of `spangrad worker` names it. None: the agent's own value is the reward."""
    on_failure: str | None = None
    """Function that is called with (input, error) when stage `run` or `evaluate` raises, as MODULE:FUNCTION or FILE.py:FUNCTION; it may
    have parameters `stage`, `environment` and `endpoint`. Its value takes the place of the stage's result; if it is None, the failure
    counts. None: there is no hook."""
    directory: Path = Path()
    """Directory where the modules are looked up first, or in which the command runs."""
    workers: int | None = Field(default=None, ge=1)
    """Number of agent processes of the handler. None: runner.workers."""
    concurrency: int | None = Field(default=None, ge=1)
    """Rollouts of the handler that run at once in a worker. None: runner.concurrency."""
    initialisations: int | None = Field(default=None, ge=1)
    """Environments of the handler that are initialised at once in a worker. None: runner.initialisations."""
    initialised_ahead: int | None = Field(default=None, ge=1)
    """Attempts of the handler in a worker that may have an environment before they run. None: runner.initialised_ahead."""
    evaluations: int | None = Field(default=None, ge=1)
    """Evaluators of the handler that run at once in a worker. None: runner.evaluations."""
    max_calls: int | None = Field(default=None, ge=1)
    """Largest number of calls of an attempt. None: runner.max_calls."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """Largest number of tokens that the policy generates in an attempt. None: runner.max_output_tokens."""
    init_timeout_seconds: float | None = Field(default=None, gt=0)
    """Time limit of an attempt's environment, in seconds. None: runner.init_timeout_seconds."""
    timeout_seconds: float | None = Field(default=None, gt=0)
    """Time limit of one agent run, in seconds, where its rollout names none. None: runner.timeout_seconds."""
    evaluation_timeout_seconds: float | None = Field(default=None, gt=0)
    """Time limit of one evaluation, in seconds. None: runner.evaluation_timeout_seconds."""
    empty_reward: FailureReward = None
    """Reward of an empty result, whose evaluator is not called. None: runner.empty_reward."""
    close_after_run: bool | None = None
    """True if the environment is closed before the result is evaluated. None: runner.close_after_run."""
    sandbox: SandboxSettings | None = None
    """Sandboxes of the command. None: those of runner.sandbox."""
    container: ContainerSettings | None = None
    """Engine of the containers, its arguments and images. None: those of runner.container."""


_OF_HANDLER = (
    "workers", "concurrency", "initialisations", "initialised_ahead", "evaluations", "max_calls", "max_output_tokens",
    "init_timeout_seconds", "evaluation_timeout_seconds", "empty_reward", "close_after_run", "sandbox", "container",
)  # fmt: skip
"""Settings of the runner that a handler may have values of its own for."""


class RunnerSettings(Section):
    """Settings of the runner of agents."""

    run_id: str = "default"
    """Name of the run that the rollouts belong to; trainers and queries select by it."""
    directory: Path = Path("data/runner")
    """Directory of the output of agents, of the results of attempts, and of the queues of runs that have no server."""
    group_size: int = Field(default=8, ge=1)
    """Number of rollouts of each task."""
    extra_groups: int = Field(default=0, ge=0)
    """Groups that `spangrad run --follow-demand` keeps in flight beyond those that trainers request, so that no trainer waits for the
    slowest: groups that still run when the trainer has enough are cancelled. 0: none is cancelled for this reason."""
    greedy_rollouts: bool | None = None
    """True if each group of mode train has one more rollout, at temperature 0. None: only where trainer.credit.estimator is `remax`."""
    validation_sampling: ValidationSampling = ValidationSampling()
    """Sampling of rollouts of mode validate, such as a lower temperature than that of training."""
    workers: int = Field(default=1, ge=1)
    """Number of agent processes of a worker, among which the slots of `concurrency` are divided; none is started without a slot."""
    concurrency: int = Field(default=16, ge=1)
    """Rollouts that run at once in a worker, in all its processes."""
    initialisations: int = Field(default=16, ge=1)
    """Environments that are initialised, or requested, at once in a worker. An attempt that initialises holds no slot of
    `concurrency`."""
    initialised_ahead: int = Field(default=16, ge=1)
    """Attempts of a worker that may have an environment, or wait for one, before they have a slot of `concurrency`."""
    evaluations: int = Field(default=16, ge=1)
    """Evaluators that run at once in a worker. An attempt that is evaluated holds no slot of `concurrency`."""
    max_calls: int | None = Field(default=None, ge=1)
    """Largest number of calls of an attempt; the gateway refuses the next one (HTTP 410). None: no limit."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """Largest number of tokens that the policy generates in an attempt; the gateway limits each call to what is left, and refuses the next
    one (HTTP 410) once nothing is. Calls at once may each use what was left when they began. None: no limit."""
    max_attempts: int = Field(default=2, ge=1)
    """Largest number of attempts of a rollout; a failure that the policy caused, and that has a reward, is not retried."""
    failure_rewards: FailureRewards = FailureRewards()
    """Rewards of failures that the policy caused, by reason."""
    empty_reward: FailureReward = None
    """Reward of an attempt whose agent returns nothing (null, or an empty text, list or object); its evaluator is not called. None: the
    evaluator judges it as any other result."""
    close_after_run: bool = False
    """True if an attempt's environment is closed, or its instance released, as soon as the agent has run; the evaluator, which still gets
    its value, works without it."""
    handlers: dict[str, HandlerSettings] = Field(default={})
    """Handlers by the data source of the rollouts; a worker that is given no agent has all of them. Rollouts that name no source need the
    only one."""
    init_timeout_seconds: float = Field(default=300, gt=0)
    """Time limit of an attempt's environment, in seconds; the wait in the queue of an environment service included."""
    timeout_seconds: float = Field(default=300, gt=0)
    """Time limit of one agent run, in seconds; time in the queue, initialisation and evaluation excluded."""
    evaluation_timeout_seconds: float = Field(default=300, gt=0)
    """Time limit of one evaluation, in seconds."""
    drain_seconds: float = Field(default=30, ge=0)
    """Time for which running attempts may continue after a worker is asked to end, in seconds; attempts that are not done by then are
    given back to the queue."""
    attempts_kept: int = Field(default=2000, ge=0)
    """Number of rollouts whose attempts' logs are kept, the newest; each log has 1 MiB at most."""
    gateway: bool = True
    """True if agents call the policy through the gateway. False (direct mode): they call `gateway.engine_url` itself, their calls are
    not counted, and a rollout is complete when no new span of it has come for `builder.quiet_seconds`."""
    episode: EpisodeSettings = EpisodeSettings()
    """Episodes of the agent without code (`spangrad run --environment MODULE:CLASS`)."""
    sandbox: SandboxSettings = SandboxSettings()
    """Sandboxes of programs as agents (`spangrad run -- PROGRAM`)."""
    container: ContainerSettings = ContainerSettings()
    """Container images as agents (`spangrad run --image`)."""

    def timeout_of(self, data_source: str) -> float:
        """Return the time limit of one agent run on a data source, in seconds; that of the only handler where none is named."""
        only = next(iter(self.handlers.values())) if len(self.handlers) == 1 and not data_source else None
        handler = self.handlers.get(data_source, only)
        return self.timeout_seconds if handler is None or handler.timeout_seconds is None else handler.timeout_seconds

    def of_handler(self, name: str) -> RunnerSettings:
        """Return the settings of a handler's attempts: the runner's own, and those of the handler where it has any."""
        handler = self.handlers[name]
        return self.model_copy(update={field: value for field in _OF_HANDLER if (value := getattr(handler, field)) is not None})
