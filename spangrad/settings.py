"""The tree of settings that every part reads: names, types, defaults, and what each means.

In: values, from wherever `spangrad.settings_sources` finds them. Out: a frozen `Settings`. Invariant: a value that has no meaning is
refused here, with its place, before any part starts.
"""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from spangrad.errors import SettingsError

ENV_PREFIX = "SPANGRAD_"
ENV_NESTING = "__"


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


class Selection(_Section):
    """Which calls: regular expressions, each of which must match a name in full. None: any name."""

    agents: str | None = None
    """Of the agent that made the call."""
    models: str | None = None
    """As the agent asked for it."""
    policies: str | None = None
    """That answered; a call that no policy answered has its model's name."""
    tools: str | None = None
    """Of a tool that the call caused to run; any of them may match."""
    components: str | None = None
    """Of an agent, chain or tool around the call, at any height."""


TOOL_KINDS = frozenset({"tool_ok", "tool_error", "empty_result", "malformed_arguments", "repeated_call"})
"""Kinds of rules about tools, which name the tools that count."""


class AirRule(_Section):
    """An automatic intermediate reward: what is seen of a call, or of a tool that it caused to run, is worth something."""

    name: str = Field(min_length=1)
    """Of the reward that it gives."""
    kind: Literal[
        "tool_ok", "tool_error", "malformed_arguments", "repeated_call", "unparsable_output", "empty_result", "latency", "expression", "sql"
    ]
    reward: float = Field(default=0.0, allow_inf_nan=False)
    """For each call, tool or tool call that the rule finds; for `expression` and `sql`, what their value is multiplied by."""
    tools: tuple[str, ...] = ()
    """The tools that count. A rule about tools names them: ("*",) for all."""
    agents: str | None = None
    """Regular expression of the agents whose calls count. None: all."""
    seconds: float | None = Field(default=None, gt=0)
    """`latency`: longer than this."""
    form: str | None = None
    """`unparsable_output`: a regular expression that the response must match, or `json`."""
    where: str | None = None
    """`expression`: a Polars SQL expression over the columns of a call; `sql`: the name of a file in builder.rewards_directory."""

    @model_validator(mode="after")
    def _whole(self) -> AirRule:
        """What a kind needs is there, and nothing that it would not look at.

        Raises:
            ValueError: one sentence with the remedy; `load_settings` makes it a SettingsError that says where the rule stands.
        """
        said = f"the rule {self.name!r} of kind {self.kind}"
        if self.kind in TOOL_KINDS and not self.tools:
            raise ValueError(
                f'{said} names no tools. Name those that count, or tools = ["*"] for all: '
                "a policy learns to call whatever pays without advancing (docs/rewards.md)."
            )
        if self.kind not in TOOL_KINDS and self.tools:
            raise ValueError(f"{said} looks at calls, not at tools. Leave out tools; agents chooses whose calls count.")
        needed = {"latency": "seconds", "unparsable_output": "form", "expression": "where", "sql": "where"}
        for name in ("seconds", "form", "where"):
            given, wanted = getattr(self, name) is not None, needed.get(self.kind) == name
            if given != wanted:
                raise ValueError(f"{said} needs {name}. Give it." if wanted else f"{said} does not look at {name}. Leave it out.")
        if self.reward == 0:
            raise ValueError(f"{said} gives nothing: its reward is 0. Give reward = -0.1, say, or drop the rule.")
        return self


class BuilderSettings(_Section):
    """The transition builder."""

    dataset: str = "default"
    """The name under which others find what this specification builds."""
    poll_seconds: float = 0.2
    incomplete_after_seconds: float = 600
    """How long after its root span a rollout may wait for missing calls or rewards before it drops; without one (the runner
    was killed), how long it may be silent."""
    quiet_seconds: float = 30
    """How long a trace without a runner must be silent before it counts as complete. One that lacks a parent of some span is
    waited for as long as a rollout without its root."""
    lease_seconds: float = 60
    """How long a rollout that one builder has claimed is left alone by others."""
    selection: Selection = Selection()
    """The calls that become transitions; the others drop as not_selected."""
    rules: tuple[AirRule, ...] = ()
    """AIR."""
    sql_rewards: tuple[str, ...] = ()
    """Names of files NAME.sql in rewards_directory."""
    rewards_directory: Path = Path("rewards")
    tokenizer_hash: str | None = None
    """Drop calls of any other tokenizer. None: take every tokenizer's."""
    max_tokens: int | None = None
    """Drop calls of more tokens, prompt and response together. None: of any length."""
    retokenized: bool = False
    """Keep calls whose token ids the gateway made from their text: without logprobs, as version 0."""
    as_of: datetime | None = None
    """Build from the spans that had arrived by then, as a specification of its own. None: from all."""

    @property
    def decides(self) -> dict[str, Any]:
        """What decides a build's result; SQL rewards and rules by the hashes of their files."""
        decides = self.model_dump(
            mode="json",
            exclude={
                "dataset",
                "poll_seconds",
                "incomplete_after_seconds",
                "quiet_seconds",
                "lease_seconds",
                "rewards_directory",
                "sql_rewards",
            },
        )
        named = (*self.sql_rewards, *(rule.where for rule in self.rules if rule.kind == "sql" and rule.where))
        return decides | {"sql_rewards": {name: self.sql_hash(name) for name in named}}

    @property
    def spec(self) -> str:
        """Hash of what decides a build's result: the BuildSpec of its transitions and drops."""
        return hashlib.sha256(json.dumps(self.decides, sort_keys=True).encode()).hexdigest()[:16]

    def sql_hash(self, name: str) -> str:
        """Hash of a reward's SQL, its version.

        Raises:
            SettingsError: there is no such file.
        """
        file = self.rewards_directory / f"{name}.sql"
        if not file.is_file():
            raise SettingsError(f"the builder's settings name the SQL file {name!r}, but {file} is not there. Write it, or drop the name.")
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


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
    dataset: str | None = None
    """NAME, or NAME@REVISION, of the transitions to train on. None: those that the builder's settings make."""
    as_of: datetime | None = None
    """Train on the store as it was then. None: as it is."""
    selection: Selection = Selection()
    """Which of the policy's calls are trained; rewards of the others count all the same."""
    groups_per_batch: int = Field(default=4, ge=1)
    max_steps: int = 0
    """Steps after which `--follow` ends. 0: never."""
    reward_weights: dict[str, float] = {}
    """What rewards of a name are multiplied by. A name that is not here: 1."""
    credit: Literal["identical", "final_only", "reward_to_go", "own", "gigpo"] = "identical"
    baseline: Literal["rollout", "turn"] = "rollout"
    """Which values share a baseline: those of the group's rollouts, or of the same turn in them. GiGPO has its own."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    step_weight: float = 1.0
    """GiGPO: weight of a step's advantage beside its rollout's."""
    merge: bool = False
    """Train calls whose prompts extend each other as one sequence: fewer tokens, the same loss (docs/merging.md)."""
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
