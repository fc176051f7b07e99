"""Settings of the trainer."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SecretStr

from spangrad.settings.builder import Selection
from spangrad.settings.section import Section
from spangrad.settings.trainer_learning import CreditSettings, LoraSettings, LossSettings, OptimSettings, SamplingSettings
from spangrad.settings.trainer_service import AlarmSettings, CheckpointSettings, EvaluationSettings, WeightSyncSettings, WorkersSettings
from spangrad.types import Mode

_NEVER_TRAINED = {
    Mode.VALIDATE: "are held out to measure versions",
    Mode.PROBE: "check a server or a canary",
    Mode.GREEDY: "are baselines, sampled at temperature 0",
    Mode.TRIAL: "try candidates of a prompt",
}


def _may_be_trained(mode: str) -> str:
    if mode in _NEVER_TRAINED:
        raise ValueError(
            f"rollouts of mode {mode} {_NEVER_TRAINED[Mode(mode)]} and are never trained. Take {mode} out of trainer.modes, and run what "
            "is to be trained in mode train"
        )
    return mode


class TrainerSettings(Section):
    """Settings of the trainer."""

    run_id: str = "default"
    """Run whose rollouts are trained."""
    policy: str = "policy"
    """Name of the policy that is trained, as the gateway and the ledger know it."""
    branch: str = "main"
    """Name of the policy's branch that versions are committed to."""
    model: Path | None = None
    """Directory of the weights that training begins with. None: `spangrad train` requires it as an argument."""
    directory: Path = Path("data/policies")
    """Directory of the checkpoints, and of the ledger unless trainer.ledger_url names another place."""
    ledger_url: SecretStr | None = None
    """Database of the ledger, postgresql://USER:PASSWORD@HOST/NAME or sqlite:///FILE. None: SQLite's ledger.db in trainer.directory."""
    lease_seconds: float = Field(default=60.0, gt=0)
    """Time without renewal of its lease after which another trainer may take over a step, in seconds."""
    modes: tuple[Annotated[str, AfterValidator(_may_be_trained)], ...] = ("train",)
    """Modes of rollouts that may be trained: train, production, or a mode of the user's own. Held-out rollouts (validate), probes,
    greedy baselines and trials of prompts never are."""
    dataset: str | None = None
    """Transitions to train on, as NAME or NAME@REVISION. None: those that the builder's settings produce."""
    as_of: datetime | None = None
    """Time of the store's state to train on. None: the current state."""
    selection: Selection = Selection()
    """Filter of the policy's calls that are trained; rewards of the others count all the same."""
    phase_policies: tuple[str, ...] = ()
    """Other policies, in the same ledger, with which this one trains in phases: one version of each plays until all are updated. Empty: it
    is served as soon as it is updated."""
    max_steps: int = Field(default=0, ge=0)
    """Number of steps after which `--follow` ends. 0: never."""
    merge: bool | None = None
    """True to train calls whose prompts extend each other as one sequence: fewer tokens, the same loss (docs/concepts/merging.md). None:
    where estimator, loss and correction leave the gradient as it is call by call."""
    max_tokens_per_device: int = Field(default=16384, ge=1)
    """Largest number of tokens in a micro-batch of one device."""
    poll_seconds: float = Field(default=0.2, gt=0)
    """Time between two looks for ready groups at a ClickHouse that is not `spangrad store`, which tells of them by itself, in seconds."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Type of the computation; weights, moments and sums of gradients are float32 (mixed precision). None: bf16 where there is a GPU."""
    packing: bool | None = None
    """True to pass rows through the model end to end, without padding. None: where there are a GPU and the package flash-attn, which it
    needs."""
    gradient_checkpointing: bool | None = None
    """True to recompute activations in the backward pass instead of keeping them: less memory, more time. None: where there is a GPU."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "swanlab", "trackio", "clearml", "file"], ...] = ()
    """Trackers that metrics are sent to besides the store, by verl's own tracking; each needs its package and its own settings
    (docs/guides/training.md)."""
    traces: bool = True
    """True to send a span for each step to store.otlp_endpoint, with links to the rollouts that it consumed."""
    sampling: SamplingSettings = SamplingSettings()
    """Choice of the rollouts and calls that a batch trains."""
    credit: CreditSettings = CreditSettings()
    """Credit assignment: from rewards to advantages."""
    loss: LossSettings = LossSettings()
    """Policy loss of a training step."""
    optim: OptimSettings = OptimSettings()
    """Optimizer, and its steps over a batch."""
    lora: LoraSettings = LoraSettings()
    """Low-rank adapters (LoRA) of the policy's layers."""
    workers: WorkersSettings = WorkersSettings()
    """Processes that share a step, under Ray."""
    verl: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Settings of verl's own (`ppo_trainer.yaml`), by their names there, applied last: sharding, offload, Ulysses sequence parallelism and
    the like. Names that follow from this project's settings, or that would take rows, advantages or checkpoints from the ledger, are
    refused (docs/start/scaling.md)."""
    weight_sync: WeightSyncSettings = WeightSyncSettings()
    """Way in which engines get each version's weights."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """Choice of the checkpoints that are kept."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """Evaluation on held-out tasks."""
    alarms: AlarmSettings = AlarmSettings()
    """Limits beyond which the trainer warns, refuses rows or stops."""
