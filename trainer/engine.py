"""The optimiser: verl's TrainingWorker (FSDP2) in this process, and all that is PyTorch's.

In: a model directory, settings, and `Batch`es. Out: the metrics of a step, weights as NumPy arrays, the optimiser's state as a file.
Invariant: weights change only in a step whose own forward pass gave back the logprobs that the engine had sampled with. The gap is
measured inside the loss, before any update, and beyond the alarm the loss raises: verl then drops the gradients and steps nothing.

verl, torch and ray are imported here and in `cpu_platform`, once an `Engine` is made. No Ray cluster is started: the worker is
used as the plain object that it is.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spangrad.errors import CheckpointError, TrainerError
from spangrad.settings import TrainerSettings
from trainer.batch import Batch

STATE_FILE = "optimizer.pt"
_NO_END = 1 << 62
"""Total steps of the learning rate's schedule, which is constant."""

logger = logging.getLogger(__name__)


class Engine:
    """A model, its optimiser and one way to step them."""

    def __init__(self, model: Path, settings: TrainerSettings) -> None:
        """Load the weights of `model` (a Hugging Face directory), in float32 whatever the file holds."""
        self.settings = settings
        with _quiet():
            self.device = _prepare_process()
            self._worker = _worker(model, settings, self.device)

    @property
    def data_parallel_size(self) -> int:
        """The number that a batch's rows must be divisible by."""
        return int(self._worker.engine.get_data_parallel_size())

    def step(self, batch: Batch) -> dict[str, float]:
        """Train on a batch: one optimiser step, or none when every advantage is 0.

        A step of zero gradient would still move the weights by AdamW's moments, so it is left out; its logprobs are checked all the
        same.

        Returns:
            loss; grad_norm (before clipping); logprob_gap and logprob_gap_mean: largest and mean |rollout logprob - trainer logprob|
            (nats) over the response tokens that the current weights sampled, absent when they sampled none; clip_fraction; ppo_kl; updated
            (0 or 1).

        Raises:
            TrainerError: the gap exceeds trainer.logprob_gap_alarm, or the gradient is not finite; the weights are as before.
        """
        from verl.utils import tensordict_utils as tu

        rows = _tensordict(batch)
        update = self._worker.train_batch if batch.trainable else self._worker.infer_batch
        with _quiet():
            raw = tu.get(update(rows), "metrics")
        metrics = {name: _scalar(value) for name, value in raw.items()}
        norm = metrics.get("grad_norm", 0.0)
        if not np.isfinite(norm):
            raise TrainerError(
                f"the gradient's norm is {norm}, so no step was taken. Look for extreme advantages or logprobs in this batch, and lower "
                f"trainer.learning_rate = {self.settings.learning_rate:g} if earlier steps grew."
            )
        result = {
            "loss": metrics["loss"],
            "grad_norm": norm,
            "clip_fraction": metrics["actor/pg_clipfrac"],
            "ppo_kl": metrics["actor/ppo_kl"],
            "updated": float(batch.trainable),
        }
        if batch.current.any():
            result |= {"logprob_gap": metrics["logprob_gap"], "logprob_gap_mean": metrics["logprob_gap_mean"]}
        return result

    def weights(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Every parameter by its Hugging Face name, tied ones once."""
        tied = getattr(self._worker.engine.module, "all_tied_weights_keys", None) or {}
        tensors, _ = self._worker.engine.get_per_tensor_param()
        for name, tensor in tensors:
            if name not in tied:
                yield name, np.ascontiguousarray(tensor.detach().float().cpu().numpy())

    def save_state(self, directory: Path) -> None:
        """Write what the weights do not hold: AdamW's moments, the schedule and the random state."""
        import torch

        inner = self._worker.engine
        torch.save(
            {"optimizer": inner.optimizer.state_dict(), "schedule": inner.lr_scheduler.state_dict(), "random": torch.get_rng_state()},
            directory / STATE_FILE,
        )

    def load_state(self, directory: Path) -> None:
        """Read what `save_state` wrote, so that training goes on as if it had never stopped.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        import torch

        file = directory / STATE_FILE
        try:
            state = torch.load(file, weights_only=False)  # our own file, beside weights whose checksum was verified
        except (OSError, RuntimeError, EOFError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}). Restore {directory} from a copy.") from error
        inner = self._worker.engine
        inner.optimizer.load_state_dict(state["optimizer"])
        inner.lr_scheduler.load_state_dict(state["schedule"])
        torch.set_rng_state(state["random"])


def group_relative(values: NDArray[np.float64], groups: NDArray[np.int64]) -> NDArray[np.float64]:
    """GRPO's normalised advantage of each value within its group, by verl (https://arxiv.org/abs/2402.03300, section 4.1.2)."""
    with _quiet():
        _prepare_process()
        import torch
        from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    scores = torch.from_numpy(values.copy())[:, None]
    advantages, _ = compute_grpo_outcome_advantage(scores, torch.ones_like(scores), groups)
    return advantages[:, 0].numpy()


def choose_platform() -> str:
    """Tell verl, before anything of it is imported, whether there is a GPU, and return the device's name: cuda or cpu."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ.update(VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_MODULES="trainer.cpu_platform")
    return device


def _prepare_process() -> str:
    """Tell verl and PyTorch about this process of one worker, and return the device's name."""
    import torch

    device = choose_platform()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")
    if not torch.distributed.is_initialized():
        # A group of one needs no rendezvous over a port.
        torch.distributed.init_process_group(
            "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    return device


def _worker(model: Path, settings: TrainerSettings, device: str) -> Any:
    from transformers.utils import logging as transformers_logging
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    transformers_logging.disable_progress_bar()
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # warns of a rename on the first step
    if device == "cpu":
        _register_cpu_engine()
    optimizer = FSDPOptimizerConfig(
        lr=settings.learning_rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        clip_grad=settings.clip_grad,
        lr_warmup_steps=0,
        total_training_steps=_NO_END,
    )
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=str(model),
                use_remove_padding=False,  # packing rows needs flash attention
                override_config={"attn_implementation": "sdpa"},
                enable_gradient_checkpointing=device != "cpu",
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
    worker.reset()
    actor = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_mini_batch_size=1,  # the batch is stepped whole; verl asks for a number
        ppo_micro_batch_size_per_gpu=1,
        use_dynamic_bsz=True,
        clip_ratio=settings.clip_ratio,
        loss_agg_mode="token-mean",
        optim=optimizer,
    )
    worker.set_loss_fn(functools.partial(_checked_ppo_loss, actor, settings.logprob_gap_alarm))
    return worker


@functools.cache
def _register_cpu_engine() -> None:
    """Verl registers its FSDP2 engine for accelerators only."""
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    EngineRegistry.register("language_model", ["fsdp2"], device="cpu")(FSDPEngineWithLMHead)


def _checked_ppo_loss(config: Any, alarm: float, model_output: Any, data: Any, dp_group: Any = None) -> tuple[Any, dict[str, Any]]:
    """PPO's loss, by verl, once the logprobs of this forward pass agree with those the rows were sampled with.

    Raises:
        TrainerError: on every rank at once, before the backward pass.
    """
    import torch
    from verl.utils.metric import AggregationType, Metric
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import no_padding_2_padding

    logprobs = no_padding_2_padding(model_output["log_probs"], data).detach()
    sampled = data["response_mask"].bool() & data["current"].bool()[:, None]
    gap = torch.where(sampled, (logprobs.float() - data["old_log_probs"]).abs(), 0.0)
    largest = gap.max().nan_to_num(nan=torch.inf, posinf=torch.inf)
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=dp_group)
    if not largest.item() <= alarm:
        raise TrainerError(
            f"the logprobs that responses were sampled with differ from the trainer's by up to {largest.item():.3g} nats "
            f"(trainer.logprob_gap_alarm = {alarm:g}), so no step was taken. Check that the engine served this very version and dropped "
            "its prefix cache at the reload, that it gives processed logprobs (--logprobs-mode processed_logprobs) without top-p, top-k, "
            "penalties or grammars, that its tokenizer is the trainer's, and that its dtype is (trainer.dtype, engine.dtype). The groups "
            "stay first in line: a new trainer.run_id leaves them behind."
        )
    loss, metrics = ppo_loss(config, model_output, data, dp_group)
    mean = gap.sum() * data["dp_size"] / max(data["current_tokens"], 1)  # verl averages over ranks, and sums over micro-batches
    return loss, {
        **metrics,
        "logprob_gap": Metric(AggregationType.MAX, largest),
        "logprob_gap_mean": Metric(AggregationType.SUM, mean),
    }


def _tensordict(batch: Batch) -> Any:
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
            "old_log_probs": torch.from_numpy(batch.logprobs),
            "advantages": torch.from_numpy(batch.advantages),
            "temperature": torch.from_numpy(batch.temperature),
            "current": torch.from_numpy(batch.current),
        },
        batch_size=len(attention),
    )
    jagged = left_right_2_no_padding(rows)
    tu.assign_non_tensor(
        jagged,
        calculate_entropy=False,
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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep verl's prints and third parties' deprecation warnings from the user's terminal; errors and our own log lines pass."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as printed:
        warnings.simplefilter("ignore")
        yield
    if printed.getvalue().strip():
        logger.debug("verl: %s", printed.getvalue().strip())
