"""Search of the settings with which a model trains on a cluster.

In: a model's shapes, settings, a cluster. Out: the fitting `CapacityPlan` of the shortest step, or the nearest miss. Invariant: settings
that the user has set are kept; what is proposed is within the memory of every GPU, and of every host where that is known.

Engines run on the gateway's host, each worker on a GPU of its own. The trainer has the other GPUs of every host, or all GPUs of the other
hosts; on a single GPU it shares that with the engine. With trainer.workers.colocated the trainer has every GPU, engines' GPUs by turns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from spangrad.errors import SettingsError
from spangrad.probing.parallel import ParallelSizes, parallel_sizes
from spangrad.probing.proposals import Proposal, context_of, size_text
from spangrad.settings import Settings
from trainer.capacity import engines, memory, timing
from trainer.capacity.architecture import Architecture
from trainer.capacity.hardware import GpuCluster
from trainer.capacity.memory import MemoryItem
from trainer.capacity.timing import StageEstimate, StepWorkload

_TOKENS = (131072, 65536, 32768, 16384, 8192, 4096, 2048, 1024)
"""Values of trainer.max_tokens_per_device that are tried."""
_BOUND, _RECOMPUTATION = "trainer.max_tokens_per_device", "trainer.gradient_checkpointing"
_LORA_RANK = 16
_SHARED_UTILISATION = 0.4
_ENGINE_UTILISATION = 0.9


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """Layout of a run on a cluster, with its memory and its seconds."""

    model: Architecture
    settings: Settings
    cluster: GpuCluster
    work: StepWorkload
    engines: int
    trainer_hosts: int
    has_own_hosts: bool
    """True if the trainer's hosts run no engines."""
    trainer_gpu: tuple[MemoryItem, ...]
    engine_gpu: tuple[MemoryItem, ...]
    first_host: tuple[MemoryItem, ...]
    """Main memory of the host of rank 0."""
    other_host: tuple[MemoryItem, ...]
    """Main memory of the trainer's other hosts. Empty: there are none."""
    stages: tuple[StageEstimate, ...]

    @property
    def ranks(self) -> int:
        """Return the number of the trainer's processes."""
        return max(self.settings.trainer.workers.per_node, 1) * self.trainer_hosts

    @property
    def sizes(self) -> ParallelSizes:
        """Return the division of each engine among its workers."""
        return parallel_sizes(self.settings.engine.extra_args)

    @property
    def engine_gpus(self) -> int:
        """Return the number of GPUs that engines take."""
        return self.engines * self.sizes.workers

    @property
    def lora_rank(self) -> int:
        """Return the rank of the adapters that are trained; 0: all weights are."""
        return self.settings.trainer.lora.rank

    @property
    def shares_gpu(self) -> bool:
        """Return whether trainer and engine share a GPU."""
        return self.cluster.per_host * self.cluster.hosts == 1

    @property
    def takes_turns(self) -> bool:
        """Return whether engines sleep while a step computes, on the same GPUs."""
        return self.settings.trainer.workers.colocated

    @property
    def trainer_limit(self) -> int:
        """Return the memory that a rank may take of its GPU, in bytes."""
        if self.takes_turns:
            return max(self.cluster.gpu.memory_bytes - memory.ASLEEP, 0)
        share = 1 - engines.utilisation(self.settings.engine) if self.shares_gpu else 1
        return max(int(self.cluster.gpu.memory_bytes * share), 0)

    @property
    def cached_tokens(self) -> int:
        """Return the tokens that the KV cache of an engine holds, those of all its replicas."""
        return self.sizes.data * engines.cached_tokens(self.model, self.settings.engine, self.cluster.gpu.memory_bytes)

    @property
    def step_seconds(self) -> float:
        """Return the seconds of a step, checkpoint and publication left out."""
        return timing.step_seconds(self.settings, list(self.stages))

    @property
    def misses(self) -> tuple[str, ...]:
        """Return what does not fit, each in a sentence. Empty: all fits."""
        return tuple(sentence for excess, sentence in self._held_against_limits() if excess > 1)

    @property
    def excesses(self) -> list[float]:
        """Return needs over limits, the largest first; above 1 something does not fit."""
        return sorted((excess for excess, _ in self._held_against_limits()), reverse=True)

    def _held_against_limits(self) -> Iterator[tuple[float, str]]:
        needed = memory.peak_bytes(self.trainer_gpu)
        yield _excess(needed, self.trainer_limit), f"a trainer's GPU needs {size_text(needed)} of {size_text(self.trainer_limit)}"
        share = engines.utilisation(self.settings.engine)
        gpu = max(int(share * self.cluster.gpu.memory_bytes) - self.takes_turns * memory.GPU_PROCESS, 0)
        fixed = memory.peak_bytes([item for item in self.engine_gpu if item.name != "KV cache"])
        one_context = self.work.tokens * engines.cache_values(self.model, self.sizes) * engines.engine_width(self.settings.engine)
        needed = fixed + max(self.settings.engine.kv_cache_bytes or one_context, one_context)
        yield _excess(needed, gpu), f"an engine's GPU needs {size_text(needed)} of {size_text(gpu)} for its weights and one context"
        limit = self.cluster.host_bytes
        for items in (self.first_host, self.other_host):
            if limit and items:
                needed = memory.peak_bytes(items)
                yield needed / limit, f"a trainer's host needs {size_text(needed)} of {size_text(limit)}"

    def proposals(self) -> list[Proposal]:
        """Return the settings that make this layout."""
        trainer, engine = self.settings.trainer, self.settings.engine
        ranks = f"{self.ranks} GPU(s) on {self.trainer_hosts} host(s), sharded by FSDP2"
        adapters = [
            Proposal("trainer.lora.rank", trainer.lora.rank, "adapters are trained"),
            Proposal("trainer.weight_sync.method", trainer.weight_sync.method, "engines load adapters alone"),
            Proposal("engine.lora_rank", engine.lora_rank, "of the trainer's adapters"),
        ]
        return [
            Proposal("trainer.workers.per_node", trainer.workers.per_node, ranks),
            Proposal("trainer.workers.nodes", trainer.workers.nodes, ""),
            Proposal("trainer.dtype", trainer.dtype, "computation; weights, moments and sums of gradients stay float32"),
            Proposal("trainer.max_tokens_per_device", trainer.max_tokens_per_device, "of a micro-batch"),
            Proposal("trainer.gradient_checkpointing", trainer.gradient_checkpointing, ""),
            *(adapters if engine.lora_rank else []),
            Proposal("engine.max_model_len", engine.max_model_len, "longest prompt and response"),
            Proposal("engine.extra_args", list(engine.extra_args), f"the KV cache holds {self.cached_tokens:,} tokens"),
        ]


def _excess(needed: int, limit: int) -> float:
    return needed / limit if limit else math.inf


def candidates(model: Architecture, settings: Settings, cluster: GpuCluster, kept: Collection[str] = ()) -> list[CapacityPlan]:
    """Return plans of every layout, with each choice of what the settings leave open; settings of the keys `kept` stay as they are.

    Raises:
        SettingsError: what is set leaves no layout of trainer and engines.
    """
    plans = [plan for rank in _ranks(settings, kept) for plan in _plans_of_rank(model, settings, cluster, kept, rank)]
    if not plans:
        raise SettingsError(
            f"no layout of trainer and engines on {cluster.hosts} host(s) of {cluster.per_host} GPU(s) has what is set: "
            f"{', '.join(sorted(kept)) or 'nothing'}. One GPU at least is an engine's; unset trainer.workers and trainer.lora."
        )
    return plans


def best_of(plans: Sequence[CapacityPlan]) -> CapacityPlan:
    """Return the fitting plan of the shortest step, of all weights where those fit; where nothing fits, the nearest miss."""
    fitting = [plan for plan in plans if plan.excesses[0] <= 1]
    if not fitting:
        return min(plans, key=lambda plan: plan.excesses)

    def order(plan: CapacityPlan) -> tuple[float, ...]:
        return plan.lora_rank, plan.step_seconds, plan.sizes.workers, -plan.settings.trainer.max_tokens_per_device

    return min(fitting, key=order)


def by_layout(plans: Sequence[CapacityPlan]) -> list[CapacityPlan]:
    """Return the best plan of each division of the GPUs among engines and trainer, with all weights and with adapters."""
    layouts: dict[tuple[int, int, int], list[CapacityPlan]] = {}
    for plan in plans:
        layouts.setdefault((plan.lora_rank, plan.trainer_hosts, plan.engine_gpus), []).append(plan)
    return [best_of(layouts[layout]) for layout in sorted(layouts)]


def _ranks(settings: Settings, kept: Collection[str]) -> tuple[int, ...]:
    """Return the ranks of adapters that are tried: what is set, and adapters where nothing is."""
    rank = settings.trainer.lora.rank
    return (rank,) if rank or "trainer.lora.rank" in kept else (0, _LORA_RANK)


def _plans_of_rank(
    model: Architecture, settings: Settings, cluster: GpuCluster, kept: Collection[str], rank: int
) -> Iterator[CapacityPlan]:
    context = context_of(model.context, settings.engine.max_model_len)
    trainer = settings.trainer
    bounds = (
        [trainer.max_tokens_per_device] if _BOUND in kept else [bound for bound in dict.fromkeys((*_TOKENS, context)) if bound >= context]
    )
    recomputations = [trainer.gradient_checkpointing] if _RECOMPUTATION in kept else [False, True]
    adapted = _with_adapters(settings, rank)
    fixed_workers = [attrgetter(key) for key in kept if key.startswith("trainer.workers.")]
    is_fixed = "engine.extra_args" in kept
    divisions = [parallel_sizes(settings.engine.extra_args)] if is_fixed else engines.sizes_to_try(model, cluster.per_host)
    layouts = [(sizes, layout) for sizes in divisions for layout in _layouts(cluster, sizes, takes_turns=trainer.workers.colocated)]
    for (sizes, layout), bound, recomputes in itertools.product(layouts, bounds, recomputations):
        served = _with_engine(adapted, cluster, context, None if is_fixed else sizes)
        planned = {
            "workers": trainer.workers.model_copy(update={"per_node": layout.per_node, "nodes": layout.hosts}),
            "max_tokens_per_device": bound,
            "gradient_checkpointing": recomputes,
            "dtype": trainer.dtype or "bf16",
        }
        changed = served.model_copy(update={"trainer": served.trainer.model_copy(update=planned)})
        if all(value(changed) == value(settings) for value in fixed_workers):
            yield _plan(model, changed, cluster, layout)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Division of a cluster among engines and trainer."""

    engines: int
    per_node: int
    """trainer.workers.per_node; 0: the trainer's own process."""
    hosts: int
    """trainer.workers.nodes."""
    has_own_hosts: bool = False


def _layouts(cluster: GpuCluster, sizes: ParallelSizes, *, takes_turns: bool) -> list[_Layout]:
    """Return the divisions of a cluster with engines of so many workers, as many as their GPUs take."""
    whole, rest = divmod(cluster.per_host, sizes.workers)
    if cluster.per_host * cluster.hosts == 1:
        return [_Layout(1, 0, 1)] * (whole == 1)
    if takes_turns:
        return [_Layout(whole, cluster.per_host, cluster.hosts)] * (whole > 0 and not rest)
    apart = [_Layout(whole, cluster.per_host, cluster.hosts - 1, has_own_hosts=True)] * (cluster.hosts > 1 and whole > 0 and not rest)
    shared = range(1, (cluster.per_host - 1) // sizes.workers + 1)
    return [*(_Layout(count, cluster.per_host - count * sizes.workers, cluster.hosts) for count in shared), *apart]


def _with_adapters(settings: Settings, rank: int) -> Settings:
    """Return the settings with adapters of a rank in trainer and engines, unless they have them or train the weights."""
    trainer = settings.trainer
    if rank == trainer.lora.rank:
        return settings
    adapted = {
        "lora": trainer.lora.model_copy(update={"rank": rank}),
        "weight_sync": trainer.weight_sync.model_copy(update={"method": "adapter"}),
    }
    engine = settings.engine.model_copy(update={"lora_rank": rank})
    return settings.model_copy(update={"trainer": trainer.model_copy(update=adapted), "engine": engine})


def _with_engine(settings: Settings, cluster: GpuCluster, context: int, sizes: ParallelSizes | None) -> Settings:
    """Return the settings with the engines' context length, and their share of a GPU and workers; sizes None: arguments stay."""
    takes_turns = settings.trainer.workers.colocated
    share = _SHARED_UTILISATION if cluster.per_host * cluster.hosts == 1 and not takes_turns else _ENGINE_UTILISATION
    asleep = ["--enable-sleep-mode"] * takes_turns
    proposed = (*sizes.arguments, "--gpu-memory-utilization", str(share), *asleep) if sizes else settings.engine.extra_args
    return settings.model_copy(update={"engine": settings.engine.model_copy(update={"max_model_len": context, "extra_args": proposed})})


def _plan(model: Architecture, settings: Settings, cluster: GpuCluster, layout: _Layout) -> CapacityPlan:
    work = timing.workload(model, settings)
    host_ranks = max(settings.trainer.workers.per_node, 1)
    ranks = host_ranks * layout.hosts
    width, gathers = engines.engine_width(settings.engine), settings.engine.transfer == "nccl"

    def host(*, first: bool) -> tuple[MemoryItem, ...]:
        own, tokens = settings.trainer, work.all_tokens
        return tuple(memory.trainer_host(model, own, ranks, host_ranks, tokens, first=first, engine_width=width, gathers=gathers))

    return CapacityPlan(
        model=model,
        settings=settings,
        cluster=cluster,
        work=work,
        engines=layout.engines,
        trainer_hosts=layout.hosts,
        has_own_hosts=layout.has_own_hosts,
        trainer_gpu=tuple(memory.trainer_gpu(model, settings.trainer, ranks)),
        engine_gpu=tuple(engines.engine_gpu(model, settings.engine, cluster.gpu.memory_bytes)),
        first_host=host(first=True),
        other_host=host(first=False) if layout.hosts > 1 else (),
        stages=(
            timing.generation(model, settings, cluster, layout.engines, work),
            *timing.training(model, settings, cluster, ranks, layout.hosts, work),
            *timing.turns(model, settings, cluster, ranks),
            timing.checkpoint(model, settings, cluster, ranks),
            *timing.publications(model, settings, cluster, layout.engines, ranks),
        ),
    )
