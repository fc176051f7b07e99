"""Seconds of a step's stages, and the bytes that each moves, from shapes, settings and figures of the hardware.

In: an `Architecture`, settings and a `GpuCluster`. Out: estimates of stages. Invariant: pure; a stage takes as long as the slower of what
it computes and what it moves. Nothing here was measured on GPUs: the figures order layouts, and say which stage to look at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spangrad.probing.parallel import parallel_sizes
from spangrad.probing.proposals import context_of
from spangrad.settings import Settings, TrainerSettings
from trainer.capacity import engines as engine_memory
from trainer.capacity import hardware, memory
from trainer.capacity.architecture import Architecture
from trainer.capacity.hardware import GpuCluster

_FLOAT32 = 4
_UPDATE_BYTES = 28
"""Bytes that AdamW reads and writes for each parameter: weight, gradient, two moments."""


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """Stage of a step."""

    name: str
    seconds: float
    bytes_moved: int
    where: str
    """Place of the bytes: the link or the device that they pass."""


@dataclass(frozen=True, slots=True)
class StepWorkload:
    """Rollouts of a step."""

    rollouts: int
    tokens: int
    """Tokens of a rollout, prompt and responses: one row."""

    @property
    def all_tokens(self) -> int:
        """Return the tokens of all rollouts."""
        return self.rollouts * self.tokens


def workload(model: Architecture, settings: Settings) -> StepWorkload:
    """Return the largest step of the settings: each rollout fills the engine's context."""
    rollouts = settings.trainer.sampling.groups_per_batch * settings.runner.group_size
    return StepWorkload(rollouts, context_of(model.context, settings.engine.max_model_len))


def generation(model: Architecture, settings: Settings, cluster: GpuCluster, engines: int, work: StepWorkload) -> StageEstimate:
    """Return the generation of a step's rollouts, all tokens sampled one after the other."""
    engine, gpu, sizes = settings.engine, cluster.gpu, parallel_sizes(settings.engine.extra_args)
    cached = engine_memory.cached_tokens(model, engine, gpu.memory_bytes)
    of_replica = math.ceil(work.rollouts / (engines * sizes.data))
    at_once = max(min(of_replica, cached // work.tokens), 1)
    width = engine_memory.engine_width(engine)
    cache = at_once * work.tokens // 2 * engine_memory.cache_values(model, sizes)
    read = (engine_memory.worker_parameters(model, sizes) + cache) * width
    compute = 2 * model.active_parameters * at_once / (gpu.bf16_flops * hardware.PREFILL_MFU) / sizes.of_replica
    reduced = _all_reduces(model, sizes.tensor, at_once * model.hidden * width, gpu.peer_rate)
    waves = math.ceil(of_replica / at_once)
    # A token passes the stages one after the other.
    seconds = waves * work.tokens * (sizes.pipeline * max(read / (gpu.memory_rate * hardware.DECODE_SHARE), compute) + reduced)
    return StageEstimate("generation", seconds, waves * work.tokens * read, "GPU memory of an engine's worker")


def _all_reduces(model: Architecture, tensor: int, size: int, rate: float) -> float:
    """Return the seconds in which the workers of a layer add up their parts, twice a layer, for one token of each call."""
    return 2 * model.layers * (hardware.ALL_REDUCE_SECONDS + 2 * size * (tensor - 1) / tensor / rate) if tensor > 1 else 0.0


def training(
    model: Architecture, settings: Settings, cluster: GpuCluster, ranks: int, hosts: int, work: StepWorkload
) -> list[StageEstimate]:
    """Return a step's passes over its batch, and the update of the weights."""
    trainer, gpu = settings.trainer, cluster.gpu
    peak = gpu.fp32_flops if trainer.dtype == "fp32" else gpu.bf16_flops
    operations = _operations_a_token(model, trainer, work.tokens) * work.all_tokens
    compute = operations / (ranks * peak * hardware.TRAINING_MFU)
    moved = _sharded_bytes(model, trainer, ranks) * _micro_batches(trainer, ranks, work)
    shards = memory.trained_parameters(model, trainer) // ranks
    steps = trainer.optim.epochs * trainer.optim.mini_batches
    return [
        StageEstimate("forward and backward", max(compute, moved / _link_rate(cluster, hosts)), moved, _link(hosts)),
        StageEstimate("update", steps * shards * _UPDATE_BYTES / gpu.memory_rate, steps * shards * _UPDATE_BYTES, "GPU memory of a rank"),
    ]


def _operations_a_token(model: Architecture, settings: TrainerSettings, length: int) -> float:
    """Return the operations of all passes of a step for each token: 2 for each parameter forward, 4 backward, and attention's."""
    forward = 2 * model.active_parameters + 2 * model.layers * length * model.query_width
    backward = forward * (1 if settings.lora.rank else 2)
    recomputed = forward if memory.recomputes_activations(settings, "cuda") else 0
    epochs = settings.optim.epochs
    whole = epochs * settings.optim.mini_batches > 1 or settings.loss.recompute_logprobs
    passes = epochs * (forward + backward + recomputed) + forward * (whole + bool(settings.loss.kl_coef))
    critic = epochs * (3 * forward + recomputed) + forward if settings.credit.estimator == "gae" else 0
    return passes + critic


def _sharded_bytes(model: Architecture, settings: TrainerSettings, ranks: int) -> int:
    """Return the bytes that FSDP2 sends to a rank in a micro-batch: weights gathered forward and backward, gradients reduced in float32."""
    width = memory.computation_width(settings, "cuda")
    gathered = 2 * width * model.parameters + _FLOAT32 * memory.trained_parameters(model, settings)
    return gathered * (ranks - 1) // ranks


def _micro_batches(settings: TrainerSettings, ranks: int, work: StepWorkload) -> int:
    rows = math.ceil(work.rollouts / ranks)
    return settings.optim.epochs * math.ceil(rows / max(settings.max_tokens_per_device // work.tokens, 1))


def _link_rate(cluster: GpuCluster, hosts: int) -> float:
    """Return the rate at which a rank gets others' shards: of the GPUs of a host, all of which share its network, or of its links."""
    return min(cluster.gpu.peer_rate, hardware.NETWORK_RATE) if hosts > 1 else cluster.gpu.peer_rate


def _link(hosts: int) -> str:
    return "network of a host" if hosts > 1 else "links between GPUs"


def turns(model: Architecture, settings: Settings, cluster: GpuCluster, ranks: int) -> list[StageEstimate]:
    """Return the moves of the trainer's models to main memory and back, where it takes turns with engines."""
    if not settings.trainer.workers.colocated:
        return []
    moved = 2 * memory.moved_bytes(model, settings.trainer)
    return [StageEstimate("turns of trainer and engines", moved / ranks / cluster.gpu.host_rate, moved, "GPUs to main memory and back")]


def checkpoint(model: Architecture, settings: Settings, cluster: GpuCluster, ranks: int) -> StageEstimate:
    """Return the write of a version, beside the next step: each rank copies its shards to main memory, writes and sums them."""
    weights = memory.written_weights(model, settings.trainer)
    every = 1 if settings.trainer.lora.rank else settings.trainer.checkpoint.every
    size = weights + memory.written_state(model, settings.trainer) // every
    own = (size / cluster.gpu.host_rate + weights / hardware.CHECKSUM_RATE) / ranks
    return StageEstimate("checkpoint", own + size / hardware.DISK_RATE, size, "disk")


def publications(model: Architecture, settings: Settings, cluster: GpuCluster, engines: int, ranks: int) -> list[StageEstimate]:
    """Return the publication of a version by each weight sync method (docs/guides/weights.md); `adapter` takes adapters."""
    sizes = parallel_sizes(settings.engine.extra_args)
    whole, served = model.parameters * _FLOAT32, model.parameters * engine_memory.engine_width(settings.engine)
    casts, replicas = served < whole, engines * sizes.data
    to_gpu = served / sizes.of_replica / cluster.gpu.host_rate
    checks = whole / hardware.CHECKSUM_RATE + (whole / hardware.CAST_CHECKSUM_RATE if casts else 0)
    stages = [
        StageEstimate("publication by disk", checks + whole / hardware.DISK_RATE + to_gpu, whole * replicas, "files, read by engines"),
        StageEstimate(
            "publication by transfer over http",
            (checks + (whole / hardware.CAST_RATE if casts else 0)) / ranks + served * replicas / hardware.NETWORK_RATE + to_gpu,
            served * replicas,
            "ranks, each its share, to engines",
        ),
    ]
    if settings.trainer.lora.rank:
        adapters = model.adapter_parameters(settings.trainer.lora.rank, settings.trainer.lora.modules) * _FLOAT32
        base_rate = hardware.CAST_CHECKSUM_RATE if casts else hardware.CHECKSUM_RATE
        seconds = adapters / hardware.DISK_RATE + adapters / hardware.CHECKSUM_RATE + whole / base_rate
        stages.append(StageEstimate("publication by adapter", seconds, adapters * replicas, "files, read by engines"))
    return stages


def step_seconds(settings: Settings, stages: list[StageEstimate]) -> float:
    """Return the seconds of a step: training waits for rollouts, unless trainer.sampling.max_staleness lets both overlap.

    On the same GPUs they never do.
    """
    generated = sum(stage.seconds for stage in stages if stage.name == "generation")
    trained = sum(stage.seconds for stage in stages if stage.name in {"forward and backward", "update"})
    moved = sum(stage.seconds for stage in stages if stage.name == "turns of trainer and engines")
    overlaps = settings.trainer.sampling.max_staleness and not settings.trainer.workers.colocated
    return max(generated, trained) if overlaps else generated + trained + moved
