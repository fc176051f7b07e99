"""The tiny model, and rollouts sampled from it in this process, many at a time.

In: a task, a seed, a checkpoint's directory. Out: `Sampled` rollouts, each call with the token ids and logprobs that it was sampled with.
Invariant: a checkpoint is read as an engine would read it, from its files; a prompt that several rollouts share is computed once and
drawn from for each.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from benchmarks.credit_tasks import WORDS, State, Task, Turn
from examples.two_tools.model import word_tokenizer
from examples.two_tools.model import write_model as write_warm_model

AGENT = "clerk"
REPLY_TOKENS = 2
_ID = {word: i for i, word in enumerate(WORDS)}


@dataclass(frozen=True, slots=True)
class Call:
    """One call, with the engine's response and the turn that follows."""

    prompt: list[int]
    reply: list[int]
    logprobs: list[float]
    turn: Turn
    agent: str = AGENT
    """Name of the agent that made the call."""


@dataclass(slots=True)
class Sampled:
    """One rollout."""

    goal: tuple[str, ...]
    group: int
    """Its place among the step's groups."""
    calls: list[Call] = field(default_factory=list[Call])

    @property
    def state(self) -> State:
        """State of the rollout after its last call."""
        return self.calls[-1].turn.state if self.calls else State(0)

    @property
    def done(self) -> bool:
        """True if the last call ended the rollout."""
        return bool(self.calls) and self.calls[-1].turn.done

    def turns(self) -> list[Turn]:
        """Return the turns of all calls."""
        return [call.turn for call in self.calls]


def write_model(directory: Path, task: Task, seed: int) -> None:
    """A model that knows the form of the task's replies and nothing of their meaning."""
    transformers_logging.disable_progress_bar()
    rng = random.Random(seed)

    def demonstrate() -> tuple[list[int], list[int]]:
        prompt, reply = task.demonstration(rng)
        return _ids(prompt), _ids(reply)

    write_warm_model(directory, word_tokenizer(WORDS), seed, demonstrate)


class Sampler:
    """One engine, which serves one version."""

    def __init__(self, model: Path, seed: int) -> None:
        self.model = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._random = torch.Generator().manual_seed(seed)

    def load(self, model: Path) -> None:
        """Serve another version."""
        self.model.load_state_dict(load_file(model / "model.safetensors"))

    def rollouts(self, task: Task, goals: Sequence[tuple[str, ...]]) -> list[Sampled]:
        """Sample a group of whole rollouts for each goal."""
        everything = [Sampled(goal, place) for place, goal in enumerate(goals) for _ in range(task.group)]
        for _ in range(task.limit):
            going = [rollout for rollout in everything if not rollout.done]
            if not going:
                break
            prompts = [_ids(task.prompt(rollout.goal, rollout.state)) for rollout in going]
            for rollout, prompt, reply, logprobs in zip(going, prompts, *self.sample(prompts), strict=True):
                turn = task.step(rollout.goal, rollout.state, [WORDS[token] for token in reply])
                rollout.calls.append(Call(prompt, reply, logprobs, turn))
        return everything

    @torch.inference_mode()
    def sample(self, prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[float]]]:
        """Token ids of a reply to each prompt, at temperature 1, and their logprobs; prompts of one length."""
        ids, logprobs = torch.tensor(prompts), list[torch.Tensor]()
        for _ in range(REPLY_TOKENS):
            different, place = ids.unique(dim=0, return_inverse=True)
            choices = self.model(different, logits_to_keep=1).logits[:, -1].log_softmax(-1)[place]
            drawn = torch.multinomial(choices.exp(), 1, generator=self._random)
            logprobs.append(choices.gather(1, drawn))
            ids = torch.cat([ids, drawn], dim=1)
        return ids[:, -REPLY_TOKENS:].tolist(), torch.cat(logprobs, dim=1).tolist()


def _ids(words: Sequence[str]) -> list[int]:
    return [_ID[word] for word in words]
