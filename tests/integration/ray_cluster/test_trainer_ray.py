"""Workers under Ray against the engine of one process: the same steps, the same state, and no end without an error."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import psutil
import pytest
import torch
from safetensors.numpy import load_file

from spangrad.errors import BadRowsError, CheckpointError, SettingsError, TrainerError
from spangrad.settings import TrainerSettings
from spangrad.settings.trainer_learning import Correction
from tests.integration.ray_cluster.optimizers import CPUS, RATE, RayOptimizers, group, settings
from tests.support.policies import sampled_rows, state_facts, state_of, trainer_settings
from tests.support.trainers import save, written
from trainer.data.batch import Batch, layout
from trainer.data.merge import separate
from trainer.distributed.row_queue import RowQueue
from trainer.optim.optimizer import VerlOptimizer
from trainer.optim.process import dtype_of, is_packed
from trainer.publish import checkpoint

ROWS = 23
"""Odd, so that two workers need a no-op row."""
SETTINGS: dict[str, Any] = {
    "epochs": 2,
    "mini_batches": 3,
    "recompute_logprobs": True,
    "correction": Correction(weights="token"),
    "max_tokens_per_device": 64,
}
"""Several steps a batch, cut into micro-batches, held to a reference, corrected."""


@pytest.fixture(scope="module")
def rows(tiny_model: Path) -> pl.DataFrame:
    whole = sampled_rows(tiny_model, 12, temperature=1.0, seed=1) + sampled_rows(tiny_model, ROWS - 12, temperature=0.7, seed=2)
    return pl.DataFrame(whole)


@pytest.fixture(scope="module")
def engines(ray_optimizers: RayOptimizers) -> Iterator[dict[int, VerlOptimizer]]:
    """Yield optimizers with 0 and 2 workers under Ray, which both send weights; 0 runs here with as many threads as a worker has.

    Sums of floats differ by the number of threads.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield ray_optimizers.reset(**SETTINGS)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def one_worker(engines: dict[int, VerlOptimizer], tiny_model: Path) -> Iterator[VerlOptimizer]:
    """Yield an optimizer with 1 worker."""
    engine = sender(tiny_model, 1)
    yield engine
    engine.close()


def sender(model: Path, workers: int) -> VerlOptimizer:
    return VerlOptimizer(model, settings(model, **SETTINGS, workers__per_node=workers))


def batch(engine: VerlOptimizer, rows: pl.DataFrame, *, current: bool = True) -> Batch:
    built = layout(separate(rows, pl.Series(np.linspace(-1, 1, len(rows)))), lineage=[0], divisor=engine.data_parallel_size)
    return built if current else replace(built, staleness=np.full_like(built.staleness, -1))


def weights(engine: VerlOptimizer) -> dict[str, np.ndarray]:
    return {name: value.copy() for name, value in engine.weights()}


def differences(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> float:
    assert left.keys() == right.keys()
    return max(float(np.abs(left[name] - right[name]).max()) for name in left)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())


def rank_pids(engine: VerlOptimizer) -> list[int]:
    import ray

    return ray.get([actor.__ray_call__.remote(lambda _: os.getpid()) for actor in group(engine).workers])


def stepped_twice(engine: VerlOptimizer, rows: pl.DataFrame) -> list[dict[str, float]]:
    """Metrics of two steps, between which the models leave the device and come back."""
    first = engine.step(batch(engine, rows, current=True))
    engine.offload()
    engine.load_back()
    return [first, engine.step(batch(engine, rows, current=False))]


def test_ray_workers_step_as_one_process(engines: dict[int, VerlOptimizer], rows: pl.DataFrame) -> None:
    assert {count: engine.data_parallel_size for count, engine in engines.items()} == {0: 1, 2: 2}
    before = weights(engines[0])
    metrics = {count: stepped_twice(engine, rows) for count, engine in engines.items()}
    for two, none in zip(metrics[2], metrics[0], strict=True):
        assert two.keys() == none.keys()
        assert two["updated"] == 6
        alike = ("loss", "grad_norm", "reference_kl", "correction_weight_mean", "correction_kl")
        assert [two[name] for name in alike] == pytest.approx([none[name] for name in alike], rel=5e-6, abs=1e-6)
    assert metrics[2][0]["logprob_gap_max"] == pytest.approx(metrics[0][0]["logprob_gap_max"], abs=1e-6)
    held = {count: weights(engine) for count, engine in engines.items()}
    assert differences(held[0], before) > RATE
    # A tenth of one step's rate after twelve: AdamW magnifies what another order of sums leaves of gradients near 0.
    assert differences(held[2], held[0]) < RATE / 10


@pytest.mark.slow
def test_one_ray_worker_steps_as_one_process(
    one_worker: VerlOptimizer, engines: dict[int, VerlOptimizer], tiny_model: Path, rows: pl.DataFrame
) -> None:
    alone = sender(tiny_model, 0)
    assert stepped_twice(one_worker, rows) == stepped_twice(alone, rows)
    assert differences(weights(one_worker), weights(alone)) == 0
    assert [len(engine.rank_senders) for engine in (one_worker, alone)] == [1, 1]


def test_ray_workers_refused_batch_leaves_weights_unchanged(engines: dict[int, VerlOptimizer], rows: pl.DataFrame) -> None:
    """The wrong row is the last: the first worker never sees it."""
    engine = engines[2]
    before = weights(engine)
    good = batch(engine, rows, current=False)
    wrong = replace(good, logprobs=good.logprobs.copy(), staleness=np.zeros_like(good.staleness))
    wrong.logprobs[ROWS - 1] -= 9
    with pytest.raises(BadRowsError, match="so no step was taken") as raised:
        engine.step(wrong)
    assert raised.value.rows[ROWS - 1] == "logprob_gap"
    assert differences(before, weights(engine)) == 0


def test_ray_workers_have_priority_of_trainer(engines: dict[int, VerlOptimizer]) -> None:
    assert {psutil.Process(pid).nice() for pid in rank_pids(engines[2])} == {psutil.Process().nice()}


def test_ray_workers_each_send_their_share(engines: dict[int, VerlOptimizer]) -> None:
    assert {count: len(engine.rank_senders) for count, engine in engines.items()} == {0: 1, 2: 2}
    assert len({address.url for engine in engines.values() for address in engine.rank_senders}) == 3


def test_ray_workers_state_loads_in_any_number_of_workers(
    engines: dict[int, VerlOptimizer], tiny_model: Path, rows: pl.DataFrame, tmp_path: Path
) -> None:
    paths = {count: written(engine, tiny_model, tmp_path / str(count)).path for count, engine in engines.items()}
    kept = {count: state_facts(path) for count, path in paths.items()}
    assert len(kept[0]) > 40
    assert {name: value.shape for name, value in kept[2].items()} == {name: value.shape for name, value in kept[0].items()}
    assert [sum(name.startswith("random.") for name in state_of(paths[count])) for count in (0, 2)] == [1, 2]

    alone = VerlOptimizer(paths[2], settings(tiny_model, **SETTINGS))
    alone.load_state(paths[2])
    alone.step(batch(alone, rows, current=False))
    engines[2].step(batch(engines[2], rows, current=False))
    assert differences(weights(alone), weights(engines[2])) < RATE / 100

    engines[2].load_state(paths[0])
    save(engines[2], tmp_path)
    assert same(state_facts(tmp_path), kept[0]), "two workers hold what one has written"
    for file in sorted((tmp_path / checkpoint.STATE).glob("*.distcp"))[1:]:
        file.write_bytes(b"cut")
    with pytest.raises(CheckpointError, match=r"optimizer cannot be read \("):
        engines[2].load_state(tmp_path)
    save(engines[2], tmp_path)
    assert same(state_facts(tmp_path), kept[0]), "workers that refuse alike stand as before"


def test_ray_worker_writes_checkpoint_beside_passes(engines: dict[int, VerlOptimizer], rows: pl.DataFrame, tmp_path: Path) -> None:
    """A write that waits for a file, which the step makes once its passes are done, and before its first update."""
    import ray

    engine, began, released = engines[2], tmp_path / "began", tmp_path / "released"

    def slow(rank: Any) -> None:
        from trainer.optim import rank as ranks

        original = ranks.write_parts

        def write_parts(*arguments: Any, **options: Any) -> None:
            ranks.write_parts = original
            began.touch()
            while not released.exists():
                time.sleep(0.01)
            original(*arguments, **options)

        ranks.write_parts = write_parts

    save(engines[0], tmp_path / "alone")
    expected = weights(engine)
    first = group(engine).workers[0]
    ray.get(first.__ray_call__.remote(slow))
    engine.collect()
    thread = threading.Thread(target=engine.write, args=(tmp_path,), daemon=True)
    thread.start()
    while not began.exists():
        time.sleep(0.01)
    beside: list[bool] = []

    def before_update() -> None:
        beside.append(thread.is_alive())
        released.touch()
        thread.join()

    assert engine.step(batch(engine, rows, current=False), before_update)["updated"] == 6
    assert beside == [True]
    held = load_file(tmp_path / checkpoint.WEIGHTS)
    assert differences(held, expected) == 0
    assert differences(weights(engine), expected) > RATE / 100
    assert state_facts(tmp_path).keys() == state_facts(tmp_path / "alone").keys()
    engine.collect()
    with pytest.raises(FileNotFoundError, match="No such file or directory"):
        engine.write(tmp_path / "no directory")


def test_ray_workers_outlive_error_of_commit_before_update(engines: dict[int, VerlOptimizer], rows: pl.DataFrame) -> None:
    import transfer_queue

    engine = engines[2]
    pids = rank_pids(engine)

    def before_update() -> None:
        raise CheckpointError("version 1 could not be written: the disk is full.")

    with pytest.raises(CheckpointError, match="the disk is full"):
        engine.step(batch(engine, rows, current=False), before_update)
    assert rank_pids(engine) == pids
    assert not any(transfer_queue.kv_list().values())
    engine._workers.everywhere("undo_step")


def test_ray_worker_that_dies_ends_step_with_error(engines: dict[int, VerlOptimizer], rows: pl.DataFrame) -> None:
    """Kill -9 the second of two, which is stopped, so that the first waits for it. The next `reset` makes another."""
    engine = engines[2]
    first, second = rank_pids(engine)
    os.kill(second, signal.SIGSTOP)
    raised: list[BaseException] = []

    def step() -> None:
        try:
            engine.step(batch(engine, rows, current=False))
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    os.kill(second, signal.SIGKILL)
    thread.join(60)
    assert [type(one) for one in raised] == [TrainerError]
    assert "worker 1 of 2 died in `" in str(raised[0])
    assert "The batch is trained again at the next start." in str(raised[0])
    psutil.wait_procs([psutil.Process(pid) for pid in (first, second) if psutil.pid_exists(pid)], timeout=30)
    assert not psutil.pid_exists(first), "the worker that was left waits for ever"
    with pytest.raises(TrainerError, match="workers have ended"):
        engine.step(batch(engine, rows, current=False))


@pytest.mark.usefixtures("ray_optimizers")
def test_ray_workers_beyond_cluster_raise_before_any_starts(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowQueue, "open", lambda *_: pytest.fail("the queue was started"))
    own = settings(tiny_model, workers__per_node=CPUS + 1)
    with pytest.raises(TrainerError, match=r"trainer\.workers\.per_node = 7 needs as many nodes with that many CPUs each, .* are 6\."):
        VerlOptimizer(tiny_model, own)
    with pytest.raises(TrainerError, match=r"trainer\.workers\.nodes = 2 with trainer\.workers\.per_node = 1"):
        VerlOptimizer(tiny_model, settings(tiny_model, workers__per_node=1, nodes=2))


@pytest.mark.slow
def test_row_queue_that_dies_ends_step_with_error(one_worker: VerlOptimizer, rows: pl.DataFrame) -> None:
    """TransferQueue's own calls would wait for its controller for ever. The last test of this engine."""
    import ray

    ray.kill(RowQueue._actors[0])
    with pytest.raises(
        TrainerError, match=r"the queue of the rows between this trainer and its workers has ended \(.*\), and they were ended"
    ):
        one_worker.step(batch(one_worker, rows, current=False))
    with pytest.raises(TrainerError, match="workers have ended"):
        one_worker.step(batch(one_worker, rows, current=False))


def test_is_packed_by_default_on_gpu_with_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = TrainerSettings()
    assert not is_packed(asked, "cuda"), "flash-attn is not installed here"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name == "flash_attn" else None)
    assert [is_packed(asked, device) for device in ("cpu", "cuda")] == [False, True]
    assert not is_packed(trainer_settings(packing=False), "cuda")


def test_dtype_of_by_default_is_bf16_on_gpu() -> None:
    assert [dtype_of(TrainerSettings(), device) for device in ("cpu", "cuda")] == ["fp32", "bf16"]
    assert dtype_of(trainer_settings(dtype="bf16"), "cpu") == "bf16"


def test_packing_on_cpu_raises(tiny_model: Path) -> None:
    with pytest.raises(SettingsError, match=r"trainer\.packing = true needs a GPU"):
        VerlOptimizer(tiny_model, trainer_settings(packing=True))


def test_gradient_checkpointing_and_bf16_train_on_cpu(tiny_model: Path, rows: pl.DataFrame) -> None:
    plain, frugal, coarse = (
        VerlOptimizer(tiny_model, trainer_settings(learning_rate=1e-3, **changes))
        for changes in ({}, {"gradient_checkpointing": True}, {"dtype": "bf16"})
    )
    metrics = [engine.step(batch(engine, rows)) for engine in (plain, frugal, coarse)]
    assert metrics[1] == metrics[0]
    assert frugal._workers._rank._models["policy"].engine.module.is_gradient_checkpointing
    assert differences(weights(plain), weights(frugal)) == 0
    assert 1e-4 < metrics[2]["logprob_gap_max"] < 0.1, "computed in bfloat16"
    assert {value.dtype for value in weights(coarse).values()} == {np.dtype(np.float32)}
