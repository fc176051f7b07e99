"""Settings of training on files: supervised (SFT) and on preferences (DPO). What is trained where, trainer's settings say."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from spangrad.settings.section import Section


class TuningSettings(Section):
    """A run of `spangrad tune`."""

    epochs: int = Field(default=1, ge=1)
    """How often the rows are gone through, each time in another order."""
    batch_size: int = Field(default=32, ge=1)
    """Rows of an optimiser step; in preference training pairs."""
    learning_rate: float | None = Field(default=None, gt=0)
    """At its highest. None: 1e-5 for `sft`, 5e-7 for `dpo`."""
    schedule: Literal["constant", "cosine"] = "cosine"
    """What becomes of the learning rate after its rise: it stays, or falls to 0 along half a cosine."""
    warmup: float = Field(default=0.0, ge=0, lt=1)
    """Share of the optimiser steps over which the learning rate rises."""
    held_out: float = Field(default=0.05, ge=0, lt=1)
    """Share of the rows that is measured and not trained; rows of one group stay together. 0: none."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Longer rows are left out. None: what the model's context and trainer.max_tokens_per_device allow."""
    steps_per_version: int | None = Field(default=None, ge=1)
    """Optimiser steps after which a version is committed, from which a stopped run goes on. None: those of an epoch."""
    seed: int = 0
    """Of the rows' order and of what is held out."""
    beta: float = Field(default=0.1, gt=0)
    """DPO: how strongly the policy is held to the reference, the branch's head at the run's start."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """DPO: the share of pairs that are taken to be labelled the wrong way round."""
