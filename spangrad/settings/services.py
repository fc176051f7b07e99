"""Settings of services: the runner's queue, environments and rewards, and the web page."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr

from spangrad.settings.section import Port, Seconds, Section, ServerUrl, Token


class QueueSettings(Section):
    """Settings of the queue of rollouts."""

    url: ServerUrl | None = None
    """URL at which workers, trainers and users reach the queue of rollouts. None: `spangrad run` has a queue of its own, in
    runner.directory, and contacts no queue server."""
    host: str = "127.0.0.1"
    """Address that `spangrad queue` binds. Anything but loopback needs `queue.token`."""
    port: Port = 8190
    """TCP port of `spangrad queue`."""
    token: Token | None = None
    """Token that every request to the queue must carry. None: no token is required, and only loopback may be bound."""
    db: SecretStr = SecretStr("sqlite:///data/queue.db")
    """Database of the queue: sqlite:///FILE, or postgresql://USER:PASSWORD@HOST/NAME. One server at a time uses it."""
    lease_seconds: Seconds = 30.0
    """Time without a heartbeat after which a rollout is given to another worker, in seconds, where its worker requested no other time."""
    callback_hosts: list[str] = Field(default=[])
    """Hosts that POST /v1/process may post trajectories to, as HOST or HOST:PORT; HOST alone allows each of its ports."""
    keep_days: float | None = Field(default=30.0, gt=0)
    """Time for which the queue's server keeps ended rollouts and their attempts, in days. None (written `null`): until `spangrad queue
    purge`."""


class EnvironmentServiceSettings(Section):
    """Settings of the environment service."""

    host: str = "127.0.0.1"
    """Address that `spangrad environments` and `spangrad env serve` bind. Anything but loopback needs `environments.token`."""
    port: Port = 8191
    """TCP port of `spangrad environments` and `spangrad env serve`."""
    token: Token | None = None
    """Token that the environment service requires, and that agents' runners send it. None: no token is required."""
    lease_seconds: Seconds = 30.0
    """Time without a heartbeat of its lease after which an environment instance is reclaimed, in seconds; for sessions: without an answer
    of its connection."""
    idle_seconds: Seconds = 900.0
    """Time without a request after which a session of `spangrad env serve` ends, in seconds; also that for which a player waits for
    the others."""
    turn_seconds: Seconds = 120.0
    """Time in which a player of a served game acts, in seconds; one that does not forfeits."""
    operation_seconds: Seconds = 60.0
    """Time limit of each operation of an environment instance (make, begin, reset, step, observe, close), in seconds; an instance that
    exceeds it is replaced."""


class RewardServiceSettings(Section):
    """Settings of the reward service."""

    host: str = "127.0.0.1"
    """Address that `spangrad rewards serve` binds. Anything but loopback needs `rewards.token`."""
    port: Port = 8192
    """TCP port of `spangrad rewards serve`."""
    token: Token | None = None
    """Token that the reward service requires, and that runners send it. None: no token is required."""


class ToolServiceSettings(Section):
    """Settings of the server of tools in a sandbox (`spangrad tools --swe-rex`)."""

    host: str = "127.0.0.1"
    """Address that `spangrad tools --swe-rex` binds. Anything but loopback needs `tools.token`."""
    port: Port = 8196
    """TCP port of `spangrad tools --swe-rex`."""
    token: Token | None = None
    """API key that the server of tools requires. None: no key is required."""


class PageSettings(Section):
    """Settings of the web page (`spangrad page`)."""

    host: str = "127.0.0.1"
    """Address that `spangrad page` binds. Anything but loopback needs `page.token`."""
    port: Port = 8195
    """TCP port of `spangrad page`."""
    token: Token | None = None
    """Token that browsers and clients of the page must show. None: no token is required, and only loopback may be bound."""
    trace_url: str | None = Field(default=None, pattern=r"^https?://")
    """URL of a trace in another tool, such as Jaeger, Langfuse or Grafana, with `{trace}` in the place of its id. None: no link is
    shown."""
    actions: bool = True
    """True to offer actions: publish, roll back, pin, restore, cancel, retry, label, collect, play. False: the page changes nothing."""
    examples: Path = Path("data/examples")
    """Directory of the sets of examples to which people add rollouts, a file NAME.jsonl each."""
