"""Settings of prompts and of their optimisation."""

from __future__ import annotations

from pydantic import Field

from spangrad.settings.section import Section, Token


class PromptSettings(Section):
    """Settings of the prompts that agents fetch, and of the search for better ones (`spangrad prompt optimise`)."""

    pin: str | None = None
    """Name of the prompt whose published version is pinned to every rollout of `spangrad run` and `spangrad.Client` when it is enqueued.
    None: no prompt is pinned; an agent that fetches prompts then keeps the version that it got first in the attempt."""
    variable: str = Field(default="SPANGRAD_PROMPT", pattern="^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable in which a program finds the text of the prompt that its attempt is pinned to."""
    critic_url: str | None = None
    """Base URL, with `/v1`, of the model that criticises and edits prompts. None: the gateway's."""
    critic_key: Token | None = None
    """API key of the critic model's server. None: the gateway's token, where the critic is behind the gateway."""
    model: str | None = Field(default=None, min_length=1)
    """Name of the critic model. None: `gateway.policy`."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature of the critic model. None: its server decides."""
    rounds: int = Field(default=3, ge=1)
    """Number of rounds in which the prompts of the beam are criticised and edited."""
    beam_width: int = Field(default=2, ge=1)
    """Number of prompts that are kept after a round."""
    branch: int = Field(default=4, ge=1)
    """Number of edits of each prompt of the beam in a round, each from a critique of its own."""
    minibatch: int = Field(default=8, ge=1)
    """Number of tasks from whose rollouts a prompt's critiques of a round are drawn."""
    shown: int = Field(default=4, ge=1)
    """Number of rollouts that one critique reads: the worst ones and, where there are better ones, at least one of those.
    Of a rollout longer than 4000 characters the middle is left out."""
    evaluations: int = Field(default=1, ge=1)
    """Number of rollouts of each held-out task by which a candidate is measured."""
    held_out: float = Field(default=0.5, gt=0, lt=1)
    """Share of the tasks on which candidates are measured and which no critique sees, where no file lists them."""
    failed_score: float | None = None
    """Score of a rollout of which every attempt failed without a reward. None: a candidate that lacks a held-out task's reward is not
    ranked."""
    max_p: float = Field(default=0.05, gt=0, le=1)
    """Largest p-value at which the best candidate is published: one-sided, of its gain over the prompt that the search began with, by a
    paired permutation test over the held-out tasks. 1: published whenever it is better."""
    seed: int = 0
    """Random seed of the split of the tasks, of the minibatches and of the permutation test."""
