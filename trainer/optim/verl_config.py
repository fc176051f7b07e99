"""Configuration of verl: its own files, what the trainer's settings say, and last the settings of `trainer.verl`.

In: the trainer's settings. Out: verl's configuration (`ppo_trainer`), which its workers and its trainer read. Invariant: a key that follows
from a setting of this project, or that would take rows, advantages or checkpoints from the ledger, is not the user's to set; any other key
of verl is, and one that verl does not know is an error.
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from spangrad.errors import SettingsError
from spangrad.settings import TrainerSettings
from trainer.optim.process import dtype_of, is_packed, recomputes_activations
from trainer.publish.experts import adapted_modules
from trainer.sft.objective import Objective

MODE = "spangrad"
"""Name of this project's trainer among verl's (trainer.v1.trainer_mode)."""
_NO_END = 1 << 62
"""Total steps of a learning rate's schedule that is constant."""
_ACTOR, _MODEL, _REFERENCE = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.ref"
_OWNED = {
    "trainer": "the run, its machines and its checkpoints are set by trainer.* of this project",
    "data": "rows come from the span store",
    "algorithm": "advantages and corrections are set by trainer.credit and trainer.loss",
    "transfer_queue": "the queue carries one batch at a time, from this trainer to its ranks",
    "distillation": "no teacher model is loaded",
    "reward": "rewards come with the rollouts",
    "reward_model": "rewards come with the rollouts",
    "custom_reward_function": "rewards come with the rollouts",
    "actor_rollout_ref.rollout": "rollouts are served by the gateway's engines (engine.*, gateway.*)",
    "actor_rollout_ref.hybrid_engine": "rollouts are served by the gateway's engines (engine.*, gateway.*)",
    "actor_rollout_ref.spangrad": "it carries these settings to the ranks",
    **{
        f"{_ACTOR}.{key}": "the loss is set by trainer.loss"
        for key in (
            "clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg", "policy_loss", "loss_agg_mode",
            "loss_scale_factor", "entropy_coeff", "kl_loss_coef", "kl_loss_type", "calculate_entropy",
        )
    },
    **{
        f"{model}.{key}": "a batch is cut by trainer.optim.epochs, trainer.optim.mini_batches and trainer.max_tokens_per_device"
        for model in (_ACTOR, "critic")
        for key in ("ppo_epochs", "ppo_mini_batch_size", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "shuffle")
    },
    f"{_ACTOR}.checkpoint": "checkpoints are written by the ledger's step",
    "critic.checkpoint": "checkpoints are written by the ledger's step",
}  # fmt: skip
"""Keys of verl that are this project's, with the reason; those below them as well."""
_STRATEGY = "fsdp2"
_STRATEGY_REASON = (
    "a refused step is undone, and a state is saved, by code for fsdp2. Megatron and verl's other engines are not supported yet"
)


class Derived(NamedTuple):
    """Value of a key of verl."""

    value: Any
    setting: str | None = None
    """Setting that it follows from. None: it may be set by trainer.verl."""


def compose(model: Path, settings: TrainerSettings, device: str, objective: Objective | None = None) -> Any:
    """Return verl's configuration of a trainer, or a run over files, whose interpolations are resolved where they are read.

    What trainer.verl sets is applied last.

    Raises:
        SettingsError: a key of trainer.verl is this project's, or verl has no such key, or no such value.
    """
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    derived = _derived(model, settings, device, objective)
    chosen = _flat(settings.verl)
    for key, value in chosen.items():
        _require_free(key, value, derived)
    config = pickle.loads(_files())
    with open_dict(config):
        for key, entry in derived.items():
            OmegaConf.update(config, key, entry.value, force_add=True)
    OmegaConf.set_struct(config, True)
    for key, value in chosen.items():
        try:
            if OmegaConf.select(config, key.rpartition(".")[0] or key) is None:
                raise SettingsError(_unknown(key))
            OmegaConf.update(config, key, value)
        except OmegaConfBaseException as error:
            raise SettingsError(f"{_unknown(key)} ({str(error).splitlines()[0]})") from error
    with open_dict(config):
        config.actor_rollout_ref.spangrad = {
            "settings": settings.model_dump_json(),
            "objective": dataclasses.asdict(objective) if objective else None,
            "device": device,
        }
    return config


def settings_of(config: Any) -> tuple[TrainerSettings, Objective | None, str]:
    """Return settings, objective and device that a configuration of a rank's models (`actor_rollout_ref`) carries."""
    own = config.spangrad
    return (
        TrainerSettings.model_validate_json(own.settings),
        Objective(**own.objective) if own.objective else None,
        own.device,
    )


def _optimizer_steps(settings: TrainerSettings) -> int:
    """Return the optimizer steps of a branch of `trainer.max_steps` steps, or a number that is never reached where it has no end."""
    return settings.max_steps * settings.optim.epochs * settings.optim.mini_batches or _NO_END


@functools.cache
def _files() -> bytes:
    """Return verl's own configuration, its files, pickled: a copy by `copy.deepcopy` takes several times as long."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return pickle.dumps(hydra_compose("ppo_trainer", overrides=["actor_rollout_ref.rollout.name=vllm"]))


def _flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by their dotted names."""
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _unknown(key: str) -> str:
    return f"trainer.verl: verl 0.9.1 has no setting {key!r}. `ppo_trainer.yaml` in verl/trainer/config names those that there are."


def _require_free(key: str, value: Any, derived: dict[str, Derived]) -> None:
    """Raise where a key is not the user's to set.

    Raises:
        SettingsError: it is not.
    """
    if key.endswith(".strategy") and value != _STRATEGY:
        raise SettingsError(f'trainer.verl: {key!r} = {value!r}: {_STRATEGY_REASON}. Set "{_STRATEGY}", or leave it out.')
    for owned, reason in _OWNED.items():
        if key == owned or key.startswith(owned + "."):
            raise SettingsError(f"trainer.verl: {key!r} is not to be set: {reason}. Leave it out.")
    for name, entry in derived.items():
        if entry.setting and (key == name or name.startswith(key + ".") or key.startswith(name + ".")):
            raise SettingsError(f"trainer.verl: {key!r} is not to be set: it follows from {entry.setting}. Set that instead.")


def _derived(model: Path, settings: TrainerSettings, device: str, objective: Objective | None) -> dict[str, Derived]:
    """Return the keys of verl that differ from its files."""
    packed, trained = is_packed(settings, device), settings.optim
    gae, precision = settings.credit.estimator == "gae", dtype_of(settings, device)
    keys: dict[str, Derived] = {
        "trainer.v1.trainer_mode": Derived(MODE),
        "trainer.device": Derived(device),
        "trainer.n_gpus_per_node": Derived(max(settings.workers.per_node, 1)),
        "trainer.nnodes": Derived(settings.workers.nodes),
        "reward.num_workers": Derived(0),
        "actor_rollout_ref.hybrid_engine": Derived(False),
        "critic.enable": Derived(gae, "trainer.credit.estimator"),
        # verl's trainer takes the critic's bound of both passes from this one, and not from ppo_max_token_len_per_gpu.
        "critic.ppo_infer_max_token_len_per_gpu": Derived(settings.max_tokens_per_device, "trainer.max_tokens_per_device"),
        "critic.fsdp.use_dynamic_bsz": Derived(True),
        "critic.cliprange_value": Derived(settings.loss.critic_clip, "trainer.loss.critic_clip"),
        f"{_ACTOR}.use_kl_loss": Derived(bool(settings.loss.kl_coef), "trainer.loss.kl_coef"),
        f"{_ACTOR}.ppo_mini_batch_size": Derived(1),
        f"{_MODEL}.lora_rank": Derived(settings.lora.rank, "trainer.lora.rank"),
        f"{_MODEL}.lora_alpha": Derived(settings.lora.alpha, "trainer.lora.alpha"),
        f"{_MODEL}.target_modules": Derived(
            adapted_modules(model, settings.lora.modules) if settings.lora.rank else "all-linear", "trainer.lora.modules"
        ),
    }
    for section in (_MODEL, "critic.model"):
        keys |= {
            f"{section}.path": Derived(str(model), "trainer.model"),
            f"{section}.use_remove_padding": Derived(packed, "trainer.packing"),
            f"{section}.override_config.attn_implementation": Derived("flash_attention_2" if packed else "sdpa"),
            f"{section}.enable_gradient_checkpointing": Derived(recomputes_activations(settings, device), "trainer.gradient_checkpointing"),
        }
    engines = {f"{_ACTOR}.fsdp_config", f"{_REFERENCE}.fsdp_config", "critic.fsdp"}
    for section in engines:
        keys |= {
            f"{section}.use_torch_compile": Derived(False),
            # Gradients that wait for their sync lie unsharded on each rank, 4 bytes a parameter, where zero_grad does not clear them.
            f"{section}.use_no_sync_for_gradient_accumulation": Derived(False),
            f"{section}.mixed_precision": Derived(
                {"param_dtype": precision, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}, "trainer.dtype"
            ),
        }
    for section in (_ACTOR, "critic"):
        rate = trained.critic_learning_rate if section == "critic" else trained.learning_rate
        warmup, schedule = (0, "constant") if section == "critic" else (trained.warmup_steps, trained.schedule)
        keys |= {
            f"{section}.strategy": Derived(_STRATEGY),
            f"{section}.use_dynamic_bsz": Derived(True),
            f"{section}.ppo_max_token_len_per_gpu": Derived(settings.max_tokens_per_device, "trainer.max_tokens_per_device"),
            f"{section}.optim.lr": Derived(objective.learning_rate if objective else rate, "trainer.optim"),
            f"{section}.optim.betas": Derived(list(trained.betas), "trainer.optim.betas"),
            f"{section}.optim.weight_decay": Derived(trained.weight_decay, "trainer.optim.weight_decay"),
            f"{section}.optim.clip_grad": Derived(trained.clip_grad, "trainer.optim.clip_grad"),
            f"{section}.optim.lr_warmup_steps": Derived(objective.warmup_steps if objective else warmup, "trainer.optim.warmup_steps"),
            f"{section}.optim.lr_scheduler_type": Derived(objective.schedule if objective else schedule, "trainer.optim.schedule"),
            f"{section}.optim.total_training_steps": Derived(
                objective.steps if objective else _optimizer_steps(settings), "trainer.max_steps"
            ),
        }
    # A worker like the other, never stepped: verl's forward-only kind needs pinned memory, which a CPU build lacks, and rounds weights.
    return keys | {f"{_REFERENCE}.fsdp_config.forward_only": Derived(False)}
