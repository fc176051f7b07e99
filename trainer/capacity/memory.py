"""Memory of a trainer's GPUs and hosts, item by item, from a model's shapes and the settings; engines' is in `trainer.capacity.engines`.

In: an `Architecture` and the settings. Out: items in bytes. Invariant: each item mirrors code, which its docstring names; tests hold
the sum against the peak of real steps on a CPU within 15 %. What a CPU cannot show is an assumption, and a constant below.

A step has phases that do not overlap; memory peaks in one of them. Items of `ALWAYS` are there in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from spangrad.settings import TrainerSettings
from trainer.capacity.architecture import Architecture
from trainer.optim.process import LOGITS_CHUNK, dtype_of, held_versions, recomputes_activations

Device = Literal["cuda", "cpu"]
ALWAYS = "always"
_FLOAT32 = 4
_MOMENTS = 8
"""Bytes of AdamW's two moments for each trained parameter."""
_ROW_BYTES = 147
"""Bytes of a batch for each of its tokens, in the trainer's own process (measured)."""
_RAY = 256 * 2**20 + 900 * 2**20
"""Ray's object store on a host (`trainer.distributed.cluster`), and the processes of the row queue (`trainer.distributed.row_queue`;
measured on a CPU)."""
GPU_PROCESS = int(1.5 * 2**30)
"""Memory of a GPU that CUDA and NCCL take in each process. An assumption."""
FRAGMENTATION = 0.1
"""Share of a phase's memory that PyTorch's allocator reserves beyond it. An assumption."""
RANK_PROCESS = 2 * 2**30
"""Main memory of a rank's process before it holds anything of the model. An assumption."""
ASLEEP = 2 * 2**30
"""Memory of a GPU that an engine keeps in its sleep: CUDA's context, graphs and NCCL. An assumption."""


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """Memory of one purpose."""

    name: str
    bytes: int
    phase: str = ALWAYS
    """Phase in which it is held."""


def peak_phase(items: Sequence[MemoryItem]) -> str:
    """Return the phase with the most memory."""
    sums: dict[str, int] = {}
    for item in items:
        sums[item.phase] = sums.get(item.phase, 0) + item.bytes
    return max((phase for phase in sums if phase != ALWAYS), key=sums.__getitem__, default=ALWAYS)


def at_peak(items: Sequence[MemoryItem]) -> list[MemoryItem]:
    """Return the items that are held when memory peaks, without those of no bytes."""
    phase = peak_phase(items)
    return [item for item in items if item.phase in {ALWAYS, phase} and item.bytes]


def peak_bytes(items: Sequence[MemoryItem]) -> int:
    """Return the memory at its peak."""
    return sum(item.bytes for item in at_peak(items))


def trained_parameters(model: Architecture, settings: TrainerSettings) -> int:
    """Return the number of parameters that are trained: adapters, or all."""
    return model.adapter_parameters(settings.lora.rank, settings.lora.modules) if settings.lora.rank else model.parameters


def computation_width(settings: TrainerSettings, device: Device) -> int:
    """Return the bytes of a value in the dtype of the computation."""
    return 2 if dtype_of(settings, device) == "bf16" else _FLOAT32


def _adapters(model: Architecture, settings: TrainerSettings) -> int:
    return trained_parameters(model, settings) if settings.lora.rank else 0


def _critic(model: Architecture, settings: TrainerSettings) -> int:
    """Return the bytes of the critic's weights and moments; 0 without one."""
    return model.critic_parameters * (_FLOAT32 + _MOMENTS) if settings.credit.estimator == "gae" else 0


# A GPU of the trainer.


def trainer_gpu(model: Architecture, settings: TrainerSettings, ranks: int, device: Device = "cuda") -> list[MemoryItem]:
    """Return the memory of the device of one of the ranks over which FSDP2 shards the model; its kind decides what settings leave open.

    Without trainer.packing = true rows are padded.
    """
    items = [*_state(model, settings, ranks), *_passes(model, settings, device), *_update(model, settings, ranks, device)]
    if device == "cpu":
        return items
    reserved = max(
        int(FRAGMENTATION * sum(item.bytes for item in items if item.phase == phase)) for phase in {item.phase for item in items} - {ALWAYS}
    )
    return [*items, MemoryItem("CUDA, NCCL", GPU_PROCESS), MemoryItem("allocator's reserve", reserved)]


def _state(model: Architecture, settings: TrainerSettings, ranks: int) -> list[MemoryItem]:
    """Return what a rank holds throughout: float32 shards of each model (`trainer.optim.verl_worker`), gradients summed and sharded."""
    trained = trained_parameters(model, settings)
    critic = _critic(model, settings)
    gradients = model.critic_parameters * _FLOAT32 if critic else 0
    reference = model.parameters * _FLOAT32 if settings.loss.kl_coef else 0
    return [
        MemoryItem("weights, float32", (model.parameters + _adapters(model, settings)) * _FLOAT32 // ranks),
        MemoryItem("gradients, float32", trained * _FLOAT32 // ranks),
        MemoryItem("AdamW's moments, float32", trained * _MOMENTS // ranks),
        MemoryItem("reference, float32", reference // ranks),
        MemoryItem("critic: weights, gradients, moments", (critic + gradients) // ranks),
    ]


def _passes(model: Architecture, settings: TrainerSettings, device: Device) -> list[MemoryItem]:
    """Return what the passes of one micro-batch hold, in three phases: logprobs, head's backward pass, a layer's backward pass."""
    tokens, width = settings.max_tokens_per_device, computation_width(settings, device)
    recomputes = recomputes_activations(settings, device)
    kept = MemoryItem("activations", tokens * activations_a_token(model, width, recomputes=recomputes))
    head = model.head_parameters
    cast_head = head * _FLOAT32 if width < _FLOAT32 else 0  # `trainer.optim.float32_head`
    trains_head = 0 if settings.lora.rank else 1
    layer_tokens = tokens * layer_activations(model, width)
    logprobs, head_phase, layer_phase = "logprobs", "backward pass of the head", "backward pass of a layer"
    of_layer = (width + _FLOAT32) * model.largest_layer if trains_head else 0
    with_gradients = 2 if recomputes and not model.expert_layers else 1  # an expert's are freed before the next one's
    return [
        MemoryItem(kept.name, kept.bytes, logprobs),
        MemoryItem("logits, float32", logits_values(model, settings) * _FLOAT32, logprobs),
        MemoryItem("head's weights, float32", cast_head, logprobs),
        MemoryItem(kept.name, kept.bytes, head_phase),
        MemoryItem("logits' gradients, float32", gradient_values(model, settings) * _FLOAT32, head_phase),
        MemoryItem("head gathered, and its gradient", cast_head + head * (width + trains_head * 2 * _FLOAT32), head_phase),
        MemoryItem("next layer gathered", width * model.largest_layer, head_phase),
        MemoryItem(kept.name, kept.bytes, layer_phase),
        MemoryItem("layer's activations and their gradients", layer_tokens * with_gradients, layer_phase),
        MemoryItem("two layers gathered, gradient of one", 2 * width * model.largest_layer + of_layer, layer_phase),
    ]


def layer_activations(model: Architecture, width: int) -> int:
    """Return the bytes that autograd keeps of a layer for each token, as measured by PyTorch's profiler; a value has `width` bytes."""
    norms = model.family.norms * _norm(model, width)
    attention = width * (2 * model.query_width + 2 * model.kv_width)
    if model.family.has_head_norms:
        attention += (_FLOAT32 + width) * (model.query_width + model.kv_width)
    if not model.expert_layers:
        return norms + attention + width * 4 * model.intermediate
    experts = model.active_experts * (4 * model.expert_width + 2 * model.hidden) + 4 * model.shared_width
    return norms + attention + width * max(experts, 4 * model.intermediate if model.expert_layers < model.layers else 0)


def activations_a_token(model: Architecture, width: int, *, recomputes: bool) -> int:
    """Return the bytes that autograd keeps of all layers for each token; of recomputed layers the input alone."""
    of_layers = model.layers * (width * model.hidden if recomputes else layer_activations(model, width))
    head_input = _FLOAT32 * model.hidden if width < _FLOAT32 else 0
    return of_layers + _norm(model, width) + head_input


def _norm(model: Architecture, width: int) -> int:
    """Return the bytes of a norm for each token: its input in float32, the normed one, its product with the weight."""
    return model.hidden * (_FLOAT32 + 2 * width)


def logits_values(model: Architecture, settings: TrainerSettings) -> int:
    """Return the number of float32 values of the logits (`trainer.optim.losses.trained_logits`) of a micro-batch, copies included.

    Every token of it counts as trained, which is the most there can be.

    Logits are held once, and three copies of a chunk while its entropy is measured. An entropy term keeps them divided by the temperature,
    their softmax, and for a while the products of both.
    """
    tokens = settings.max_tokens_per_device
    return ((4 if settings.loss.entropy_coef else 1) * tokens + 3 * min(LOGITS_CHUNK, tokens)) * model.vocabulary


def gradient_values(model: Architecture, settings: TrainerSettings) -> int:
    """Return the number of float32 values of the gradients of these logits.

    The gradient takes the logits' place. An entropy term has two copies from the forward pass, and three gradients on their way.
    """
    return (6 if settings.loss.entropy_coef else 1) * settings.max_tokens_per_device * model.vocabulary


def _update(model: Architecture, settings: TrainerSettings, ranks: int, device: Device) -> list[MemoryItem]:
    """Return what AdamW holds besides: on a GPU a copy of the second moments of all shards at once, on a CPU of one parameter."""
    shards = trained_parameters(model, settings) if device == "cuda" else min(model.head_parameters, trained_parameters(model, settings))
    return [MemoryItem("AdamW's temporary values", shards * _FLOAT32 // ranks, "update")]


# A host of the trainer.


def trainer_host(
    model: Architecture,
    settings: TrainerSettings,
    ranks: int,
    host_ranks: int,
    batch_tokens: int,
    *,
    first: bool,
    engine_width: int,
    gathers: bool = False,
) -> list[MemoryItem]:
    """Return the main memory of a host with `host_ranks` of all ranks; the first has rank 0 and the trainer's own process.

    That process holds the rows of a step's batch, and `gathers` where engines take whole tensors from it (engine.transfer = nccl). A value
    in the engines' dtype has `engine_width` bytes.
    """
    gathered = model.parameters * _FLOAT32 if first and gathers and _transfers(settings) else 0  # `WeightsOffer.named`
    trained, moved = trained_parameters(model, settings), moved_bytes(model, settings)
    waiting = moved + checkpoint_bytes(model, settings) if moved else 0  # a version is written meanwhile
    return [
        MemoryItem("processes", (host_ranks + first) * RANK_PROCESS + (_RAY if settings.workers.per_node else 0)),
        MemoryItem("batch's rows", batch_tokens * _ROW_BYTES if first else 0),
        MemoryItem("weights that are sent", sent_bytes(model, settings, engine_width) * host_ranks // ranks),
        MemoryItem("whole weights, gathered to be sent", gathered),
        MemoryItem("earlier versions' weights", held_versions(settings) * trained * _FLOAT32 * host_ranks // ranks),
        MemoryItem("copies at the step's start", _copies(model, settings) * host_ranks // ranks, "step"),
        MemoryItem("version that is written", checkpoint_bytes(model, settings) * host_ranks // ranks, "step"),
        MemoryItem("models while engines serve", waiting * host_ranks // ranks, "generation"),
    ]


def moved_bytes(model: Architecture, settings: TrainerSettings) -> int:
    """Return the bytes that all ranks move off their devices for a turn of the engines (`Rank.offload`), in float32."""
    if not settings.workers.colocated:
        return 0
    trained = trained_parameters(model, settings)
    models = (1 + bool(settings.loss.kl_coef)) * model.parameters + _adapters(model, settings)
    return models * _FLOAT32 + trained * _MOMENTS + _critic(model, settings)


def sent_bytes(model: Architecture, settings: TrainerSettings, engine_width: int) -> int:
    """Return the bytes that all ranks copy to send weights (`trainer.publish.parts.HeldParts`): all words in the engines' dtype, once.

    With trainer.weight_sync.delta also what changed since the version before: an eighth of the words at most, each with its number in two
    bytes. Without it the copies are freed after each publication, which may be beside any phase.
    """
    if not _transfers(settings):
        return 0
    changes = model.parameters // 8 * (2 + engine_width) if settings.weight_sync.delta else 0
    return model.parameters * engine_width + changes


def _transfers(settings: TrainerSettings) -> bool:
    return settings.weight_sync.publish and settings.weight_sync.method == "transfer"


def _copies(model: Architecture, settings: TrainerSettings) -> int:
    """Return the bytes that all ranks copy at a step's start (`Rank.begin_step`)."""
    critic = _critic(model, settings)
    if critic or settings.optim.epochs * settings.optim.mini_batches > 1:
        return trained_parameters(model, settings) * (_FLOAT32 + _MOMENTS) + critic
    return trained_parameters(model, settings) * _FLOAT32 if held_versions(settings) else 0


def written_weights(model: Architecture, settings: TrainerSettings) -> int:
    """Return the bytes of the weights that all ranks collect, and write beside the next step (`Rank.collect`)."""
    return (_adapters(model, settings) if settings.weight_sync.method == "adapter" else model.parameters) * _FLOAT32


def written_state(model: Architecture, settings: TrainerSettings) -> int:
    """Return the bytes of the state that all ranks collect and write beside the weights (`Rank.collect`)."""
    base = model.parameters if settings.lora.rank and settings.weight_sync.method != "adapter" else 0
    moments = trained_parameters(model, settings) * _MOMENTS + _critic(model, settings)
    return (base + _adapters(model, settings)) * _FLOAT32 + moments


def checkpoint_bytes(model: Architecture, settings: TrainerSettings) -> int:
    """Return the size of a checkpoint's files, which is that of what all ranks collect."""
    return written_weights(model, settings) + written_state(model, settings)
