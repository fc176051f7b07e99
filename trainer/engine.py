"""The optimiser: verl's TrainingWorker (FSDP2) in this process, and all that is PyTorch's.

In: a model directory, settings, and `Batch`es. Out: the metrics of a step, weights as NumPy arrays, the optimiser's state as a file.
Invariant: weights change only in a step whose first forward pass gave back the logprobs that the engine had sampled with. The gap is
measured inside the loss, before any update, and beyond the alarm the loss raises: verl then drops the gradients and steps nothing. A
batch that is stepped more than once, or corrected, is first passed forward whole, so that what its ratios are against stays as it was
at its start.

verl, torch and ray are imported here, in `losses`, `estimators`, `process` and `cpu_platform`, once an `Engine` is made or values are
compared. No Ray cluster is started: the worker is used as the plain object that it is.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spangrad.errors import CheckpointError, TrainerError
from spangrad.settings import TrainerSettings
from trainer.batch import Batch, parts
from trainer.estimators import over_tokens
from trainer.learning import check
from trainer.lora import merged
from trainer.losses import actor_config, checked_ppo_loss, correct, correction_metrics, value_loss_of
from trainer.process import prepare_process, quiet

STATE_FILE = "optimizer.pt"
_NO_END = 1 << 62
"""Total steps of the learning rate's schedule, which is constant after its warm-up."""

_TOLD = {
    "loss": "loss",
    "actor/pg_clipfrac": "clip_fraction",
    "actor/ppo_kl": "ppo_kl",
    "actor/entropy_loss": "entropy",
    "kl_loss": "reference_kl",
}
"""Verl's metrics of a step that are kept, and their names here. Not every loss has all of them."""


class Engine:
    """A model, its optimiser and one way to step them."""

    def __init__(self, model: Path, settings: TrainerSettings) -> None:
        """Load the weights of `model` (a Hugging Face directory), in float32 whatever the file holds, and those of the reference if any.

        Raises:
            SettingsError: what the settings ask for cannot be done, or has no meaning.
        """
        check(settings)
        self.settings = settings
        with quiet():
            self.device = prepare_process()
            self._worker = _worker(model, settings, self.device, rank=settings.lora_rank)
            held = settings.reference or settings.model
            # A worker like the other, never stepped: verl's forward-only kind needs pinned memory, which a CPU build lacks.
            self._reference = _worker(held, settings, self.device) if settings.kl_coef else None
            self._critic = _worker(model, settings, self.device, critic=True) if settings.estimator == "gae" else None

    @property
    def data_parallel_size(self) -> int:
        """The number that a batch's rows must be divisible by."""
        return int(self._worker.engine.get_data_parallel_size())

    def step(self, batch: Batch) -> dict[str, float]:
        """Train on a batch: trainer.epochs x trainer.mini_batches optimiser steps, without those whose gradient is 0.

        A step of zero gradient would still move the weights by AdamW's moments, so it is left out; the logprobs of the batch are checked
        all the same.

        Returns:
            Means over the optimiser steps of loss, and where the loss tells them clip_fraction, ppo_kl, entropy and reference_kl;
            grad_norm (before clipping, the largest); logprob_gap and logprob_gap_mean: largest and mean |rollout logprob - trainer
            logprob| (nats) over the response tokens that the current weights sampled, absent when they sampled none; correction_*;
            updated (how many optimiser steps).

        Raises:
            TrainerError: the gap exceeds trainer.logprob_gap_alarm, and the weights are as before; or a gradient is not finite, and the
                weights are as the optimiser steps before it left them: as before, when it was the first.
        """
        settings, known = self.settings, {}
        several = settings.epochs * settings.mini_batches > 1
        if batch.chains:
            batch = self._estimated(batch)
        if self._reference:
            batch = replace(batch, reference_logprobs=self._logprobs(self._reference, batch))
        if several or settings.recompute_logprobs:
            batch, known = self._begun(batch)
        steps: list[dict[str, float]] = []
        for _ in range(settings.epochs):
            for part in self._parts(batch):
                if self._trainable(part):
                    steps.append(self._pass(self._worker.train_batch, part, step=len(steps)))
        told = {**known, **_means(steps)} or self._pass(self._worker.infer_batch, batch)
        told |= {"grad_norm": max((one["grad_norm"] for one in steps), default=0.0), "updated": float(len(steps))}
        if self._critic and batch.response_mask.any():
            told |= self._train_critic(self._critic, batch)
        return told

    def _estimated(self, batch: Batch) -> Batch:
        """The batch with advantages that the weights, or the critic, have a part in."""
        if self._critic:
            told = {"values": self._forward(self._critic, batch, "values")["values"]}
        else:
            found = self._forward(self._worker, batch, "log_probs", "sum_pi_squared", calculate_sum_pi_squared=True)
            told = {"old_log_probs": found["log_probs"], "sum_pi_squared": found["sum_pi_squared"]}
        advantages, returns = over_tokens(self.settings, batch, **told)
        known = {"values": told["values"], "returns": returns} if self._critic else {}
        return replace(batch, advantages=advantages, chains=None, **known)

    def _train_critic(self, critic: Any, batch: Batch) -> dict[str, float]:
        """Step the value model as often as the policy, towards the batch's returns."""
        passes = (part for _ in range(self.settings.epochs) for part in self._parts(batch) if part.response_mask.any())
        losses = [self._raw(critic.train_batch, part)["critic/vf_loss"] for part in passes]
        assert batch.values is not None
        assert batch.returns is not None
        mask = batch.response_mask.astype(bool)
        left, spread = (batch.returns - batch.values)[mask].var(), batch.returns[mask].var()
        return {"critic_loss": float(np.mean(losses)), "critic_explained": float(1 - left / max(spread, 1e-8))}

    def _begun(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The batch with its logprobs at the start of the step and what follows of them; metrics. Later passes do not check the gap."""
        told = self._pass(self._worker.infer_batch, batch)
        if self.settings.recompute_logprobs:
            batch = replace(batch, old_logprobs=self._logprobs(self._worker, batch))
            if self.settings.correction.weights or self.settings.correction.reject:
                changes, metrics = correct(batch, self.settings)
                batch, told = replace(batch, **changes), {**told, **metrics}
        return replace(batch, current=np.zeros_like(batch.current)), told

    def _parts(self, batch: Batch) -> list[Batch]:
        """A batch's mini-batches, drawn anew each time from the random state that is saved with the optimiser's."""
        import torch

        if self.settings.mini_batches == 1:
            return [batch]
        order = torch.randperm(batch.real_rows).tolist()
        return parts(batch, order, self.settings.mini_batches, divisor=self.data_parallel_size)

    def _trainable(self, batch: Batch) -> bool:
        """Whether the gradient can differ from 0."""
        beside = self.settings.kl_coef != 0 or self.settings.entropy_coef != 0
        return batch.trainable or (beside and bool(batch.response_mask.any()))

    def _pass(self, through: Any, batch: Batch, *, step: int = 0) -> dict[str, float]:
        """One pass over a batch, forward and maybe backward, and its metrics."""
        metrics = self._raw(through, batch)
        norm = metrics.get("grad_norm", 0.0)
        if not np.isfinite(norm):
            before = f"after {step} others of this batch" if step else "so no step was taken"
            raise TrainerError(
                f"the gradient's norm is {norm}, {before}. Look for extreme advantages or logprobs in this batch, and lower "
                f"trainer.learning_rate = {self.settings.learning_rate:g} if earlier steps grew."
            )
        told = {ours: metrics[theirs] for theirs, ours in _TOLD.items() if theirs in metrics} | correction_metrics(metrics)
        if batch.current.any():
            told |= {"logprob_gap": metrics["logprob_gap"], "logprob_gap_mean": metrics["logprob_gap_mean"]}
        return {**told, "grad_norm": norm}

    def _raw(self, through: Any, batch: Batch) -> dict[str, float]:
        """One pass over a batch, and verl's metrics of it."""
        from verl.utils import tensordict_utils as tu

        rows = _tensordict(batch, entropy=self.settings.entropy_coef != 0)
        with quiet():
            raw = tu.get(through(rows), "metrics")
        return {name: _scalar(value) for name, value in raw.items()}

    def _logprobs(self, worker: Any, batch: Batch) -> NDArray[np.float32]:
        """Of the sampled tokens, under a worker's weights; 0 elsewhere."""
        return self._forward(worker, batch, "log_probs")["log_probs"]

    def _forward(self, worker: Any, batch: Batch, *names: str, **flags: bool) -> dict[str, NDArray[np.float32]]:
        """What a worker's forward pass tells of the sampled tokens, by verl's names; 0 elsewhere."""
        from verl.utils import tensordict_utils as tu
        from verl.workers.utils.padding import no_padding_2_padding

        rows = _tensordict(batch, entropy=False)
        tu.assign_non_tensor(rows, compute_loss=False, **flags)
        with quiet():
            output = worker.infer_batch(rows)
            found = {name: no_padding_2_padding(output[name], rows) for name in names}
        return {name: one.float().cpu().numpy() * batch.response_mask.astype(np.float32) for name, one in found.items()}

    def weights(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Every parameter by its Hugging Face name, tied ones once, with adapters merged."""
        module = self._worker.engine.module
        tied = getattr(module, "all_tied_weights_keys", None) or {}
        if self.settings.lora_rank:  # verl would merge them too, in bfloat16
            tensors = merged(module.state_dict(), self.settings.lora_alpha / self.settings.lora_rank)
        else:
            tensors, _ = self._worker.engine.get_per_tensor_param()
        for name, tensor in tensors:
            if name not in tied:
                yield name, np.ascontiguousarray(tensor.detach().float().cpu().numpy())

    def save_state(self, directory: Path) -> None:
        """Write what the weights do not hold: AdamW's moments, schedule, random state, adapters beside their base, and the critic."""
        import torch

        inner = self._worker.engine
        state = {"optimizer": inner.optimizer.state_dict(), "schedule": inner.lr_scheduler.state_dict(), "random": torch.get_rng_state()}
        if self.settings.lora_rank:  # what the merged weights do not tell apart
            state["adapted"] = inner.module.state_dict()
        if self._critic:
            critic = self._critic.engine
            state["critic"] = {"weights": critic.module.state_dict(), "optimizer": critic.optimizer.state_dict()}
        torch.save(state, directory / STATE_FILE)

    def load_state(self, directory: Path) -> None:
        """Read what `save_state` wrote, so that training goes on as if it had never stopped. A critic that it lacks begins anew.

        Raises:
            CheckpointError: the file is missing or damaged, or has other adapters than the settings.
        """
        import torch

        file = directory / STATE_FILE
        try:
            state = torch.load(file, weights_only=False)  # our own file, beside weights whose checksum was verified
        except (OSError, RuntimeError, EOFError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}). Restore {directory} from a copy.") from error
        inner = self._worker.engine
        if ("adapted" in state) != bool(self.settings.lora_rank):
            raise CheckpointError(
                f"{file} was written {'with' if 'adapted' in state else 'without'} adapters, and trainer.lora_rank = "
                f"{self.settings.lora_rank}. Set it as it was, or begin a branch with these weights (trainer.branch, trainer.model)."
            )
        try:
            if "adapted" in state:
                inner.module.load_state_dict(state["adapted"])
        except RuntimeError as error:
            raise CheckpointError(
                f"{file} holds adapters of another shape than trainer.lora_rank = {self.settings.lora_rank} and trainer.lora_modules make. "
                "Set them as they were, or begin a branch with these weights (trainer.branch, trainer.model)."
            ) from error
        inner.optimizer.load_state_dict(state["optimizer"])
        inner.lr_scheduler.load_state_dict(state["schedule"])
        torch.set_rng_state(state["random"])
        if self._critic and "critic" in state:
            self._critic.engine.module.load_state_dict(state["critic"]["weights"])
            self._critic.engine.optimizer.load_state_dict(state["critic"]["optimizer"])


def _means(steps: list[dict[str, float]]) -> dict[str, float]:
    """Of each metric, over the steps that tell it."""
    names = dict.fromkeys(name for one in steps for name in one)
    return {name: float(np.mean([one[name] for one in steps if name in one])) for name in names}


def _worker(model: Path | None, settings: TrainerSettings, device: str, *, critic: bool = False, rank: int = 0) -> Any:
    from transformers.utils import logging as transformers_logging
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    transformers_logging.disable_progress_bar()
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # warns of a rename on the first step
    logging.getLogger("transformers.integrations.tensor_parallel").setLevel(logging.ERROR)  # there is one worker: nothing is sharded
    if device == "cpu":
        _register_cpu_engine()
    optimizer = FSDPOptimizerConfig(
        lr=settings.critic_learning_rate if critic else settings.learning_rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        clip_grad=settings.clip_grad,
        lr_warmup_steps=0 if critic else settings.warmup_steps,
        total_training_steps=_NO_END,
    )
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="value_model" if critic else "language_model",
            model_config=HFModelConfig(
                path=str(model),
                use_remove_padding=False,  # packing rows needs flash attention
                override_config={"attn_implementation": "sdpa"},
                enable_gradient_checkpointing=device != "cpu",
                lora_rank=rank,
                lora_alpha=settings.lora_alpha,
                target_modules=list(settings.lora_modules) or "all-linear",
            ),
            engine_config=FSDPEngineConfig(
                strategy="fsdp2",
                use_dynamic_bsz=True,
                max_token_len_per_gpu=settings.max_tokens_per_device,
                infer_max_token_len_per_gpu=settings.max_tokens_per_device,
                use_torch_compile=False,
                mixed_precision={"param_dtype": settings.dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            ),
            optimizer_config=optimizer,
            checkpoint_config=CheckpointConfig(),
            profiler_config=None,
        )
    )
    with _value_head() if critic else contextlib.nullcontext():
        worker.reset()
    policy_loss = functools.partial(checked_ppo_loss, actor_config(settings, optimizer), settings.logprob_gap_alarm)
    worker.set_loss_fn(value_loss_of(settings, optimizer) if critic else policy_loss)
    return worker


@functools.cache
def _register_cpu_engine() -> None:
    """Verl registers its FSDP2 engine for accelerators only."""
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

    EngineRegistry.register("language_model", ["fsdp2"], device="cpu")(FSDPEngineWithLMHead)
    EngineRegistry.register("value_model", ["fsdp2"], device="cpu")(FSDPEngineWithValueHead)


@contextlib.contextmanager
def _value_head() -> Iterator[None]:
    """Verl loads value models with flash attention only, whatever the configuration says: load them as it loads policies."""
    import transformers
    from verl.utils import model as verls

    def load(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        return transformers.AutoModelForTokenClassification.from_pretrained(
            local_path, dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
        )

    def head_is_new(record: logging.LogRecord) -> bool:
        return record.levelno > logging.WARNING

    told = logging.getLogger("transformers.modeling_utils")
    original, verls.load_valuehead_model = verls.load_valuehead_model, load
    told.addFilter(head_is_new)  # a level of its own would have transformers check, and tell of, a plan for tensor parallelism
    try:
        yield
    finally:
        verls.load_valuehead_model = original
        told.removeFilter(head_is_new)


def _tensordict(batch: Batch, *, entropy: bool) -> Any:
    """Verl's jagged layout of a batch, with a temperature a row."""
    import torch
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    attention = torch.from_numpy(batch.attention_mask)
    prompts, responses = torch.from_numpy(batch.prompts.copy()), torch.from_numpy(batch.responses.copy())
    rows = TensorDict(
        {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "response_mask": torch.from_numpy(batch.response_mask),
            "rollout_log_probs": torch.from_numpy(batch.logprobs),
            "old_log_probs": torch.from_numpy(batch.logprobs if batch.old_logprobs is None else batch.old_logprobs),
            "advantages": torch.from_numpy(batch.advantages),
            "temperature": torch.from_numpy(batch.temperature),
            "current": torch.from_numpy(batch.current),
            **({} if batch.values is None else {"values": torch.from_numpy(batch.values), "returns": torch.from_numpy(batch.returns)}),
            **({} if batch.weights is None else {"rollout_is_weights": torch.from_numpy(batch.weights)}),
            **({} if batch.reference_logprobs is None else {"ref_log_prob": torch.from_numpy(batch.reference_logprobs)}),
        },
        batch_size=len(attention),
    )
    jagged = left_right_2_no_padding(rows)
    tu.assign_non_tensor(
        jagged,
        calculate_entropy=entropy,
        global_batch_size=batch.real_rows,
        global_token_num=batch.token_counts,
        current_tokens=int(batch.response_mask[batch.current].sum()),
        update_lr_scheduler=batch.trainable,
    )
    return jagged


def _scalar(value: Any) -> float:
    """Metrics of verl come as numbers, or as one `Metric` of micro-batches a rank."""
    from verl.utils.metric import Metric

    if isinstance(value, list) and isinstance(value[0], Metric):
        return float(Metric.aggregate_dp(value))
    return float(value.aggregate() if isinstance(value, Metric) else np.mean(value))
