"""Workers of verl for one process: policy, reference and critic, with this project's losses, and additions to verl for a CPU.

In: verl's configuration (`trainer.optim.verl_config`). Out: `ActorWorker` and `CriticWorker`, which verl's Ray trainer starts on every
rank, and `local_rank` for one process without Ray. Invariant: weights are held in float32 for any dtype of the file; every rank of a group
makes the same models.

verl is imported with this module, so `trainer.optim.process.choose_platform` comes first.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import logging
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf, open_dict
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_name
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.losses import value_loss

from spangrad.settings import TrainerSettings
from trainer.optim.float32_head import compute_head_in_float32
from trainer.optim.losses.corrected import policy_loss_of
from trainer.optim.losses.trained_logits import keep_trained_logits
from trainer.optim.micro_batches import bound_padded_micro_batches
from trainer.optim.process import check_device, gpu_of_process, join_group, quiet
from trainer.optim.rank import ModelRole, Rank
from trainer.optim.states.loading import each_rank_reads_its_rows
from trainer.optim.verl_config import compose, settings_of
from trainer.sft.losses import loss_of
from trainer.sft.objective import Objective

_SEED = 0

# verl collects garbage at each load of a model: not among the million objects that were imported by now, which stay.
gc.freeze()


class ActorWorker(Rank, ActorRolloutRefWorker):  # pyright: ignore[reportIncompatibleVariableOverride]  # properties of verl's
    """Worker of the policy, whose `Rank` is in charge of all models of its process; or of the reference."""

    def __init__(self, config: Any, role: str, **options: Any) -> None:
        """Join the other ranks, as actor or ref by `actor_rollout_ref` of verl's configuration; `load_models` loads the weights."""
        join_group()
        self._choose_gpu = gpu_of_process()
        settings, self._objective, self._device = settings_of(config)
        if role == "ref":
            config = copy.deepcopy(config)
            held = settings.loss.reference or settings.model
            assert held is not None  # checked
            with open_dict(config):
                config.model.path, config.model.lora_rank = str(held), 0
                config.ref.optim = config.actor.optim
        self._loaded = settings
        super().__init__(config, role, **options)

    def load_models(self) -> Any:
        """Load the weights of the worker's model; return verl's TrainingWorker of it.

        Raises:
            SettingsError: the device does not support the settings.
        """
        check_device(self._loaded, self._device)
        self._choose_gpu()
        _prepare(self._device, packed=self.config.model.use_remove_padding)
        with quiet(), _same_random_numbers(), each_rank_reads_its_rows():
            ActorRolloutRefWorker.init_model(self)
        model: Any = self.ref if self._is_ref else self.actor
        assert model is not None
        compute_head_in_float32(model.engine.module)
        keep_trained_logits(model.engine)
        if self._objective:
            model.set_loss_fn(loss_of(self._objective))
            return model
        if not self._is_ref:
            model.set_loss_fn(policy_loss_of(self._loaded, model.optimizer_config))
        return model


class CriticWorker(TrainingWorker):
    """Worker of the critic."""

    def __init__(self, config: TrainingWorkerConfig) -> None:
        """Join the other ranks; `load_models` loads the weights."""
        join_group()
        self._choose_gpu = gpu_of_process()
        _prepare(get_device_name(), packed=config.model_config.use_remove_padding)
        super().__init__(config)

    def load_models(self) -> None:
        """Load the weights, with a new head that is the same on every rank."""
        self._choose_gpu()
        with quiet(), _same_random_numbers(), _value_head(), each_rank_reads_its_rows():
            TrainingWorker.reset(self)


def local_rank(model: Path, settings: TrainerSettings, device: str, objective: Objective | None = None) -> Rank:
    """Load the models of a process that is a group of its own, without Ray.

    Raises:
        SettingsError: the settings cannot be carried out.
    """
    config = compose(model, settings, device, objective)
    section = config.actor_rollout_ref
    for read in (section.actor, section.model):
        OmegaConf.resolve(read)  # as is what else is used: most interpolations are of sections that this process has no use for
    policy = ActorWorker(section, "actor")
    models: dict[ModelRole, Any] = {ModelRole.POLICY: policy.load_models()}
    if section.actor.use_kl_loss:
        OmegaConf.resolve(section.ref)
        models[ModelRole.REFERENCE] = ActorWorker(section, "ref").load_models()
    if config.critic.enable:
        OmegaConf.resolve(config.critic)
        chosen: Any = omega_conf_to_dataclass(config.critic)
        critic = CriticWorker(critic_config(chosen))
        critic.load_models()
        critic.set_loss_fn(functools.partial(value_loss, chosen))
        models[ModelRole.CRITIC] = critic
    policy.assemble(models, settings, device)
    return policy


def critic_config(critic: Any) -> TrainingWorkerConfig:
    """Return a worker's configuration of `critic` of verl's, as verl's trainer makes it."""
    critic.engine.infer_max_token_len_per_gpu = critic.ppo_infer_max_token_len_per_gpu
    critic.engine.max_token_len_per_gpu = critic.ppo_infer_max_token_len_per_gpu
    return TrainingWorkerConfig(
        model_type="value_model",
        model_config=critic.model,
        engine_config=critic.engine,
        optimizer_config=critic.optim,
        checkpoint_config=critic.checkpoint,
        profiler_config=None,
    )


def _prepare(device: str, *, packed: bool) -> None:
    """Make verl's engines fit for a device and a layout of rows, before the first of them is loaded."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers.integrations.tensor_parallel").setLevel(logging.ERROR)  # of plans that FSDP has no use for
    if device == "cpu":
        _register_cpu_engine()
    if not packed:
        bound_padded_micro_batches()


@functools.cache
def _register_cpu_engine() -> None:
    """Register verl's FSDP2 engine for CPUs; verl registers it for accelerators only."""
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

    EngineRegistry.register("language_model", ["fsdp2"], device="cpu")(FSDPEngineWithLMHead)
    EngineRegistry.register("value_model", ["fsdp2"], device="cpu")(FSDPEngineWithValueHead)


@contextlib.contextmanager
def _same_random_numbers() -> Generator[None]:
    """Seed PyTorch equally in every process, since adapters and a critic's head begin with random numbers."""
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []):
        torch.manual_seed(_SEED)
        yield


@contextlib.contextmanager
def _value_head() -> Generator[None]:
    """Load value models as verl loads policies; its own loader always uses flash attention, against the configuration."""
    import transformers
    from verl.utils import model as verls

    def load(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        return transformers.AutoModelForTokenClassification.from_pretrained(
            local_path, dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
        )

    def head_is_new(record: logging.LogRecord) -> bool:
        return record.levelno > logging.WARNING

    log = logging.getLogger("transformers.modeling_utils")
    original, verls.load_valuehead_model = verls.load_valuehead_model, load
    log.addFilter(head_is_new)  # with a level of its own transformers would check, and log, a plan for tensor parallelism
    try:
        yield
    finally:
        verls.load_valuehead_model = original
        log.removeFilter(head_is_new)
