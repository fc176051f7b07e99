"""Settings of the gateway, the engines behind it and those who may call it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr

from spangrad.settings.section import Section

Relaxation = Literal["strict_tools", "schemas", "top_p", "penalties", "tool_choice"]
"""What of a request the gateway may relax: see `GatewaySettings.relax`."""


class ClientSettings(Section):
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


class BackendSettings(Section):
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


class GatewaySettings(Section):
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
    models: dict[str, str] = Field(default_factory=dict[str, str])
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
    relax: tuple[Relaxation, ...] = ("strict_tools",)
    """Parts of a request of mode `train` that the engine is not asked for, because they mask or reshape what it samples: `strict_tools`
    (arguments held to their schema), `schemas` (answers in JSON), `top_p` (with top_k and min_p), `penalties`, `tool_choice` (a tool that
    must be called). Requests of every other mode reach the engine as they are."""
    request_timeout_seconds: float = 600
    retokenize: Path | None = None
    """Directory of the tokenizer and chat template that make token ids for calls whose upstream gives none. None: they have none.
    Such calls are marked, and never trained unless `builder.retokenized` says so."""


class EngineSettings(Section):
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
    head_dtype: Literal["float32", "model"] = "float32"
    """What logits are computed in: float32, as trainers compute them, or `model`: engine.dtype. A quantised head takes `model` only."""
    max_model_len: int = 4096
    kv_cache_bytes: int | None = None
    """Bytes of KV cache. None: vLLM decides."""
    enforce_eager: bool = False
    cache_dir: Path = Path("data/vllm-cache")
    lora_rank: int = Field(default=0, ge=0, le=512)
    """Largest rank of the adapters that it takes from trainers with trainer.road `adapter`. 0: it takes whole models."""
    transfer: Literal["nccl", "http"] | None = None
    """Over what it takes weights from trainers with trainer.road `transfer`: `nccl` between GPUs, `http` anywhere. None: it does not."""
    warmup_requests: int = 16
    start_timeout_seconds: float = 600
    extra_args: tuple[str, ...] = ()
    """Further arguments of `vllm serve`."""
