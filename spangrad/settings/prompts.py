"""Settings of prompts and of their optimisation."""

from __future__ import annotations

from pydantic import Field, SecretStr

from spangrad.settings.section import Section


class PromptSettings(Section):
    """Prompts that agents fetch, and the search for better ones (`spangrad prompt optimise`)."""

    pin: str | None = None
    """Name of the prompt whose published version every rollout of `spangrad run` is pinned to when it is enqueued. None: none; an agent
    that fetches prompts then keeps to the version that it was given first in the attempt."""
    variable: str = Field(default="SPANGRAD_PROMPT", pattern="^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable in which a program finds the text of the prompt that its attempt is pinned to."""
    critic_url: str | None = None
    """Base URL, with `/v1`, of the model that criticises and edits. None: the gateway's."""
    critic_key: SecretStr | None = Field(default=None, min_length=1)
    """Key of that model's server. None: the gateway's token, where the critic is behind the gateway."""
    model: str | None = Field(default=None, min_length=1)
    """Name of that model. None: `gateway.policy`."""
    temperature: float | None = Field(default=None, ge=0)
    """That it samples at. None: its server decides."""
    critic_seconds: float = Field(default=300, gt=0)
    """That it may take for an answer."""
    rounds: int = Field(default=3, ge=1)
    """How often the prompts of the beam are criticised and edited."""
    beam_width: int = Field(default=2, ge=1)
    """Prompts that are kept after a round."""
    branch: int = Field(default=4, ge=1)
    """Edits of each prompt of the beam in a round, a critique each."""
    minibatch: int = Field(default=8, ge=1)
    """Tasks whose rollouts a prompt's critiques of a round are drawn from."""
    shown: int = Field(default=4, ge=1)
    """Rollouts that one critique reads: the worst, and where there are better ones at least one of those."""
    shown_characters: int = Field(default=4000, ge=200)
    """Of a rollout that a critique reads; the middle of longer ones is left out."""
    evaluations: int = Field(default=1, ge=1)
    """Rollouts of each held-out task that a candidate is measured by."""
    held_out: float = Field(default=0.5, gt=0, lt=1)
    """Share of the tasks that candidates are measured on and no critique sees, where no file names them."""
    failed_score: float | None = None
    """Score of a rollout of which every attempt failed without a reward. None: a candidate that lacks a held-out task's reward is not
    ranked."""
    max_p: float = Field(default=0.05, gt=0, le=1)
    """The best candidate is published when its gain over the prompt that the search began with has a one-sided p of at most this, by a
    paired permutation test over the held-out tasks. 1: whenever it is better."""
    seed: int = 0
    """Of the split of the tasks, the minibatches and the test."""
