"""Settings of the runner of agents."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr

from spangrad.settings.section import Section
from spangrad.types import POLICY_FAILURES, AttemptFailure

FailureReward = Annotated[float | None, Field(allow_inf_nan=False)]


class FailureRewards(Section):
    """Rewards of failures that the policy caused. Failures of infrastructure have none, and are tried again."""

    timeout: FailureReward = 0.0
    """Reward of an attempt whose agent was not done in time. None: it has none, its calls are dropped, and it is tried again."""
    exception: FailureReward = 0.0
    """Reward of an attempt whose agent raised. None: as for `timeout`."""
    exit_code: FailureReward = 0.0
    """Reward of an attempt whose command ended with an exit code other than 0. None: as for `timeout`."""
    context_overflow: FailureReward = 0.0
    """Reward of an attempt that ended because its prompt outgrew the model's context. None: as for `timeout`."""
    invalid_output: FailureReward = 0.0
    """Reward of an attempt whose agent gave what is no reward or no readable output. None: as for `timeout`."""
    max_turns: FailureReward = 0.0
    """Reward of an attempt whose agent used up its turns. None: as for `timeout`."""

    def of(self, failure: AttemptFailure | None) -> float | None:
        """Return the reward of a failure. None: it has none."""
        return getattr(self, failure) if failure is not None and failure in POLICY_FAILURES else None


class RunnerSettings(Section):
    """The runner of agents."""

    run_id: str = "default"
    directory: Path = Path("data/runner")
    """Where the runner keeps what agents print, how attempts ended, and the queues of runs that have no server."""
    group_size: int = Field(default=8, ge=1)
    """Rollouts a task."""
    extra_groups: int = Field(default=0, ge=0)
    """Groups that `spangrad run --follow-demand` keeps in flight beyond those that are wanted, so that the slowest are not waited for: what
    still runs when the trainer has what it wants is cancelled. With 0 nothing is cancelled so."""
    greedy_rollouts: bool | None = None
    """Whether each group of mode train has one more rollout, at temperature 0. None: exactly where trainer.estimator is `remax`."""
    workers: int = Field(default=1, ge=1)
    """Agent processes."""
    concurrency: int = Field(default=16, ge=1)
    """Rollouts at once in each process."""
    initialisations: int = Field(default=16, ge=1)
    """Environments that are made, or asked for, at once in each process. What is initialised holds no place of `concurrency`."""
    initialised_ahead: int = Field(default=16, ge=1)
    """Attempts of each process that may have an environment, or be getting one, before they have a place of `concurrency`."""
    evaluations: int = Field(default=16, ge=1)
    """Evaluators at once in each process. What is evaluated holds no place of `concurrency`."""
    max_attempts: int = Field(default=2, ge=1)
    """Attempts of a rollout; after a failure that the policy caused, and that has a reward, no other is made."""
    failure_rewards: FailureRewards = FailureRewards()
    init_timeout_seconds: float = Field(default=300, gt=0)
    """That an attempt's environment may take, also in the line of a service."""
    timeout_seconds: float = Field(default=300, gt=0)
    """That an agent may take. Time in the queue does not count, nor what comes before and after the agent."""
    evaluation_timeout_seconds: float = Field(default=300, gt=0)
    """That the evaluator may take."""
    drain_seconds: float = Field(default=30, ge=0)
    """That attempts may go on after a worker was told to end; those that are not done by then are given back."""
    attempts_kept: int = Field(default=2000, ge=0)
    """Rollouts whose attempts' logs are kept, the newest."""
    attempt_log_bytes: int = Field(default=2**20, ge=0)
    """That an attempt may write to its log; what comes after is left out."""
    container_engine: str = Field(default="docker", min_length=1)
    """Program that runs container images (`spangrad run --image`): docker, podman, or one that takes docker's arguments."""
    container_network: str = Field(default="host", min_length=1)
    """Network that containers of agents are attached to. Another one than this machine's needs services that listen beyond loopback."""
    container_arguments: list[str] = Field(default=[])
    """Further arguments of `docker run`: mounts, limits, GPUs."""
    container_address: str | None = None
    """Address under which containers reach the services that we reach on loopback. None: the same on Linux with the network `host`,
    else the engine's own name for this machine (host.docker.internal)."""
    gateway: bool = True
    """Agents call the policy through the gateway. False: they call `gateway.engine_url` itself, nobody counts their calls, and a
    rollout is complete when nothing new of it has come for `builder.quiet_seconds`."""
    queue_url: str | None = None
    """Where workers, trainers and people find the queue of rollouts. None: `spangrad run` has a queue of its own, in
    runner.directory, and nobody else is asked or told."""
    queue_host: str = "127.0.0.1"
    """Address that `spangrad queue` binds. Anything but loopback needs `queue_token`."""
    queue_port: int = 8190
    queue_token: SecretStr | None = Field(default=None, min_length=1)
    """Token that every request to the queue must show. None: nothing is asked, and only loopback may be bound."""
    queue_db: SecretStr = SecretStr("sqlite:///data/queue.db")
    """Database of the queue: sqlite:///FILE, or postgresql://USER:PASSWORD@HOST/NAME. One server at a time serves from it."""
    queue_lease_seconds: float = Field(default=30.0, gt=0)
    """After which a rollout is given to another worker when nothing was heard of its own, where the worker asked for no other time."""
    environments_host: str = "127.0.0.1"
    """Address that `spangrad environments` binds. Anything but loopback needs `environments_token`."""
    environments_port: int = 8191
    environments_token: SecretStr | None = Field(default=None, min_length=1)
    """Token that the service of environments asks for, and that agents' runners show it. None: nothing is asked."""
    environment_lease_seconds: float = Field(default=30.0, gt=0)
    """After which an instance is taken back when nothing was heard of who leased it."""
    environment_seconds: float = Field(default=60.0, gt=0)
    """That an instance may take to be made, begun, reset, looked at or closed; one that takes longer is replaced."""
    rewards_host: str = "127.0.0.1"
    """Address that `spangrad rewards serve` binds. Anything but loopback needs `rewards_token`."""
    rewards_port: int = 8192
    rewards_token: SecretStr | None = Field(default=None, min_length=1)
    """Token that the reward service asks for, and that runners show it. None: nothing is asked."""
    queue_keep_days: float | None = Field(default=30.0, gt=0)
    """That the queue's server keeps rollouts, with their attempts, after they have ended. None, which is written `null`: until
    `spangrad queue purge`."""
