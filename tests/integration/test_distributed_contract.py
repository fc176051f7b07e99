"""Contract with verl 0.9.1: every hook, attribute and function of it that the distributed trainer builds on, by name.

verl's V1 trainer is new and moves between releases: after an update, what is not found here is to be looked at first.
"""

from __future__ import annotations

import inspect
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from trainer.optim.process import prepare_process

prepare_process()  # verl reads its platform when it is first imported

from trainer.distributed import ranks, row_queue, store_trainer, worker_group  # noqa: E402

HOOKS = {
    "init", "prepare_step", "on_sample_end", "on_step_end", "_init_dataloader", "_build_replay_buffer", "_init_resource_pool_mgr",
    "_load_checkpoint", "_save_checkpoint", "_get_required_batch_multiple", "_balance_batch", "_compute_old_log_prob",
    "_compute_ref_log_prob", "_compute_values", "_compute_advantage", "_update_critic", "_update_actor",
}  # fmt: skip
"""Methods of PPOTrainer that are replaced."""
CALLED = {"step", "on_step_begin"}
"""Methods of PPOTrainer that are called."""
ASSIGNED = {"actor_rollout_wg", "ref_policy_wg", "critic_wg", "replay_buffer", "use_critic", "use_reference_policy"}
"""Attributes that PPOTrainer assigns, and the trainer here reads."""


def test_optimizer_of_one_process_names_neither_ray_nor_its_queue() -> None:
    files = [path for folder in ("optim", "sft", "data", "credit") for path in (Path("trainer") / folder).rglob("*.py")]
    pattern = re.compile(r"^\s*(import|from) (ray|transfer_queue)\b", re.MULTILINE)
    assert [path.name for path in files if pattern.search(path.read_text())] == []


def test_versions_are_those_of_the_contract() -> None:
    assert (version("verl"), version("TransferQueue")) == ("0.9.1", "0.1.11")


def test_store_trainer_replaces_hooks_of_verls_trainer() -> None:
    trainer, verls = store_trainer.StoreTrainer, store_trainer.PPOTrainer
    assert {name for name in vars(trainer) if callable(getattr(trainer, name)) and hasattr(verls, name)} - {"__init__"} == HOOKS
    assert all(callable(getattr(verls, name)) for name in CALLED)
    for name in HOOKS - {"_balance_batch"}:
        assert list(inspect.signature(getattr(trainer, name)).parameters) == list(inspect.signature(getattr(verls, name)).parameters), name
    assert not inspect.isabstract(trainer)
    source = inspect.getsource(verls)
    assert all(f"self.{name} = " in source for name in ASSIGNED)
    assert {"_enable_hybrid_replicas", "ref_in_actor"} <= set(source.replace('"', " ").replace(".", " ").split())


def test_step_of_verls_trainer_calls_hooks_in_order_of_phases() -> None:
    source = inspect.getsource(store_trainer.PPOTrainer._step_once)
    order = [
        "replay_buffer.sample(", "_balance_batch(", "_compute_old_log_prob(", "_compute_ref_log_prob(", "_compute_values(",
        "_compute_advantage(", "_update_critic(", "_update_actor(",
    ]  # fmt: skip
    places = [source.index(call) for call in order]
    assert places == sorted(places)


@pytest.mark.parametrize("name", ["RayWorkerGroup", "LLMServerManager"])
def test_names_that_are_replaced_are_read_from_the_module_of_verls_trainer(name: str) -> None:
    from verl.trainer.ppo.v1 import trainer_base

    source = inspect.getsource(trainer_base.PPOTrainer._setup)
    assert f"{name}(" in source or f"{name}." in source
    assert hasattr(trainer_base, name)


@pytest.mark.parametrize("name", ["apply_fsdp2", "fsdp2_load_full_state_dict"])
def test_names_of_loading_by_rows_are_read_from_the_module_of_verls_engine(name: str) -> None:
    from verl.workers.engine.fsdp import transformer_impl

    assert f" {name}(module, " in inspect.getsource(transformer_impl.FSDPEngine._build_fsdp_module)
    assert hasattr(transformer_impl, name)


@pytest.mark.parametrize(
    ("ours", "names"),
    [
        (ranks.QueueActor, ["init_model", "compute_log_prob", "compute_ref_log_prob"]),
        (ranks.QueueCritic, ["reset", "infer_batch", "train_batch"]),
    ],
)
def test_workers_replace_methods_of_verls_workers(ours: Any, names: list[str]) -> None:
    from verl.single_controller.base.decorator import MAGIC_ATTR
    from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

    verls = ActorRolloutRefWorker if ours is ranks.QueueActor else TrainingWorker
    for name in names:
        assert hasattr(getattr(verls, name), MAGIC_ATTR), name
        assert hasattr(getattr(ours, name), MAGIC_ATTR), name
    assert all(hasattr(verls, name) for name in ("set_loss_fn",))


def test_worker_group_replaces_methods_of_verls_group() -> None:
    from verl.single_controller.ray.base import RayWorkerGroup

    group = worker_group.worker_group(worker_group.RankCalls(None, lambda _: None), {})
    replaced = {name for name in vars(group) if inspect.isfunction(getattr(group, name)) and name != "__init__"}
    assert replaced == {"_get_master_addr_port", "execute_all"}
    assert all(hasattr(RayWorkerGroup, name) for name in replaced | {"execute_all_async", "execute_rank_zero_async", "workers"})


def test_transfer_queue_has_functions_of_row_queue() -> None:
    import transfer_queue
    from verl.utils import transferqueue_utils

    assert all(callable(getattr(transfer_queue, name)) for name in ("init", "close", "kv_batch_put", "kv_batch_get", "kv_clear"))
    assert hasattr(row_queue.interface, "_TQ_CONTROLLER")
    assert hasattr(transferqueue_utils, "TQ_INITIALIZED")
    assert {"keys", "tags", "partition_id", "fields", "extra_info"} == set(inspect.signature(row_queue.KVBatchMeta).parameters)


def test_verls_engine_moves_models_between_device_and_main_memory() -> None:
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    assert list(inspect.signature(FSDPEngine.to).parameters) == ["self", "device", "model", "optimizer", "grad"]
    assert all(isinstance(getattr(FSDPEngine, f"is_{kind}_offload_enabled"), property) for kind in ("param", "optimizer"))
    assert "self._uses_fsdp2_cpu_offload_policy = " in inspect.getsource(FSDPEngine)


def test_verls_engine_prepares_inputs_and_outputs_around_the_call_of_its_model() -> None:
    """`trainer.optim.losses.trained_logits` stands before and after both."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead

    engine = FSDPEngineWithLMHead
    assert list(inspect.signature(engine.prepare_model_inputs).parameters) == ["self", "micro_batch"]
    assert list(inspect.signature(engine.prepare_model_outputs).parameters)[1:] == [
        "output", "output_args", "micro_batch", "logits_processor_func",
    ]  # fmt: skip
    step = inspect.getsource(engine.forward_step)
    calls = ["self.prepare_model_inputs(", "self.module(", "self.prepare_model_outputs("]
    assert sorted(calls, key=step.index) == calls
    inputs = inspect.getsource(engine.prepare_model_inputs)
    assert all(f'output_args["{name}"] = ' in inputs for name in ("input_ids_rmpad_rolled", "temperature_rmpad", "temperature", "pad_size"))
    assert all(callable(getattr(FSDPEngine, name)) for name in ("_gather_and_unpad_packed", "_get_packed_pad_size"))
