"""Settings of the trainer."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import Field

from spangrad.settings.builder import Selection
from spangrad.settings.section import Section


class TrainerSettings(Section):
    """The trainer."""

    run_id: str = "default"
    """The run whose rollouts are trained."""
    policy: str = "policy"
    branch: str = "main"
    model: Path | None = None
    """Directory of the weights that training begins with. None: `spangrad train` asks for it."""
    directory: Path = Path("data/policies")
    """Where checkpoints and the ledger live."""
    modes: tuple[str, ...] = ("train",)
    dataset: str | None = None
    """NAME, or NAME@REVISION, of the transitions to train on. None: those that the builder's settings make."""
    as_of: datetime | None = None
    """Train on the store as it was then. None: as it is."""
    selection: Selection = Selection()
    """Which of the policy's calls are trained; rewards of the others count all the same."""
    groups_per_batch: int = Field(default=4, ge=1)
    max_steps: int = 0
    """Steps after which `--follow` ends. 0: never."""
    reward_weights: dict[str, float] = Field(default_factory=dict[str, float])
    """What rewards of a name are multiplied by. A name that is not here: 1."""
    credit: Literal["identical", "final_only", "reward_to_go", "own", "gigpo"] = "identical"
    baseline: Literal["rollout", "turn"] = "rollout"
    """Which values share a baseline: those of the group's rollouts, or of the same turn in them. GiGPO has its own."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    step_weight: float = 1.0
    """GiGPO: weight of a step's advantage beside its rollout's."""
    merge: bool = False
    """Train calls whose prompts extend each other as one sequence: fewer tokens, the same loss (docs/merging.md)."""
    learning_rate: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip_ratio: float = 0.2
    clip_grad: float = 1.0
    max_tokens_per_device: int = 16384
    max_staleness: int = 0
    """How many versions behind the newest a call's policy may be; older calls' groups are expired, with a reason."""
    logprob_gap_alarm: float = 0.01
    """Largest tolerated |rollout logprob - trainer logprob|; beyond it the step is refused."""
    gaming_reward: str = "reward"
    """Name of the reward that stands for success: where the return rises and it does not, something is gamed (docs/credit.md)."""
    gaming_versions: int = Field(default=20, ge=0)
    """Over how many versions that is measured. 0: not at all."""
    gaming_rise: float = Field(default=0.2, ge=0)
    """How much the mean return must rise over them for an alarm: more than partial rewards bring before the first success."""
    keep_checkpoints: int = 3
    poll_seconds: float = 0.2
    dtype: Literal["fp32", "bf16"] = "fp32"
    publish: bool = True
    """Hand each version to the gateway."""
