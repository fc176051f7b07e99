"""Settings of verl's own in the trainer's settings: what reaches verl, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spangrad.errors import SettingsError
from tests.support.policies import trainer_settings
from trainer.optim.optimizer import VerlOptimizer
from trainer.optim.process import prepare_process
from trainer.optim.verl_config import compose

prepare_process()  # verl reads its platform when it is first imported

ACTOR = "actor_rollout_ref.actor"


def composed(model: Path, verl: dict[str, Any], **changes: Any) -> Any:
    return compose(model, trainer_settings(verl=verl, model=model, **changes), "cpu")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("trainer.save_freq", 1, "its checkpoints are set by trainer"),
        ("data.train_files", "x.parquet", "rows come from the span store"),
        ("algorithm.adv_estimator", "gae", "advantages and corrections are set by trainer.credit"),
        ("actor_rollout_ref.rollout.name", "sglang", "rollouts are served by the gateway's engines"),
        ("actor_rollout_ref.hybrid_engine", True, "rollouts are served by the gateway's engines"),
        (f"{ACTOR}.clip_ratio", 0.3, "the loss is set by trainer.loss"),
        (f"{ACTOR}.ppo_epochs", 2, "a batch is cut by trainer.optim.epochs"),
        (f"{ACTOR}.checkpoint.save_contents", ["model"], "checkpoints are written by the ledger's step"),
        (f"{ACTOR}.optim.lr", 1e-5, "it follows from trainer.optim"),
        (f"{ACTOR}.fsdp_config.mixed_precision.param_dtype", "fp16", "it follows from trainer.dtype"),
        ("critic.enable", True, "it follows from trainer.credit.estimator"),
        ("transfer_queue.enable", False, "one batch at a time"),
        (f"{ACTOR}.strategy", "megatron", "by code for fsdp2"),
    ],
)
def test_compose_key_of_this_project_is_refused(key: str, value: Any, reason: str, tiny_model: Path) -> None:
    with pytest.raises(SettingsError, match=reason) as raised:
        composed(tiny_model, {key: value})
    assert repr(key) in str(raised.value)


@pytest.mark.parametrize("key", [f"{ACTOR}.no_such", "no_such.at_all", f"{ACTOR}.fsdp_config.offload", "no_such"])
def test_compose_unknown_key_is_refused(key: str, tiny_model: Path) -> None:
    with pytest.raises(SettingsError, match=f"verl 0.9.1 has no setting '{key}'"):
        composed(tiny_model, {key: 1})


def test_compose_applies_verls_settings_last(tiny_model: Path) -> None:
    nested = {"actor_rollout_ref": {"actor": {"fsdp_config": {"forward_prefetch": True}, "strategy": "fsdp2"}}}
    config = composed(tiny_model, {**nested, "critic.fsdp.param_offload": True}, workers__per_node=4, nodes=2, optim__learning_rate=3e-6)
    actor = config.actor_rollout_ref.actor
    assert (actor.fsdp_config.forward_prefetch, config.critic.fsdp.param_offload) == (True, True)
    assert (actor.optim.lr, config.trainer.n_gpus_per_node, config.trainer.nnodes) == (3e-6, 4, 2)
    assert not composed(tiny_model, {}).actor_rollout_ref.actor.fsdp_config.forward_prefetch, "verl's files are read once, and not changed"


def test_optimizer_of_one_process_reads_verls_settings(tiny_model: Path) -> None:
    key = f"{ACTOR}.fsdp_config.reshard_after_forward"
    optimizer = VerlOptimizer(tiny_model, trainer_settings(verl={key: False}))
    assert optimizer._workers._rank._models["policy"].engine_config.reshard_after_forward is False  # type: ignore[union-attr]
