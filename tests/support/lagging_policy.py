"""A policy that learns the two-tools task, whose rollouts are sampled by the trained version or by one before it, soundly or with a fault.

In: a model, the trainer's settings, dtypes. Out: batches as the trainer gets them. The engine is transformers with a float32 head, as vLLM
with `engine.head_dtype`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from sampling import PROMPT

from fakes import transition_row
from spangrad.settings import TrainerSettings
from trainer.data.batch import Batch, layout
from trainer.data.merge import separate
from trainer.optim.optimizer import VerlOptimizer

CITIES, ROWS, TOKENS = 4, 64, 3
CITY, FIRST_CITY, WEATHER, CLOCK, END = 3, 11, 9, 10, 2
"""Place of the city in the prompt; token ids."""


class LaggingPolicy:
    """An optimizer, and the weights of its versions as an engine would serve them."""

    def __init__(self, model: Path, settings: TrainerSettings, engine: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self.engine = VerlOptimizer(model, settings, engine_dtype=str(engine).removeprefix("torch."))
        self._dtype, self._dice = engine, torch.Generator().manual_seed(0)
        self._plain = AutoModelForCausalLM.from_pretrained(model)
        self.versions = [self._served()]

    @property
    def version(self) -> int:
        """The newest version."""
        return len(self.versions) - 1

    def step(self, behind: int) -> dict[str, float]:
        """Train on sound rollouts of some versions ago; the step's metrics."""
        metrics = self.engine.step(self.batch(self.sample(self.versions[max(self.version - behind, 0)]), behind))
        self.versions.append(self._served())
        return metrics

    def sample(
        self, served: Any, *, temperature: float = 1.0, cached_by: Any = None, prompts: torch.Tensor | None = None
    ) -> list[dict[str, Any]]:
        """Sample a response to each prompt.

        Args:
            served: the model whose weights sample.
            temperature: of the sampling.
            cached_by: the model whose keys and values of the prompt are in the engine's prefix cache. None: `served`.
            prompts: token ids that the engine gets, shape (rows, tokens). None: the task's.
        """
        ids = task_prompts() if prompts is None else prompts
        with torch.no_grad():
            cache = (cached_by or served).model(ids[:, :-1], use_cache=True).past_key_values
            token, tokens, logprobs = ids[:, -1:], list[torch.Tensor](), list[torch.Tensor]()
            for _ in range(TOKENS):
                hidden = served.model(token, past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
                after = (hidden.float() @ served.lm_head.weight.float().T / temperature).log_softmax(-1)
                token = torch.multinomial(after.exp(), 1, generator=self._dice)
                tokens.append(token)
                logprobs.append(after.gather(1, token))
        recorded = zip(task_prompts().tolist(), torch.cat(tokens, 1).tolist(), torch.cat(logprobs, 1).tolist(), strict=True)
        return [{"PromptIds": prompt, "ResponseIds": response, "Logprobs": values} for prompt, response, values in recorded]

    def batch(self, rows: list[dict[str, Any]], behind: int) -> Batch:
        """Lay rows out as calls of some versions ago, with group-relative advantages."""
        version = max(self.version - behind, 0)
        frame = pl.DataFrame([transition_row(f"r{row}", Version=version, **facts) for row, facts in enumerate(rows)])
        worth = np.array([reward(facts) for facts in rows]).reshape(-1, CITIES)
        advantages = (worth - worth.mean(axis=0)) / (worth.std(axis=0) + 1e-6)
        return layout(separate(frame, pl.Series(advantages.reshape(-1))), lineage=range(self.version + 1))

    def _served(self) -> Any:
        """A copy of the optimizer's weights in the engine's dtype."""
        names = dict(self._plain.named_parameters())
        with torch.no_grad():
            for name, value in self.engine.weights():
                names[name].copy_(torch.from_numpy(value))
        return copy.deepcopy(self._plain).to(self._dtype)


def task_prompts() -> torch.Tensor:
    """Token ids of a batch's prompts, shape (rows, tokens): the cities in turn."""
    prompts = torch.tensor([PROMPT] * ROWS)
    prompts[:, CITY] = FIRST_CITY + torch.arange(ROWS) % CITIES
    return prompts


def reward(row: dict[str, Any]) -> float:
    """Return 1 for the tool that the city needs, with the city that was asked for."""
    city = row["PromptIds"][CITY]
    return float(row["ResponseIds"] == [CLOCK if city in {FIRST_CITY + 1, FIRST_CITY + 3} else WEATHER, city, END])
