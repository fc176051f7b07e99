"""Settings of training on files, supervised (SFT) or on preferences (DPO); the trainer's settings name model, policy and branch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from spangrad.settings.section import Section


class FinetuneSettings(Section):
    """Settings of a run of `spangrad finetune`."""

    epochs: int = Field(default=1, ge=1)
    """Number of passes over the rows, each in another order."""
    batch_size: int = Field(default=32, ge=1)
    """Number of rows of an optimizer step; in preference training, of pairs."""
    learning_rate: float | None = Field(default=None, gt=0)
    """Peak learning rate. None: 1e-5 for `sft`, 5e-7 for `dpo`."""
    schedule: Literal["constant", "cosine"] = "cosine"
    """Schedule of the learning rate after its rise: it stays (constant), or falls to 0 along half a cosine (cosine)."""
    warmup: float = Field(default=0.0, ge=0, lt=1)
    """Share of the optimizer steps over which the learning rate rises."""
    held_out: float = Field(default=0.05, ge=0, lt=1)
    """Share of the rows that is measured and not trained; rows of one group stay together. 0: none."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Largest number of tokens of a row; longer rows are left out. None: the limit of the model's context and
    trainer.max_tokens_per_device."""
    steps_per_version: int | None = Field(default=None, ge=1)
    """Number of optimizer steps after which a version is committed, from which a stopped run resumes. None: those of an epoch."""
    seed: int = 0
    """Random seed of the rows' order and of the held-out share."""
    beta: float = Field(default=0.1, gt=0)
    """DPO: beta, the strength with which the policy is held to the reference, the branch's head at the run's start."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """DPO: share of pairs that are assumed to be labelled the wrong way round."""
