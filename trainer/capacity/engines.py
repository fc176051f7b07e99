"""Memory of an engine's GPUs, item by item, and the ways in which a model is divided among them.

In: an `Architecture`, engine settings, the memory of a GPU. Out: items of the worker that holds the most, tokens in the KV cache, sizes to
try. Invariant: the shares of all workers together are the model, but for what each of them has a copy of: heads of keys and values where
there are fewer than workers, and a stage that has more layers than the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from spangrad.probing.parallel import ParallelSizes, parallel_sizes
from spangrad.probing.vllm_arguments import vllm_arguments
from spangrad.settings import EngineSettings
from trainer.capacity.architecture import Architecture
from trainer.capacity.memory import MemoryItem

OVERHEAD = 4 * 2**30
"""Memory of vLLM's activations, CUDA graphs and context. An assumption."""
_UTILISATION = 0.92
"""vLLM's default of --gpu-memory-utilization."""
_FLOAT32 = 4


def engine_gpu(model: Architecture, engine: EngineSettings, gpu_bytes: int) -> list[MemoryItem]:
    """Return the memory of the GPU of a worker, of several the one that holds the most."""
    sizes, width = parallel_sizes(engine.extra_args), engine_width(engine)
    adapters = model.adapter_parameters(engine.lora_rank) * stage_layers(model, sizes) // model.layers
    weights = (worker_parameters(model, sizes) + adapters) * width
    cache = engine.kv_cache_bytes or max(int(utilisation(engine) * gpu_bytes) - weights - OVERHEAD, 0)
    return [
        MemoryItem("weights", weights),
        MemoryItem("activations, CUDA graphs", OVERHEAD),
        MemoryItem("KV cache", cache),
    ]


def stage_layers(model: Architecture, sizes: ParallelSizes) -> int:
    """Return the number of layers of the stage that has the most."""
    return math.ceil(model.layers / sizes.pipeline)


def worker_parameters(model: Architecture, sizes: ParallelSizes) -> int:
    """Return the number of parameters of the worker that holds the most; its embedding and its head are rows of the vocabulary."""
    if sizes.of_replica == 1:
        return model.parameters
    ends = model.head_parameters * (1 if model.is_tied else 2) + model.hidden
    layer = math.ceil((model.parameters - ends) / model.layers)
    keys_and_values = 2 * model.hidden * model.kv_width
    own = math.ceil((layer - keys_and_values) / sizes.tensor) + keys_and_values * _worker_kv_heads(model, sizes) // model.kv_heads
    # The first stage has the embedding, the last one the head.
    of_stage = ends if sizes.pipeline == 1 else model.head_parameters + model.hidden
    return stage_layers(model, sizes) * own + math.ceil(of_stage / sizes.tensor)


def cache_values(model: Architecture, sizes: ParallelSizes) -> int:
    """Return the number of values that a worker's KV cache holds for each token."""
    return 2 * stage_layers(model, sizes) * _worker_kv_heads(model, sizes) * model.head_dim


def _worker_kv_heads(model: Architecture, sizes: ParallelSizes) -> int:
    return math.ceil(model.kv_heads / sizes.tensor)


def cached_tokens(model: Architecture, engine: EngineSettings, gpu_bytes: int) -> int:
    """Return the number of tokens that the KV cache of one replica holds."""
    cache = next(item.bytes for item in engine_gpu(model, engine, gpu_bytes) if item.name == "KV cache")
    return cache // (cache_values(model, parallel_sizes(engine.extra_args)) * engine_width(engine))


def engine_width(engine: EngineSettings) -> int:
    """Return the bytes of a value in the engine's dtype; `auto` is taken for bfloat16, since versions' files say the model's own dtype."""
    return _FLOAT32 if engine.dtype in {"float32", "float"} else 2


def utilisation(engine: EngineSettings) -> float:
    """Return the share of the GPU's memory that the engine may take (--gpu-memory-utilization in engine.extra_args)."""
    try:
        return float(vllm_arguments(engine.extra_args).get("--gpu-memory-utilization", _UTILISATION))
    except ValueError:
        return _UTILISATION


def sizes_to_try(model: Architecture, gpus: int) -> Iterator[ParallelSizes]:
    """Yield the divisions of one engine among some of a host's GPUs that are worth a try.

    Layers are divided first, as far as vLLM can divide the heads; stages, which wait for one another, take what is left.
    """
    powers = [2**exponent for exponent in range(gpus.bit_length()) if 2**exponent <= gpus]
    tensor = [size for size in powers if _divides_heads(model, size)]
    yield from (ParallelSizes(size) for size in tensor)
    if len(tensor) < len(powers):
        yield from (ParallelSizes(tensor[-1], stages) for stages in powers[1:] if tensor[-1] * stages <= gpus and stages <= model.layers)


def _divides_heads(model: Architecture, tensor: int) -> bool:
    return model.heads % tensor == 0 and (model.kv_heads % tensor == 0 or tensor % model.kv_heads == 0)
