"""Settings that fit a model to a machine, each with its reason, and the file that holds them.

Invariant: pure; what is proposed starts on the machine that was probed, or is refused with what is missing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from spangrad.errors import SettingsError
from spangrad.probing.machine import MachineFacts
from spangrad.probing.model import DTYPE_BYTES, ModelFacts

LONGEST_CONTEXT = 4096
"""Context of the engine where no setting says more, in tokens: a longer one takes memory that few agents use."""
_CACHE_SHARE = 0.25
"""Share of the available memory that the KV cache of an engine without a GPU gets at most."""
_SEQUENCES = 64
"""Whole contexts that the KV cache of an engine without a GPU holds, where the memory suffices."""
_LEAST_CACHE = 64 * 2**20
_STATE_BYTES = 16
"""Bytes of training for each parameter: weights, gradients and Adam's two moments in float32."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Free TCP ports of the services."""

    otlp_grpc: int = 4317
    otlp_http: int = 4318
    clickhouse: int = 8123
    gateway: int = 8180
    engine: int = 8000
    queue: int = 8190
    page: int = 8195


@dataclass(frozen=True, slots=True)
class Proposal:
    """A setting, and the reason for its value."""

    key: str
    value: object
    reason: str


def context_of(model_tokens: int | None, requested: int | None) -> int:
    """Return the context length of an engine, in tokens: what is requested, within what the model can."""
    longest = model_tokens or requested or LONGEST_CONTEXT
    return min(longest, requested or LONGEST_CONTEXT)


def cache_bytes(kv_bytes_a_token: int, context: int, available_bytes: int) -> int:
    """Return the size of the KV cache of an engine without a GPU; all sizes are in bytes, the context is in tokens."""
    requested = max(_SEQUENCES * context * kv_bytes_a_token, _LEAST_CACHE)
    return max(min(requested, int(available_bytes * _CACHE_SHARE)), context * kv_bytes_a_token)


def propose(model: ModelFacts, machine: MachineFacts, ports: Ports) -> list[Proposal]:
    """Return the settings with which the model trains on the machine.

    Raises:
        SettingsError: there is no environment with vLLM, the tokenizer has no chat template, or the memory does not suffice.
    """
    if machine.vllm_python is None:
        raise SettingsError("no vLLM: there is no .venv-vllm here, above, or in spangrad's checkout. Run `make setup` in the checkout.")
    if not model.has_chat_template:
        raise SettingsError(
            f"the tokenizer in {model.directory} has no chat template, so an engine cannot answer chats. Take an instruct model, or save a"
            " chat_template.jinja there."
        )
    require_memory(model, machine)
    directory = str(model.directory.absolute())
    context = context_of(model.context_tokens, None)
    longest = f"{model.context_tokens} tokens" if model.context_tokens else "a length that its files do not state"
    return [
        Proposal("engine.model", directory, f"{model.architecture}, {size_text(model.weight_bytes)} of {model.dtype}"),
        Proposal("engine.python", str(machine.vllm_python), "vLLM's environment, which is not the trainer's"),
        Proposal("engine.max_model_len", context, f"tokens of prompt and answer; the model takes {longest}"),
        *_engine(model, machine, context),
        Proposal("engine.port", ports.engine, "a free port"),
        Proposal("trainer.model", directory, "training begins with these weights"),
        Proposal("runner.group_size", 8, "rollouts of a task that are compared with each other"),
        Proposal("trainer.sampling.groups_per_batch", 4, "groups of one training step"),
        Proposal("runner.concurrency", 16 if not machine.gpus else 64, "rollouts that run at the same time"),
        *_addresses(ports),
    ]


def require_memory(model: ModelFacts, machine: MachineFacts) -> None:
    """Raise where the model's training cannot fit.

    Raises:
        SettingsError: with what is needed and what there is.
    """
    parameters = model.weight_bytes // DTYPE_BYTES[model.dtype]
    needed = parameters * _STATE_BYTES + model.weight_bytes
    # A trainer on several GPUs shares its state; the engine's weights are on each.
    available = sum(gpu.memory_bytes for gpu in machine.gpus) if machine.gpus else machine.memory_bytes
    if needed > available:
        raise SettingsError(
            f"training all weights of {model.directory} takes at least {size_text(needed)}, and this machine has {size_text(available)}"
            f" {'on its GPUs' if machine.gpus else 'of memory'}. Take a smaller model or a larger machine, or share the"
            " work (docs/start/scaling.md)."
        )


def _engine(model: ModelFacts, machine: MachineFacts, context: int) -> list[Proposal]:
    if machine.gpus:
        share = 0.4 if len(machine.gpus) == 1 else 0.85
        reason = f"{len(machine.gpus)} x {machine.gpus[0].name}; the trainer needs the rest of the first"
        return [Proposal("engine.extra_args", ["--gpu-memory-utilization", str(share)], reason)]
    proposals = [
        Proposal("engine.dtype", "float32", "there is no GPU; the trainer computes in float32"),
        Proposal("engine.enforce_eager", True, "without a GPU, compiling costs more time than it saves"),
    ]
    if model.kv_values_a_token:
        width = model.kv_values_a_token * DTYPE_BYTES["float32"]
        size = cache_bytes(width, context, machine.memory_bytes)
        reason = f"{size // width} tokens of all calls in flight; {size_text(machine.memory_bytes)} of memory are free"
        proposals.append(Proposal("engine.kv_cache_bytes", size, reason))
    return proposals


def _addresses(ports: Ports) -> list[Proposal]:
    return [
        Proposal("gateway.port", ports.gateway, "agents call http://127.0.0.1:PORT/v1"),
        Proposal("gateway.url", f"http://127.0.0.1:{ports.gateway}", ""),
        Proposal("gateway.engine_url", f"http://127.0.0.1:{ports.engine}", ""),
        Proposal("store.otlp_grpc_port", ports.otlp_grpc, "spans"),
        Proposal("store.otlp_http_port", ports.otlp_http, "spans"),
        Proposal("store.clickhouse_port", ports.clickhouse, "SQL"),
        Proposal("store.url", f"http://127.0.0.1:{ports.clickhouse}", ""),
        Proposal("store.otlp_endpoint", f"http://127.0.0.1:{ports.otlp_http}", ""),
        Proposal("queue.port", ports.queue, "the trainer asks it for rollouts"),
        Proposal("queue.url", f"http://127.0.0.1:{ports.queue}", "without this line there is no queue"),
        Proposal("page.port", ports.page, "the page is at http://127.0.0.1:PORT"),
    ]


def settings_text(proposals: list[Proposal], title: str) -> str:
    """Return a settings file with the proposals, in TOML, each with its reason as a comment."""
    sections: dict[str, list[str]] = {}
    for proposal in proposals:
        section, _, name = proposal.key.rpartition(".")
        reason = f"  # {proposal.reason}" if proposal.reason else ""
        # TOML refuses JSON's escapes of characters beyond 16 bits.
        sections.setdefault(section, []).append(f"{name} = {json.dumps(proposal.value, ensure_ascii=False)}{reason}")
    head = [f"# {title}", "# `spangrad config` prints every setting with its source, `spangrad config --explain SECTION` its meaning."]
    return "\n".join([*head, *(f"\n[{section}]\n" + "\n".join(lines) for section, lines in sections.items())]) + "\n"


def size_text(count: float) -> str:
    """Return a number of bytes for people."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
