"""Settings of the gateway, of the engines behind it and of its clients."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from spangrad.settings.section import Port, Section, ServerUrl, Token

Relaxation = Literal["strict_tools", "schemas", "top_p", "penalties", "tool_choice"]
"""Parts of a request that the gateway may relax: see `GatewaySettings.relax`."""


class ClientSettings(Section):
    """A client of the gateway that has a token of its own: `[[gateway.clients]]`."""

    name: str = Field(min_length=1)
    """Name of the client in refusals."""
    token: Token
    """API key that the client sends: `Authorization: Bearer` or `x-api-key`."""
    rollouts: str = "*"
    """Pattern (`*`, `?`, `[abc]`) of the rollouts that the client's calls may name. `*` also allows calls that name none."""
    policies: tuple[str, ...] | None = None
    """Policies that the client may call. None: every policy."""
    may_admin: bool = False
    """True if the client may announce attempts, publish weights and change backends."""


class BackendSettings(Section):
    """An upstream server that answers calls."""

    url: str = Field(pattern=r"^https?://(\[[0-9a-fA-F:.]+\]|[^\s/@?#:\[\]]+)(:[0-9]{1,5})?(/[^\s@?#]*)?$")
    """Base URL of the upstream, with or without `/v1`. Keys belong in `key`, never in the URL."""
    policy: str = "policy"
    """Policy whose calls the backend answers."""
    kind: Literal["engine", "openai", "anthropic"] = "engine"
    """Kind of upstream. `engine`: a vLLM of `spangrad engine`, which answers with token ids and takes orders. `openai`: any other server
    with OpenAI's interface (SGLang, a vLLM that `spangrad engine` did not start, a provider). `anthropic`: Anthropic's own interface.
    The calls of the last two are recorded without token ids."""
    key: Token | None = None
    """API key of the upstream. The clients' keys are never forwarded."""
    limit: int | None = Field(default=None, ge=1)
    """Largest number of calls in flight; further ones wait. None: no limit."""
    model: str | None = Field(default=None, min_length=1)
    """Name by which the upstream knows the model. None: for an engine the name of its policy, for another upstream the model that the
    client requested."""
    restart_command: tuple[str, ...] = ()
    """Command and arguments that restart the engine, run when a failed publication has left it with unusable weights. Empty: it stays
    out of service until the user restarts it."""


class GatewaySettings(Section):
    """Settings of the recording gateway."""

    host: str = "127.0.0.1"
    """Address that the gateway binds to; any but loopback needs a token."""
    port: Port = 8180
    """TCP port of the gateway."""
    url: ServerUrl = "http://127.0.0.1:8180"
    """URL at which agents, the runner and the trainer reach the gateway."""
    token: Token | None = None
    """Token with every permission, which spangrad's own processes send. None, and no `clients`: no token is required, and only loopback
    may be bound."""
    clients: tuple[ClientSettings, ...] = ()
    """Clients with tokens of their own, and the permissions of each."""
    tls_cert: Path | None = None
    """File (PEM) of the certificate that clients see, followed by its chain. None: plain HTTP."""
    tls_key: Path | None = None
    """File (PEM) of the certificate's key, not encrypted."""
    max_request_bytes: int = Field(default=32 * 2**20, ge=1)
    """Size limit of a request's body, in bytes: prompts may carry images."""
    body_seconds: float = Field(default=30, gt=0)
    """Time limit for a request's body to arrive, in seconds; one second is added for each 64 KiB received."""
    controller: str | None = Field(default=None, pattern=r"^https?://[^\s@]+$")
    """URL of the gateway that gives orders to the engines. Set: this gateway sends calls to that one's backends and has none of its own,
    and `token` is the same for both. None: it gives the orders itself."""
    engine_url: str = "http://127.0.0.1:8000"
    """URL of the first backend: an engine of policy `gateway.policy`. Empty: only the backends of `gateway.backends`."""
    policy: str = "policy"
    """Name of the policy that the engine serves: the `model` that agents request. Requests for a model that neither is a policy nor stands
    in `gateway.models` go to it as well, and its engine refuses them (404)."""
    backends: tuple[BackendSettings, ...] = ()
    """Further upstreams; `[[gateway.backends]]` in the file. One with the URL and policy of the first replaces it."""
    models: dict[str, str] = Field(default_factory=dict[str, str])
    """Model names that agents request -> the policy that answers: `{"gpt-4o" = "policy"}`."""
    queue_limit: int = Field(default=10_000, ge=0)
    """Largest number of calls of a policy that wait for a backend; further calls are refused (503, Retry-After)."""
    spill_path: Path = Path("data/gateway-spill")
    """Directory of the spans that the store has not accepted yet. One gateway owns it."""
    spill_bytes: int = 8 * 2**30
    """Size limit of the spans on disk while the store is down, in bytes; when it is reached, calls wait."""
    export_bytes: int = 64 * 2**20
    """Size limit of the spans on disk that are held in memory as well, in bytes; further ones are read back from disk."""
    redact: tuple[str, ...] = ()
    """Regular expressions; their matches in a call's text are replaced before anything is written."""
    redact_paths: tuple[str, ...] = ()
    """JSON paths, such as `messages[*].content`, whose values are replaced in requests and responses alike."""
    redact_keep_ids: bool = False
    """True to keep the token ids and logprobs of calls in which text was replaced, although the ids spell that text."""
    export_delay_seconds: float = 0
    """Time for which every span is held back before it is sent, in seconds: for tests of completeness, 0 otherwise."""
    relax: tuple[Relaxation, ...] = ("strict_tools",)
    """Parts of a request of mode `train` that are not forwarded to the engine, because they mask or reshape what it samples:
    `strict_tools` (arguments held to their schema), `schemas` (answers in JSON), `top_p` (with top_k and min_p), `penalties`,
    `tool_choice` (a tool that must be called). Requests of every other mode reach the engine unchanged."""
    request_timeout_seconds: float = 600
    """Time limit of one request to a backend, in seconds, waiting for one included."""
    retokenize: Path | None = None
    """Directory of the tokenizer and chat template that compute token ids for calls whose upstream returns none. None: such calls have
    no ids. Calls with computed ids are marked, and never trained unless `builder.retokenized` is set."""


class EngineSettings(Section):
    """Settings of vLLM, which runs in an environment of its own."""

    python: Path | None = None
    """Python interpreter of vLLM's environment; a relative path in a file is relative to the file. None: the nearest
    `.venv-vllm/bin/python` in the working directory, above it, or in spangrad's checkout."""
    host: str = "127.0.0.1"
    """Address that vLLM's server binds to; any but loopback needs a token."""
    port: Port = 8000
    """TCP port of vLLM's server."""
    token: Token | None = None
    """Token that every request to the engine but a health check carries; the gateway sends it. None: no token is required, and only
    loopback may be bound."""
    url: str | None = Field(default=None, pattern=r"^https?://")
    """URL at which the gateway reaches the engine. Set: the engine registers itself with the gateway at gateway.url while it runs. None:
    gateway.engine_url or gateway.backends name it."""
    model: Path | None = None
    """Directory of the policy's model. None: `spangrad engine` requires it as an argument."""
    version: int = 0
    """Policy version of the weights in `engine.model`."""
    dtype: str = "auto"
    """Data type of the weights in the engine, by vLLM's name; `auto` is the checkpoint's own."""
    head_dtype: Literal["float32", "model"] = "float32"
    """Type in which logits are computed: float32, as trainers compute them, or `model`: engine.dtype. A quantised head supports `model`
    only."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Context length of the engine, in tokens: prompt and answer together; never more than the model's own. None: the model's own, at
    most 4096."""
    kv_cache_bytes: int | None = Field(default=None, ge=1)
    """Size of the KV cache, in bytes. None: vLLM decides on a GPU; without one, 64 whole contexts, at most a quarter of the free memory."""
    enforce_eager: bool = False
    """Run the model without compiling it: vLLM starts sooner and generates slower."""
    cache_dir: Path = Path("data/vllm-cache")
    """Directory in which vLLM keeps compiled code and what else a later start can use."""
    lora_rank: int = Field(default=0, ge=0, le=512)
    """Largest rank of the adapters that the engine loads from trainers with trainer.weight_sync.method `adapter`. 0: it loads whole
    models."""
    transfer: Literal["nccl", "http"] | None = None
    """Transport of weights from trainers with trainer.weight_sync.method `transfer`: `nccl` between GPUs, `http` anywhere. None: the engine
    receives none."""
    checksum: Literal["full", "sampled", "off"] = "full"
    """Part of the parameters in the engine's memory that is compared with a version's after its publication: every word, about 4,096 words
    of each parameter, or none. With `off` a version is served on vLLM's word that it was loaded."""
    warmup_requests: int = 16
    """Number of chat requests sent at once before the engine counts as warm."""
    start_timeout_seconds: float = 600
    """Time limit of vLLM's start, in seconds, loading the weights included."""
    extra_args: tuple[str, ...] = ()
    """Further arguments of `vllm serve`."""
