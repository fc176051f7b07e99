"""TrainingWorker of verl (FSDP2) for one model: its configuration, its loss, and additions to verl for a CPU.

Invariant: weights are held in float32 for any dtype of the file; every rank of a group makes the same worker.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spangrad.settings import TrainerSettings
from trainer.optim.float32_head import compute_head_in_float32
from trainer.optim.losses.corrected import policy_loss_of, value_loss_of
from trainer.optim.micro_batches import bound_padded_micro_batches
from trainer.optim.process import dtype_of, is_packed, recomputes_activations
from trainer.sft.losses import loss_of
from trainer.sft.objective import Objective

_NO_END = 1 << 62
"""Total steps of the learning rate's schedule, which is constant."""


def training_worker(
    model: Path, settings: TrainerSettings, device: str, *, critic: bool = False, rank: int = 0, objective: Objective | None = None
) -> Any:
    """Return a worker of the process group that this process has joined.

    Args:
        model: a Hugging Face directory, which every rank can read.
        settings: the trainer's.
        device: cuda or cpu.
        critic: True if the model has a value head and is trained on the returns.
        rank: rank of the adapters; 0: the weights are trained.
        objective: objective of a run over files. None: that of the settings, on batches of rollouts.
    """
    from transformers.utils import logging as transformers_logging
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    from trainer.optim.losses.entropy import measure_entropy

    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers.integrations.tensor_parallel").setLevel(logging.ERROR)  # of plans that FSDP has no use for
    if device == "cpu":
        _register_cpu_engine()
    packed = is_packed(settings, device)
    if not packed:
        bound_padded_micro_batches()
    optimizer = FSDPOptimizerConfig(
        lr=objective.learning_rate if objective else settings.optim.critic_learning_rate if critic else settings.optim.learning_rate,
        betas=settings.optim.betas,
        weight_decay=settings.optim.weight_decay,
        clip_grad=settings.optim.clip_grad,
        lr_warmup_steps=objective.warmup_steps if objective else 0 if critic else settings.optim.warmup_steps,
        lr_scheduler_type=objective.schedule if objective else "constant",
        total_training_steps=objective.steps if objective else _NO_END,
    )
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="value_model" if critic else "language_model",
            model_config=HFModelConfig(
                path=str(model),
                use_remove_padding=packed,
                override_config={"attn_implementation": "flash_attention_2" if packed else "sdpa"},
                enable_gradient_checkpointing=recomputes_activations(settings, device),
                lora_rank=rank,
                lora_alpha=settings.lora.alpha,
                target_modules=list(settings.lora.modules) or "all-linear",
            ),
            engine_config=FSDPEngineConfig(
                strategy="fsdp2",
                use_dynamic_bsz=True,
                max_token_len_per_gpu=settings.max_tokens_per_device,
                infer_max_token_len_per_gpu=settings.max_tokens_per_device,
                use_torch_compile=False,
                # Gradients that wait for their sync lie unsharded on each rank, 4 bytes a parameter, where zero_grad does not clear them.
                use_no_sync_for_gradient_accumulation=False,
                mixed_precision={"param_dtype": dtype_of(settings, device), "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            ),
            optimizer_config=optimizer,
            checkpoint_config=CheckpointConfig(),
            profiler_config=None,
        )
    )
    with _value_head() if critic else contextlib.nullcontext():
        worker.reset()
    if not critic:
        compute_head_in_float32(worker.engine.module)
    if not (critic or objective):
        measure_entropy(worker.engine)
    if objective:
        worker.set_loss_fn(loss_of(objective))
        return worker
    worker.set_loss_fn((value_loss_of if critic else policy_loss_of)(settings, optimizer))
    return worker


@functools.cache
def _register_cpu_engine() -> None:
    """Register verl's FSDP2 engine for CPUs; verl registers it for accelerators only."""
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

    EngineRegistry.register("language_model", ["fsdp2"], device="cpu")(FSDPEngineWithLMHead)
    EngineRegistry.register("value_model", ["fsdp2"], device="cpu")(FSDPEngineWithValueHead)


@contextlib.contextmanager
def _value_head() -> Iterator[None]:
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
