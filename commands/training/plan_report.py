"""Report of `spangrad plan`: tables, JSON, and a settings file.

In: a `CapacityPlan`. Out: text. Invariant: the settings file is read by every command (`--config`), and has what the tables show.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.capacity.memory import MemoryItem
    from trainer.capacity.search import CapacityPlan

_FIRST_PORT = 8000


def show(plan: CapacityPlan, layouts: Sequence[CapacityPlan]) -> None:
    """Print the layout, memory by item, stages of a step, the best plan of each layout, and the settings."""
    from commands.console import plain_console, print_table
    from spangrad.probing.proposals import size_text
    from trainer.capacity import memory

    console = plain_console(highlight=False)
    for line in _head(plan):
        console.print(line, soft_wrap=True)
    cells: list[tuple[str, str, str]] = []
    for title, items, limit in _parts(plan):
        room = f"of {size_text(limit)}" if limit else ""
        cells.append((title, size_text(memory.peak_bytes(items)), room))
        cells += [("  " + item.name, size_text(item.bytes), item.phase) for item in memory.at_peak(items)]
    console.print()
    print_table(("memory at its peak", "size", "phase"), cells, right=(1,))
    console.print()
    stages = [(stage.name, f"{stage.seconds:,.1f}", size_text(stage.bytes_moved), stage.where) for stage in plan.stages]
    print_table(("stage", "seconds", "moves", "where"), stages, right=(1, 2))
    console.print()
    print_table(_LAYOUT_COLUMNS, [_layout_row(each) for each in layouts], right=(0, 1, 4, 5, 6))
    console.print()
    for line in _notes(plan):
        console.print(line, soft_wrap=True)
    if not plan.misses:
        console.print("\nSettings that fit (--write FILE writes them):", soft_wrap=True)
        print_table(("setting", "value", "why"), [(each.key, each.value, each.reason) for each in plan.proposals()])


def _head(plan: CapacityPlan) -> list[str]:
    model, cluster = plan.model, plan.cluster
    active = f", {model.active_parameters:,} active for a token" if model.expert_layers else ""
    where = "hosts of its own" if plan.has_own_hosts else "the engines' host and the others" if plan.trainer_hosts > 1 else "the same host"
    trained = f"adapters of rank {plan.lora_rank}" if plan.lora_rank else "all weights"
    sharing = ", by turns with the engines" if plan.takes_turns else ", sharing the GPU with the engine" if plan.shares_gpu else ""
    return [
        f"{model.kind}: {model.parameters:,} parameters{active}, on {cluster.hosts} node(s) of {cluster.per_host} x {cluster.gpu.name}",
        f"{'Nearest miss' if plan.misses else 'Fits'}: {trained}; {plan.engines} engine(s) of {plan.sizes.workers} "
        f"worker(s), a GPU each{f' ({plan.sizes.label})' if plan.sizes.label else ''}, on the gateway's host; trainer of "
        f"{plan.ranks} rank(s) on {where}{sharing}",
    ]


_LAYOUT_COLUMNS = ("engines", "ranks", "trains", "activations", "GPU of a rank", "host", "step, s", "what fits")


def _layout_row(plan: CapacityPlan) -> tuple[str, ...]:
    from spangrad.probing.proposals import size_text
    from trainer.capacity import memory

    trained = f"adapters of rank {plan.lora_rank}" if plan.lora_rank else "all weights"
    kept = "recomputed" if plan.settings.trainer.gradient_checkpointing else "kept"
    peaks = (size_text(memory.peak_bytes(items)) for items in (plan.trainer_gpu, plan.first_host))
    fits = "; ".join(miss.split(" needs ")[0] + " does not" for miss in plan.misses) or "all"
    return f"{plan.engines} {plan.sizes.label}".rstrip(), str(plan.ranks), trained, kept, *peaks, f"{plan.step_seconds:,.0f}", fits


def _parts(plan: CapacityPlan) -> list[tuple[str, Sequence[MemoryItem], int | None]]:
    """Return the devices and hosts of a plan, each with its items and the memory that it has; None: not known."""
    limit = plan.cluster.host_bytes
    return [
        ("GPU of the trainer, each", plan.trainer_gpu, plan.trainer_limit),
        ("GPU of an engine's worker, each", plan.engine_gpu, plan.cluster.gpu.memory_bytes),
        ("host of the trainer, first", plan.first_host, limit),
        *([("host of the trainer, others", plan.other_host, limit)] if plan.other_host else []),
    ]


def _notes(plan: CapacityPlan) -> list[str]:
    from trainer.capacity import hardware, memory

    gpu, work = plan.cluster.gpu, plan.work
    return [
        f"A step: {work.rollouts} rollouts of {work.tokens:,} tokens, all sampled (trainer.sampling.groups_per_batch x runner.group_size, "
        f"engine.max_model_len), {plan.step_seconds:,.0f} s of generation and training. An engine caches {plan.cached_tokens:,} tokens.",
        f"Figures of {gpu.name}: {gpu.bf16_flops / 1e12:g} TFLOP/s of bfloat16, {gpu.memory_rate / 1e9:g} GB/s of memory, "
        f"{gpu.peer_rate / 1e9:g} GB/s to another GPU, {gpu.host_rate / 1e9:g} GB/s to the host.",
        f"Assumed: MFU {hardware.TRAINING_MFU:g} in training, {hardware.DECODE_SHARE:g} of the memory's rate in decoding, network of a "
        f"host {hardware.NETWORK_RATE / 1e9:g} GB/s, disk {hardware.DISK_RATE / 1e9:g} GB/s, fragmentation {memory.FRAGMENTATION:.0%}.",
        *(
            ["trainer.workers.ray_address must name a Ray cluster of the trainer's hosts (docs/start/scaling.md)."]
            * (plan.trainer_hosts > 1)
        ),
    ]


def as_json(plan: CapacityPlan) -> str:
    """Return the plan as JSON: sizes in bytes, `settings` by key."""
    from trainer.capacity import memory

    parts = {
        title: {
            "bytes": memory.peak_bytes(items),
            "limit": limit,
            "items": [asdict(item) for item in memory.at_peak(items)],
        }
        for title, items, limit in _parts(plan)
    }
    return json.dumps(
        {
            "model": plan.model.kind,
            "parameters": plan.model.parameters,
            "active_parameters": plan.model.active_parameters,
            "fits": not plan.misses,
            "misses": plan.misses,
            "engines": plan.engines,
            "engine_workers": asdict(plan.sizes),
            "ranks": plan.ranks,
            "memory": parts,
            "cached_tokens": plan.cached_tokens,
            "stages": [asdict(stage) for stage in plan.stages],
            "step_seconds": plan.step_seconds,
            "settings": {proposal.key: proposal.value for proposal in plan.proposals()},
        }
    )


def settings_file(plan: CapacityPlan, model: Path) -> str:
    """Return a settings file in TOML with the settings that fit a model, named by its directory or its config.json."""
    from spangrad.probing.proposals import Proposal, settings_text

    directory = str((model if model.is_dir() else model.parent).absolute())
    proposals = [
        Proposal("engine.model", directory, ""),
        Proposal("trainer.model", directory, "training begins with these weights"),
        *plan.proposals(),
    ]
    gpus = f"{plan.cluster.hosts} node(s) of {plan.cluster.per_host} x {plan.cluster.gpu.name}"
    layout = f"{plan.engines} engine(s) of {plan.sizes.workers} worker(s), {plan.ranks} rank(s) of the trainer"
    title = f"Written by `spangrad plan` for {gpus}: {layout}."
    backends = [f'\n[[gateway.backends]]\nurl = "http://127.0.0.1:{_FIRST_PORT + place}"\n' for place in range(1, plan.engines)]
    return settings_text(proposals, title) + "".join(backends)
