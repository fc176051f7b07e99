"""Laws of a plan's memory and time, and the search of settings that fit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commands.training.plan_report import as_json, settings_file
from spangrad.errors import SettingsError
from spangrad.probing.parallel import ParallelSizes
from spangrad.settings import EngineSettings, Settings
from spangrad.settings.sources import load_settings
from tests.support.policies import trainer_settings
from trainer.capacity import engines, memory
from trainer.capacity.architecture import Architecture, architecture_of, read_architecture
from trainer.capacity.hardware import cluster_of
from trainer.capacity.memory import MemoryItem
from trainer.capacity.search import CapacityPlan, best_of, by_layout, candidates
from trainer.publish.parts import HeldParts
from trainer.publish.shared_file import FilePart

MODELS = Path(__file__).parents[1] / "fixtures/models"
SMALL = read_architecture(MODELS / "qwen2.5-7b-instruct")
LARGE = read_architecture(MODELS / "qwen2.5-32b-instruct")


def decoder(kind: str, layers: int, heads: int, group: int, width: int, vocabulary: int, tied: bool) -> Architecture:
    content = {
        "model_type": kind,
        "num_hidden_layers": layers,
        "num_attention_heads": heads * group,
        "num_key_value_heads": heads,
        "hidden_size": heads * group * 64,
        "head_dim": 64,
        "intermediate_size": width,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }
    return architecture_of(content, Path("config.json"))


models = st.builds(
    decoder,
    st.sampled_from(["llama", "qwen2", "qwen3", "gemma2"]),
    st.integers(1, 80),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(64, 30_000),
    st.integers(1000, 200_000),
    st.booleans(),
)
trainers: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "max_tokens_per_device": st.integers(256, 65_536),
        "gradient_checkpointing": st.booleans(),
        "dtype": st.sampled_from(["fp32", "bf16"]),
        "packing": st.sampled_from([True, False]),
        "kl_coef": st.sampled_from([0.0, 0.1]),
        "estimator": st.sampled_from(["grpo", "gae"]),
        "mini_batches": st.sampled_from([1, 2]),
        "max_staleness": st.integers(0, 2),
    }
)


def on_gpu(model: Architecture, changes: dict[str, Any], ranks: int, device: memory.Device = "cuda") -> int:
    return memory.peak_bytes(memory.trainer_gpu(model, trainer_settings(**changes), ranks, device))


def on_host(model: Architecture, changes: dict[str, Any], ranks: int, host_ranks: int) -> int:
    items = memory.trainer_host(model, trainer_settings(**changes), ranks, host_ranks, 1000, first=True, engine_width=2)
    return memory.peak_bytes(items)


@given(models, trainers, st.integers(1, 63))
def test_memory_of_rank_falls_with_ranks(model: Architecture, changes: dict[str, Any], ranks: int) -> None:
    assert on_gpu(model, changes, ranks + 1) <= on_gpu(model, changes, ranks)
    state = {
        ranks: sum(item.bytes for item in memory.trainer_gpu(model, trainer_settings(**changes), ranks, "cpu") if item.phase == "always")
    }
    assert state[ranks] * ranks >= 16 * model.parameters - 16 * ranks, "all shards together are the whole state"


@given(models, trainers, st.integers(1, 4096))
def test_memory_of_rank_rises_with_tokens_and_falls_with_recomputation(model: Architecture, changes: dict[str, Any], more: int) -> None:
    tokens = changes["max_tokens_per_device"]
    assert on_gpu(model, {**changes, "max_tokens_per_device": tokens + more}, 8) >= on_gpu(model, changes, 8)
    state = on_gpu(model, {**changes, "max_tokens_per_device": 1}, 8)
    assert on_gpu(model, {**changes, "max_tokens_per_device": 10**6}, 8) > state
    kept, recomputed = (memory.activations_a_token(model, 2, recomputes=recomputes) * tokens for recomputes in (False, True))
    assert recomputed < kept


@given(models, trainers)
def test_memory_rises_with_each_model_and_copy_that_is_held(model: Architecture, changes: dict[str, Any]) -> None:
    plain = {**changes, "kl_coef": 0.0, "estimator": "grpo", "mini_batches": 1, "max_staleness": 0}
    assert on_gpu(model, {**plain, "kl_coef": 0.1}, 4) - on_gpu(model, plain, 4) == model.parameters
    assert on_gpu(model, {**plain, "estimator": "gae"}, 4) > on_gpu(model, plain, 4)
    assert on_host(model, {**plain, "max_staleness": 2}, 8, 8) > on_host(model, plain, 8, 8)
    adapters = {**plain, "lora__rank": 8}
    assert on_host(model, {**adapters, "max_staleness": 2}, 8, 8) > on_host(model, adapters, 8, 8), "ranks hold earlier adapters as well"
    assert on_gpu(model, {**plain, "lora__rank": 8}, 4) < on_gpu(model, plain, 4)


@given(models, trainers)
def test_host_of_trainer_process_holds_whole_weights_for_nccl_alone(model: Architecture, changes: dict[str, Any]) -> None:
    def host(*, first: bool, gathers: bool, method: str = "transfer") -> int:
        settings = trainer_settings(**changes, weight_sync__method=method)
        return memory.peak_bytes(memory.trainer_host(model, settings, 16, 8, 1000, first=first, engine_width=2, gathers=gathers))

    assert host(first=True, gathers=True) - host(first=True, gathers=False) == 4 * model.parameters
    assert host(first=False, gathers=True) == host(first=False, gathers=False)
    assert host(first=True, gathers=True, method="disk") == host(first=True, gathers=False, method="disk")


def kv_values(model: Architecture) -> int:
    """Return the number of values that a KV cache on one GPU holds for each token."""
    return 2 * model.layers * model.kv_width


@given(models, st.floats(0.5, 0.95))
def test_engine_gpu_with_cache_fills_share_that_is_its_own(model: Architecture, share: float) -> None:
    engine = EngineSettings(extra_args=(f"--gpu-memory-utilization={share}",))
    size = 10**12
    assert memory.peak_bytes(engines.engine_gpu(model, engine, size)) == int(share * size)
    tokens = engines.cached_tokens(model, engine, size)
    assert tokens * kv_values(model) * 2 <= next(item.bytes for item in engines.engine_gpu(model, engine, size) if item.name == "KV cache")
    assert engines.cached_tokens(model, engine, size + 10**11) > tokens


@given(models, st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]))
def test_shares_of_workers_together_are_the_model_and_copies(model: Architecture, tensor: int, pipeline: int) -> None:
    sizes, alone = ParallelSizes(tensor, pipeline), ParallelSizes()
    assert engines.worker_parameters(model, alone) == model.parameters
    assert engines.cache_values(model, alone) == kv_values(model)
    own, cache = engines.worker_parameters(model, sizes), engines.cache_values(model, sizes)
    assert own * sizes.of_replica >= model.parameters
    assert cache * sizes.of_replica >= kv_values(model)
    if model.layers % pipeline == 0 and model.kv_heads % tensor == 0:
        ends = 2 * model.head_parameters + model.hidden
        assert own * sizes.of_replica <= model.parameters + ends * pipeline + model.layers * tensor + sizes.of_replica
        assert cache * sizes.of_replica == kv_values(model)
    assert engines.worker_parameters(model, ParallelSizes(tensor, pipeline, 8)) == own, "a replica has all weights"


def test_sizes_to_try_divide_heads_before_layers() -> None:
    assert list(engines.sizes_to_try(LARGE, 8)) == [ParallelSizes(size) for size in (1, 2, 4, 8)]
    assert list(engines.sizes_to_try(SMALL, 8)) == [*(ParallelSizes(size) for size in (1, 2, 4)), ParallelSizes(4, 2)], "28 heads"
    odd = decoder("llama", 32, 3, 1, 1000, 1000, False)
    assert list(engines.sizes_to_try(odd, 6)) == [ParallelSizes(), ParallelSizes(1, 2), ParallelSizes(1, 4)]


def test_best_of_divides_engine_that_does_not_fit_one_gpu() -> None:
    plan = planned(LARGE, "8x40", 2, trainer__lora__rank=16)
    assert plan.misses == ()
    assert plan.sizes.tensor >= 2
    assert memory.peak_bytes(plan.engine_gpu) <= plan.cluster.gpu.memory_bytes
    assert list(plan.settings.engine.extra_args[:2]) == ["--tensor-parallel-size", str(plan.sizes.tensor)]
    assert plan.engine_gpus + plan.ranks <= 16


def test_best_of_keeps_workers_of_engine_that_user_sets() -> None:
    words = ("-tp", "2", "--pipeline_parallel_size=2", "--data-parallel-size", "2")
    plan = planned(LARGE, "8x80", 2, engine__extra_args=words, trainer__lora__rank=16)
    assert (plan.settings.engine.extra_args, plan.sizes) == (words, ParallelSizes(2, 2, 2))
    assert (plan.engines, plan.engine_gpus, plan.has_own_hosts, plan.ranks) == (1, 8, True, 8)
    weights = next(item.bytes for item in plan.engine_gpu if item.name == "weights")
    assert weights == pytest.approx(2 * LARGE.parameters / 4, rel=0.02), "of a worker"
    replica = engines.cached_tokens(LARGE, plan.settings.engine, plan.cluster.gpu.memory_bytes)
    assert plan.cached_tokens == 2 * replica
    with pytest.raises(SettingsError, match="no layout of trainer and engines"):
        planned(LARGE, "4x80", 1, engine__extra_args=words)


def test_peak_bytes_add_phase_of_most_memory_to_items_of_all_phases() -> None:
    items = [MemoryItem("a", 5), MemoryItem("b", 3, "x"), MemoryItem("c", 1, "y"), MemoryItem("d", 4, "y"), MemoryItem("e", 0)]
    assert (memory.peak_phase(items), memory.peak_bytes(items)) == ("y", 10)
    assert [item.name for item in memory.at_peak(items)] == ["a", "c", "d"]
    assert memory.peak_bytes([]) == 0


def planned(model: Architecture, gpus: str, nodes: int = 1, host_gb: float | None = None, **flags: object) -> CapacityPlan:
    values = {key.replace("__", "."): value for key, value in flags.items()}
    return best_of(candidates(model, load_settings(values, env={}), cluster_of(gpus, nodes, host_gb), list(values)))


@pytest.mark.parametrize(("model", "gpus", "nodes"), [(SMALL, "8x80", 1), (LARGE, "8x80", 2), (SMALL, "8xH100", 1), (LARGE, "8xH200", 1)])
def test_best_of_for_7b_and_32b_trains_all_weights(model: Architecture, gpus: str, nodes: int) -> None:
    plan = planned(model, gpus, nodes)
    assert plan.misses == ()
    assert plan.settings.trainer.lora.rank == 0
    assert memory.peak_bytes(plan.trainer_gpu) <= plan.trainer_limit
    assert memory.peak_bytes(plan.engine_gpu) <= plan.cluster.gpu.memory_bytes
    assert plan.cached_tokens >= plan.work.tokens
    assert plan.engine_gpus + plan.settings.trainer.workers.per_node <= 8
    assert plan.step_seconds > 0


def test_best_of_where_weights_do_not_fit_proposes_adapters() -> None:
    plan = planned(LARGE, "8x80")
    assert plan.misses == ()
    assert plan.settings.trainer.lora.rank == plan.settings.engine.lora_rank == 16
    assert plan.settings.trainer.weight_sync.method == "adapter"


def test_best_of_keeps_settings_of_user() -> None:
    kept: dict[str, Any] = {
        "trainer__max_tokens_per_device": 8192,
        "trainer__gradient_checkpointing": True,
        "trainer__workers__per_node": 6,
        "engine__max_model_len": 2048,
    }
    plan = planned(SMALL, "8x80", **kept)
    trainer = plan.settings.trainer
    assert (trainer.max_tokens_per_device, trainer.gradient_checkpointing, trainer.workers.per_node, plan.engine_gpus) == (8192, True, 6, 2)
    assert plan.work.tokens == 2048
    with pytest.raises(SettingsError, match=r"has what is set: trainer.workers.per_node"):
        planned(SMALL, "8x80", trainer__workers__per_node=8)


def test_best_of_within_known_memory_of_hosts_writes_smaller_versions() -> None:
    free, bound = planned(LARGE, "8x80", 2), planned(LARGE, "8x80", 2, 200)
    assert memory.peak_bytes(free.first_host) > 200e9
    assert (free.lora_rank, bound.lora_rank, bound.misses) == (0, 16, ())
    assert memory.peak_bytes(bound.first_host) <= 200e9
    short = planned(LARGE, "8x80", 2, 5)
    assert any(miss.startswith("a trainer's host needs ") for miss in short.misses)


@pytest.mark.parametrize(
    ("dtype", "sync", "bytes_a_parameter"),
    [
        ("auto", {"method": "transfer"}, 2 + 4 / 8),
        ("float32", {"method": "transfer"}, 4 + 6 / 8),
        ("auto", {"method": "transfer", "delta": False}, 2),
        ("auto", {"method": "transfer", "publish": False}, 0),
        ("auto", {}, 0),
    ],
)
def test_memory_of_host_has_weights_that_are_sent(dtype: str, sync: dict[str, object], bytes_a_parameter: float) -> None:
    flags: dict[str, Any] = {f"trainer__weight_sync__{name}": value for name, value in sync.items()}
    plan = planned(LARGE, "8x80", 2, engine__dtype=dtype, trainer__lora__rank=0, **flags)
    for items in filter(None, (plan.first_host, plan.other_host)):
        sent = next(item for item in items if item.name == "weights that are sent")
        of_host = plan.settings.trainer.workers.per_node / plan.ranks
        assert sent.bytes == pytest.approx(bytes_a_parameter * LARGE.parameters * of_host, rel=1e-6)
        assert sent.phase == memory.ALWAYS, "they are kept from one publication to the next"


def test_sent_bytes_are_those_that_rank_holds_where_most_changes_are_kept() -> None:
    words = SMALL.hidden * SMALL.kv_width
    before = np.zeros(words, np.float32)
    after = np.where(np.arange(words) % 8 == 0, np.float32(1), before)
    held = HeldParts("bfloat16")
    for version, values in enumerate((before, after)):
        held.take([FilePart("w", values.shape, 0, values)], str(version), keep_changes=True)
    (part,) = held._parts
    assert part.changes is not None
    kept = part.words.nbytes + part.changes.places.nbytes + part.changes.differences.nbytes
    sent = memory.sent_bytes(SMALL, trainer_settings(weight_sync__method="transfer"), 2)
    assert kept / words == pytest.approx(sent / SMALL.parameters, rel=1e-6)


def test_best_of_where_nothing_fits_names_need_and_limit_of_nearest_miss() -> None:
    plan = planned(LARGE, "2x24")
    assert plan.excesses[0] > 1
    assert any(re.match(r"a trainer's GPU needs [\d.]+ GiB of 22\.4 GiB", miss) for miss in plan.misses)


def test_settings_file_of_plan_is_read_as_settings_of_plan(tmp_path: Path) -> None:
    for number, plan in enumerate((planned(LARGE, "8x80"), planned(SMALL, "1x80"), planned(LARGE, "8x80", 2))):
        file = tmp_path / f"{number}.toml"
        file.write_text(settings_file(plan, MODELS / "qwen2.5-7b-instruct"))
        read = load_settings(file=file, env={})
        model = (MODELS / "qwen2.5-7b-instruct").absolute()
        assert read.trainer == plan.settings.trainer.model_copy(update={"model": model})
        assert read.engine == plan.settings.engine.model_copy(update={"model": model})
        assert len(read.gateway.backends) == plan.engines - 1


def test_as_json_of_plan_has_sums_of_items() -> None:
    facts = json.loads(as_json(planned(SMALL, "8x80")))
    assert facts["fits"]
    for part in facts["memory"].values():
        assert part["bytes"] == sum(item["bytes"] for item in part["items"])
    assert facts["settings"]["trainer.dtype"] == "bf16"


@pytest.mark.parametrize(
    ("gpus", "name", "gigabytes"), [("8x80", "A100-80", 84.8), ("4xh100", "H100", 84.8), ("1x24", "24 GB, computing like L40S", 24)]
)
def test_cluster_of_takes_memory_or_name(gpus: str, name: str, gigabytes: float) -> None:
    cluster = cluster_of(gpus, 2)
    assert cluster.gpu.name.startswith(name)
    assert cluster.gpu.memory_bytes / 1e9 == pytest.approx(gigabytes, abs=0.1)
    assert (cluster.per_host, cluster.hosts) == (int(gpus[0]), 2)


@pytest.mark.parametrize("gpus", ["8", "0x80", "8x", "x80", "8xB0", "8x-1", "8 x 80", "8x00080", "65x80", "999x80"])
def test_cluster_of_other_text_is_refused_with_remedy(gpus: str) -> None:
    with pytest.raises(SettingsError, match=r"8x80"):
        cluster_of(gpus, 1)


@pytest.mark.parametrize("gigabytes", [0, -1, float("inf"), float("nan")])
def test_cluster_of_other_host_memory_is_refused_by_its_name(gigabytes: float) -> None:
    with pytest.raises(SettingsError, match=rf"--host-memory {gigabytes:g} is no memory of a node"):
        cluster_of("8x80", 1, gigabytes)


@pytest.mark.parametrize(
    ("gpus", "flags", "missing"),
    [
        ("1x80", {"engine__extra_args": ["--gpu-memory-utilization", "1"]}, "a trainer's GPU needs"),
        ("8x1", {"trainer__workers__colocated": True}, "an engine's GPU needs"),
        ("8x80", {"engine__extra_args": ["--gpu-memory-utilization", "0"]}, "an engine's GPU needs"),
    ],
)
def test_plan_that_leaves_a_part_no_memory_misses_it(gpus: str, flags: dict[str, object], missing: str) -> None:
    plan = planned(SMALL, gpus, **flags)
    assert [miss for miss in plan.misses if missing in miss and "of 0.0 MiB" in miss]


def test_generation_and_training_overlap_where_staleness_lets_them() -> None:
    waits, overlaps = planned(SMALL, "8x80"), planned(SMALL, "8x80", trainer__sampling__max_staleness=1)
    assert overlaps.step_seconds < waits.step_seconds


def test_plan_of_turns_gives_every_gpu_to_both_and_waits_for_the_moves() -> None:
    apart, turns = planned(SMALL, "8x80"), planned(SMALL, "8x80", trainer__workers__colocated=True, trainer__sampling__max_staleness=1)
    assert (turns.engine_gpus, turns.ranks, turns.misses) == (8, 8, ())
    assert turns.settings.engine.extra_args[-3:] == ("--gpu-memory-utilization", "0.9", "--enable-sleep-mode")
    assert turns.trainer_limit == turns.cluster.gpu.memory_bytes - memory.ASLEEP
    seconds = {stage.name: stage.seconds for stage in turns.stages}
    together = ("generation", "forward and backward", "update", "turns of trainer and engines")
    assert turns.step_seconds == pytest.approx(sum(seconds[name] for name in together))
    moved = next(item.bytes for item in turns.first_host if item.name == "models while engines serve")
    assert moved == 12 * SMALL.parameters + memory.checkpoint_bytes(SMALL, turns.settings.trainer)
    assert all(item.name != "models while engines serve" or not item.bytes for item in apart.first_host)
    alone = planned(SMALL, "1x80", trainer__workers__colocated=True, trainer__lora__rank=16)
    assert (alone.engines, alone.settings.trainer.workers.per_node, alone.misses) == (1, 0, ())


def test_by_layout_has_best_plan_of_each_division_of_gpus() -> None:
    plans = candidates(LARGE, Settings(), cluster_of("4x80", 2))
    layouts = by_layout(plans)
    assert [(plan.lora_rank, plan.trainer_hosts, plan.engine_gpus) for plan in layouts] == [
        (rank, hosts, gpus) for rank in (0, 16) for hosts, gpus in ((1, 4), (2, 1), (2, 2), (2, 3))
    ]
    assert best_of(layouts) == best_of(plans)
