"""One tree of settings for every part: flags over environment over TOML file over defaults.

In: `spangrad.toml` (or --config FILE, or SPANGRAD_CONFIG), variables `SPANGRAD_SECTION__KEY`, flags.
Out: a frozen `Settings`, and for `spangrad config` where each value came from.
Invariant: a key that no part knows is an error, wherever it was written.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict
from pydantic_settings import SettingsError as UnreadableVariableError

from spangrad.errors import SettingsError

ENV_PREFIX = "SPANGRAD_"
ENV_NESTING = "__"
ENV_NOT_SETTINGS = frozenset({"SPANGRAD_CONFIG", "SPANGRAD_OTELCOL", "SPANGRAD_CHGO"})
"""Variables with our prefix that name files, and are read where those files are used."""
DEFAULT_FILE = "spangrad.toml"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StoreSettings(_Section):
    """The embedded span store, and where everybody else finds it."""

    host: str = "127.0.0.1"
    """Address to bind. Anything but loopback needs `token`."""
    otlp_grpc_port: int = 4317
    otlp_http_port: int = 4318
    clickhouse_port: int = 8123
    path: Path = Path("data/store")
    """Directory of the embedded engine. One process owns it."""
    token: SecretStr | None = Field(default=None, min_length=1)
    """Bearer token (and ClickHouse password) asked of every client. None: nothing is asked."""
    read_token: SecretStr | None = Field(default=None, min_length=1)
    """Token of those who may only ask SQL questions, within the reader's limits. None: there are none."""
    reader_max_rows: int = Field(default=1_000_000, ge=10_000)
    """Rows of an answer to the bearer of `read_token`. Drivers read some thousand when they connect."""
    reader_max_seconds: int = Field(default=60, ge=1)
    """How long a statement of the bearer of `read_token` may run, its answer's way included."""
    url: str = "http://127.0.0.1:8123"
    """ClickHouse's HTTP interface: this store's, a server's or a cluster's."""
    otlp_endpoint: str = "http://127.0.0.1:4318"
    """Where spans are sent, by OTLP/HTTP."""
    linger_ms: float = 10
    """How long an insert waits for company."""
    queue_bytes: int = 256 * 2**20
    """Bytes accepted and not yet committed before senders are told to wait."""
    cluster: str | None = Field(default=None, pattern=r"^[\w.{}-]+$")
    """The ClickHouse cluster that holds the tables, replicated. None: one server, the embedded store say."""
    sharded: bool = False
    """Spread the tables over the cluster's shards."""
    ttl_days: int | None = Field(default=None, ge=1)
    """How long spans and what was made of them are kept, but for what a committed batch used. None: for ever."""


class CollectorSettings(_Section):
    """The real OpenTelemetry Collector before the store (`spangrad collector`)."""

    host: str = "127.0.0.1"
    """Address to bind. Anything but loopback needs a token."""
    otlp_grpc_port: int = 14317
    otlp_http_port: int = 14318
    health_port: int = 13133
    """Answers on loopback while the collector is up."""
    zpages_port: int = 55679
    """Pages on loopback that show what it does."""
    queue_path: Path = Path("data/collector")
    """Directory of what was accepted and is not stored yet. One collector owns it."""
    queue_bytes: int = Field(default=2 * 2**30, ge=2**27)
    """Bytes in the queue of a signal (traces, logs) before senders must wait. A request has 64 MiB at most."""
    memory_mib: int = Field(default=1024, ge=256)
    """Memory beyond which senders are told to come again."""
    token: SecretStr | None = Field(default=None, min_length=1)
    """Bearer token asked of senders. None: `store.token`, which our own parts show; without that, nothing is asked."""
    tls_certificate: Path | None = None
    """File (PEM) of the certificate that senders see. None: they speak plain HTTP and gRPC."""
    tls_key: Path | None = None
    """File (PEM) of the certificate's key."""
    configs: tuple[Path, ...] = ()
    """Further configuration files of the collector, merged over otel-config.yaml; collector/distribution/redact.yaml is one."""


class ClientSettings(_Section):
    """A client of the gateway that has a token of its own: `[[gateway.clients]]`."""

    name: str = Field(min_length=1)
    """What refusals call it."""
    token: SecretStr = Field(min_length=1)
    """What it sends as its API key: `Authorization: Bearer` or `x-api-key`."""
    rollouts: str = "*"
    """Pattern (`*`, `?`, `[abc]`) of the rollouts that its calls may name. `*` allows calls that name none, too."""
    policies: tuple[str, ...] | None = None
    """The policies that it may call. None: every policy."""
    may_admin: bool = False
    """Whether it may announce attempts, publish weights and change backends."""


class BackendSettings(_Section):
    """An upstream that answers calls."""

    url: str = Field(pattern=r"^https?://(\[[0-9a-fA-F:.]+\]|[^\s/@?#:\[\]]+)(:[0-9]{1,5})?(/[^\s@?#]*)?$")
    """Where it listens, with or without `/v1`. Keys go in `key`, never in here."""
    policy: str = "policy"
    """The policy whose calls it answers."""
    kind: Literal["engine", "openai", "anthropic"] = "engine"
    """`engine`: a vLLM of `spangrad engine`, which answers with token ids and takes orders. `openai`: any other server with OpenAI's
    interface (SGLang, a plain vLLM, a provider). `anthropic`: Anthropic's own. The calls of the last two are recorded without ids."""
    key: SecretStr | None = Field(default=None, min_length=1)
    """The upstream's own key. The clients' keys are never passed on."""
    limit: int | None = Field(default=None, ge=1)
    """Calls in flight at once; further ones wait. None: as many as come."""
    model: str | None = Field(default=None, min_length=1)
    """Name by which the upstream knows the model. None: an engine's is its policy, another upstream is asked for what the client named."""
    restart_command: tuple[str, ...] = ()
    """Command and arguments that restart the engine, run when a publication has spoiled it. Empty: it stays out until somebody mends it."""


class GatewaySettings(_Section):
    """The recording gateway."""

    host: str = "127.0.0.1"
    port: int = 8180
    url: str = "http://127.0.0.1:8180"
    """Where agents, runner and trainer find it."""
    token: SecretStr | None = Field(default=None, min_length=1)
    """Token that may do everything, shown by our own parts. None, and no `clients`: nothing is asked, and only loopback may be bound."""
    clients: tuple[ClientSettings, ...] = ()
    """Clients with tokens of their own, and what each may do."""
    tls_cert: Path | None = None
    """File (PEM) of the certificate that clients see, its chain below it. None: they speak plain HTTP."""
    tls_key: Path | None = None
    """File (PEM) of the certificate's key, not encrypted."""
    max_request_bytes: int = Field(default=32 * 2**20, ge=1)
    """Largest body of a request: prompts may carry images."""
    head_seconds: float = Field(default=30, gt=0)
    """How long a new connection may take to send a whole request head."""
    body_seconds: float = Field(default=30, gt=0)
    """How long a body may take to arrive, and a second more for each 64 KiB that have."""
    engine_url: str = "http://127.0.0.1:8000"
    """The first backend: an engine of policy `policy`. Empty: only those of `backends`."""
    policy: str = "policy"
    """Name of the policy that the engine serves: the `model` that agents ask for. Models that no policy is named after are its too."""
    backends: tuple[BackendSettings, ...] = ()
    """Further upstreams; `[[gateway.backends]]` in the file. One with the url and policy of the first takes its place."""
    models: dict[str, str] = {}
    """Names that agents ask for -> the policy that answers: `{"gpt-4o" = "policy"}`."""
    queue_limit: int = Field(default=10_000, ge=0)
    """Calls of a policy that wait for a backend; beyond them, calls are refused (503, Retry-After)."""
    spill_path: Path = Path("data/gateway-spill")
    """Directory of the spans that the store has not taken yet. One gateway owns it."""
    spill_bytes: int = 8 * 2**30
    """Bytes of spans on disk while the store is down; beyond them, calls wait."""
    export_bytes: int = 64 * 2**20
    """Bytes of such spans held in memory as well; beyond them, they are read back from the disk."""
    redact: tuple[str, ...] = ()
    """Regular expressions; what matches them in a call's text is replaced before anything is written."""
    redact_paths: tuple[str, ...] = ()
    """JSON paths, `messages[*].content` say, whose values are replaced in requests and responses alike."""
    redact_keep_ids: bool = False
    """Keep token ids and logprobs of calls in which something was replaced. They spell what it was."""
    export_delay_seconds: float = 0
    """Hold every span back this long before it is sent: a test of completeness, 0 otherwise."""
    request_timeout_seconds: float = 600
    retokenize: Path | None = None
    """Directory of the tokenizer and chat template that make token ids for calls whose upstream gives none. None: they have none.
    Such calls are marked, and never trained unless `builder.retokenized` says so."""


class EngineSettings(_Section):
    """vLLM, in an environment of its own."""

    python: Path = Path(".venv-vllm/bin/python")
    """The interpreter of vLLM's environment."""
    host: str = "127.0.0.1"
    port: int = 8000
    model: Path | None = None
    """Directory of the policy's model. None: `spangrad engine` asks for it."""
    version: int = 0
    """The policy version that `model` holds."""
    dtype: str = "auto"
    max_model_len: int = 4096
    kv_cache_bytes: int | None = None
    """Bytes of KV cache. None: vLLM decides."""
    enforce_eager: bool = False
    cache_dir: Path = Path("data/vllm-cache")
    warmup_requests: int = 16
    start_timeout_seconds: float = 600
    extra_args: tuple[str, ...] = ()
    """Further arguments of `vllm serve`."""


class BuilderSettings(_Section):
    """The transition builder."""

    poll_seconds: float = 0.2
    incomplete_after_seconds: float = 600
    """How long after its root span a rollout may wait for missing calls or rewards before it drops; without one (the runner
    was killed), how long it may be silent."""
    quiet_seconds: float = 30
    """How long a trace without a runner must be silent before it counts as complete. One that lacks a parent of some span is
    waited for as long as a rollout without its root."""
    policy: str | None = None
    """Build only this policy's calls. None: every policy's."""
    agent_pattern: str = ".*"
    """Regular expression that an agent's name must match in full to be selected."""
    tool_error_reward: float | None = None
    """AIR: reward of the call that caused a failed tool call. None: no such rule."""
    tool_error_tools: tuple[str, ...] = ()
    """The tools that the rule counts. Empty: every tool."""
    tokenizer_hash: str | None = None
    """Drop calls of any other tokenizer. None: take every tokenizer's."""
    retokenized: bool = False
    """Keep calls whose token ids the gateway made from their text: without logprobs, as version 0."""

    @property
    def spec(self) -> str:
        """Hash of what decides a build's result: the BuildSpec of its transitions and drops."""
        decides = self.model_dump(mode="json", exclude={"poll_seconds", "incomplete_after_seconds", "quiet_seconds"})
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


class TrainerSettings(_Section):
    """The trainer."""

    run_id: str = "default"
    """The run whose rollouts are trained."""
    policy: str = "policy"
    branch: str = "main"
    model: Path | None = None
    """Directory of the weights that training begins with. None: `spangrad train` asks for it."""
    directory: Path = Path("data/policies")
    """Where checkpoints and the ledger live."""
    modes: tuple[str, ...] = ("train",)
    groups_per_batch: int = Field(default=4, ge=1)
    max_steps: int = 0
    """Steps after which `--follow` ends. 0: never."""
    credit: Literal["identical", "reward_to_go"] = "identical"
    baseline: Literal["rollout", "turn"] = "rollout"
    """Which values share a baseline: those of the group's rollouts, or of the same turn in them."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    learning_rate: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip_ratio: float = 0.2
    clip_grad: float = 1.0
    max_tokens_per_device: int = 16384
    max_staleness: int = 0
    """How many versions behind the newest a call's policy may be; older calls' groups are expired, with a reason."""
    logprob_gap_alarm: float = 0.01
    """Largest tolerated |rollout logprob - trainer logprob|; beyond it the step is refused."""
    keep_checkpoints: int = 3
    poll_seconds: float = 0.2
    dtype: Literal["fp32", "bf16"] = "fp32"
    publish: bool = True
    """Hand each version to the gateway."""


class RunnerSettings(_Section):
    """The runner of agents."""

    run_id: str = "default"
    group_size: int = Field(default=8, ge=1)
    """Rollouts a task."""
    workers: int = Field(default=1, ge=1)
    """Agent processes."""
    concurrency: int = Field(default=16, ge=1)
    """Rollouts at once in each process."""
    max_attempts: int = Field(default=2, ge=1)
    timeout_seconds: float = 300
    gateway: bool = True
    """Agents call the policy through the gateway. False: they call `gateway.engine_url` itself, nobody counts their calls, and a
    rollout is complete when nothing new of it has come for `builder.quiet_seconds`."""


class Settings(BaseSettings):
    """The whole tree."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, env_prefix=ENV_PREFIX, env_nested_delimiter=ENV_NESTING)

    store: StoreSettings = StoreSettings()
    collector: CollectorSettings = CollectorSettings()
    gateway: GatewaySettings = GatewaySettings()
    engine: EngineSettings = EngineSettings()
    builder: BuilderSettings = BuilderSettings()
    trainer: TrainerSettings = TrainerSettings()
    runner: RunnerSettings = RunnerSettings()


@dataclass(frozen=True, slots=True)
class Origin:
    """One leaf of the tree and where its value came from."""

    key: str
    value: object
    source: str


def load_settings(flags: Mapping[str, object] | None = None, *, file: Path | None = None, env: Mapping[str, str] | None = None) -> Settings:
    """Resolve the settings.

    Args:
        flags: dotted key -> value, the strongest source. Values of None are flags that were not given.
        file: a TOML file that must exist; without it SPANGRAD_CONFIG, or spangrad.toml if there is one.
        env: the environment, os.environ by default.

    Raises:
        SettingsError: a key is unknown, a value malformed, or the file missing or not TOML.
    """
    return _resolve(flags or {}, file, os.environ if env is None else env)[0]


def explain_settings(
    flags: Mapping[str, object] | None = None, *, file: Path | None = None, env: Mapping[str, str] | None = None
) -> list[Origin]:
    """List every leaf of the resolved tree with its source; arguments as for `load_settings`."""
    settings, sources = _resolve(flags or {}, file, os.environ if env is None else env)
    return [Origin(key, value, sources.get(key, "default")) for key, value in _leaves(settings.model_dump())]


def _resolve(flags: Mapping[str, object], file: Path | None, env: Mapping[str, str]) -> tuple[Settings, dict[str, str]]:
    known = {key for key, _ in _leaves(Settings.model_construct().model_dump())}
    path, from_file = _read_file(file, env)
    layers: list[tuple[str, dict[str, object]]] = [
        (f"file {path}", dict(_leaves(from_file))),
        ("environment", _read_env(env)),
        ("flag", {key: value for key, value in flags.items() if value is not None}),
    ]
    merged: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, layer in layers:
        for key, value in layer.items():
            if key not in known:
                raise SettingsError(f"unknown setting {key!r} ({source}).{_nearest(key, known)}")
            section, name = key.split(".", 1)
            merged.setdefault(section, {})[name] = value
            sources[key] = f"environment {_env_name(key)}" if source == "environment" else source
    try:
        return Settings.model_validate(merged), sources
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"][:2])
        place = ".".join(str(part) for part in first["loc"])
        # A table may hold a token.
        value = "{...}" if isinstance(first["input"], Mapping) else repr(first["input"])
        raise SettingsError(f"setting {place} = {value} ({sources.get(key, 'default')}): {first['msg']}") from None


def _read_file(file: Path | None, env: Mapping[str, str]) -> tuple[Path, dict[str, Any]]:
    named = file or (Path(env["SPANGRAD_CONFIG"]) if env.get("SPANGRAD_CONFIG") else None)
    path = named or Path(DEFAULT_FILE)
    if not path.exists():
        if named:
            raise SettingsError(f"settings file {path} does not exist. Create it, or drop --config and SPANGRAD_CONFIG.")
        return path, {}
    try:
        return path, tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"settings file {path} is not TOML: {error}") from None


def _read_env(env: Mapping[str, str]) -> dict[str, object]:
    """Variables of ours as dotted keys; pydantic-settings parses the values, and would ignore the names it does not know."""
    named = {
        name: name.removeprefix(ENV_PREFIX).lower().replace(ENV_NESTING, ".", 1)
        for name in env
        if name.startswith(ENV_PREFIX) and name not in ENV_NOT_SETTINGS
    }
    known = {key for key, _ in _leaves(Settings.model_construct().model_dump())}
    for name, key in named.items():
        if key not in known:
            raise SettingsError(f"unknown setting {name} (environment).{_nearest(key, known)}")
    source = EnvSettingsSource(Settings)
    source.env_vars = {name.lower(): env[name] for name in named}
    try:
        return dict(_leaves(source()))
    except UnreadableVariableError as error:
        raise SettingsError(f'{error} (environment). Lists are written as JSON: \'["a", "b"]\'.') from None


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and not prefix:
            yield from _leaves(value, f"{key}.")
        else:
            yield f"{prefix}{key}", value


def _env_name(key: str) -> str:
    return ENV_PREFIX + key.replace(".", ENV_NESTING).upper()


def _nearest(key: str, known: set[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else " `spangrad config` lists all settings."
