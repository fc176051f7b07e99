"""Faults of sampling that the logprob check must see, at staleness 0 and 1, and sound rows that must pass."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from spangrad.errors import BadRowsError
from spangrad.settings import TrainerSettings
from tests.support.policies import PROMPT, trainer_settings, transition_row
from tests.support.trainers import save
from trainer.data.batch import Batch, layout
from trainer.data.merge import separate
from trainer.optim.optimizer import VerlOptimizer

LEARNING_RATE = 1e-3
"""The demo's, at which one step moves logprobs by more than a wrong temperature does."""
EARLY, STEPS = 12, 36


# A policy that learns the two-tools task, whose rollouts are sampled by the trained version or by one before it, soundly or with a fault.

CITIES, ROWS, TOKENS = 4, 64, 3
CITY, FIRST_CITY, WEATHER, CLOCK, END = 3, 11, 9, 10, 2
"""Place of the city in the prompt; token ids."""


class LaggingPolicy:
    """An optimizer, and the weights of its versions as an engine would serve them."""

    def __init__(self, model: Path, settings: TrainerSettings, engine: torch.dtype) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from trainer.optim.optimizer import VerlOptimizer

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
        import torch

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
        import torch

        names = dict(self._plain.named_parameters())
        with torch.no_grad():
            for name, value in self.engine.weights():
                names[name].copy_(torch.from_numpy(value))
        return copy.deepcopy(self._plain).to(self._dtype)


def task_prompts() -> torch.Tensor:
    """Token ids of a batch's prompts, shape (rows, tokens): the cities in turn."""
    import torch

    prompts = torch.tensor([PROMPT] * ROWS)
    prompts[:, CITY] = FIRST_CITY + torch.arange(ROWS) % CITIES
    return prompts


def reward(row: dict[str, Any]) -> float:
    """Return 1 for the tool that the city needs, with the city that was asked for."""
    city = row["PromptIds"][CITY]
    return float(row["ResponseIds"] == [CLOCK if city in {FIRST_CITY + 1, FIRST_CITY + 3} else WEATHER, city, END])


def of_a_stale_cache(policy: LaggingPolicy, behind: int) -> list[dict[str, Any]]:
    return policy.sample(policy.versions[-1 - behind], cached_by=policy.versions[0])


def at_another_temperature(policy: LaggingPolicy, behind: int) -> list[dict[str, Any]]:
    return policy.sample(policy.versions[-1 - behind], temperature=0.5)


def of_a_retokenised_prompt(policy: LaggingPolicy, behind: int) -> list[dict[str, Any]]:
    prompts = task_prompts()
    prompts[:, CITY] = FIRST_CITY + (prompts[:, CITY] - FIRST_CITY + 1) % CITIES
    return policy.sample(policy.versions[-1 - behind], prompts=prompts)


def of_other_weights(policy: LaggingPolicy, behind: int) -> list[dict[str, Any]]:
    return policy.sample(policy.versions[0])


FAULTS: tuple[Callable[[LaggingPolicy, int], list[dict[str, Any]]], ...] = (
    of_a_stale_cache,
    at_another_temperature,
    of_a_retokenised_prompt,
    of_other_weights,
)


@pytest.mark.parametrize(
    ("trainer", "engine"),
    [("bf16", torch.bfloat16), *(pytest.param("fp32", engine, marks=pytest.mark.slow) for engine in (torch.float32, torch.bfloat16))],
)
def test_logprob_check_passes_lagging_rollouts_and_refuses_faulty_rollouts(tiny_model: Path, trainer: Any, engine: torch.dtype):
    settings = trainer_settings(learning_rate=LEARNING_RATE, max_staleness=1, dtype=trainer)
    policy = LaggingPolicy(tiny_model, settings, engine)
    moved = [policy.step(behind=1) for _ in range(EARLY)]
    assert max(metrics["logprob_gap_mean_staleness_1"] for metrics in moved[1:]) > 0.1, "the policy hardly moves: passing shows nothing"
    for fault in FAULTS:
        for behind in (0, 1):
            with pytest.raises(BadRowsError) as raised:
                policy.engine.step(policy.batch(fault(policy, behind), behind))
            assert raised.value.rows == dict.fromkeys(range(ROWS), "logprob_gap"), (fault.__name__, behind)
    late = [policy.step(behind=1) for _ in range(STEPS - EARLY)]
    assert all(metrics["updated"] == 1 for metrics in moved)
    held = [metrics["held_gap_mean_behind_1"] for metrics in [*moved, *late] if "held_gap_mean_behind_1" in metrics]
    assert len(held) > EARLY / 2
    assert max(held) < (1e-4 if (trainer, engine) == ("fp32", torch.float32) else 0.05)


def test_logprob_check_after_restart_holds_weights_of_earlier_checkpoints(tiny_model: Path, tmp_path: Path):
    settings = trainer_settings(learning_rate=LEARNING_RATE, max_staleness=2)
    policy = LaggingPolicy(tiny_model, settings, torch.float32)
    checkpoints = [tiny_model]
    for number in range(1, EARLY):
        policy.step(behind=1)
        checkpoints.append(tmp_path / f"v{number}")
        shutil.copytree(tiny_model, checkpoints[-1], ignore=shutil.ignore_patterns("*.safetensors"))
        save(policy.engine, checkpoints[-1])
    policy.engine.close()
    policy.engine = again = VerlOptimizer(checkpoints[-1], settings, engine_dtype="float32")
    before = {name: value.copy() for name, value in again.weights()}
    again.hold(checkpoints[-3:-1])
    assert all(np.array_equal(value, before[name]) for name, value in again.weights()), "its own weights stay"
    for behind in (1, 2):
        with pytest.raises(BadRowsError):
            again.step(policy.batch(at_another_temperature(policy, behind), behind))
    metrics = again.step(policy.batch(policy.sample(policy.versions[-3]), behind=2))
    assert metrics["held_gap_mean_behind_2"] < 1e-4, "sound calls pass, though the policy has moved"


def test_logprob_check_after_restart_refuses_fault_beyond_drift(tiny_model: Path):
    """No earlier weights are held yet: a row of the version before may differ by the drift of one version, and no more."""
    policy = LaggingPolicy(tiny_model, trainer_settings(learning_rate=LEARNING_RATE, max_staleness=1), torch.float32)
    policy.versions.append(policy.versions[0])
    batch = policy.batch(policy.sample(policy.versions[0]), behind=1)
    assert "held_gap_mean_behind_1" not in policy.engine.step(batch)

    policy = LaggingPolicy(tiny_model, trainer_settings(learning_rate=LEARNING_RATE, max_staleness=1), torch.float32)
    policy.versions.append(policy.versions[0])
    wrong = [{**row, "Logprobs": [value - 1 for value in row["Logprobs"]]} for row in policy.sample(policy.versions[0])]
    with pytest.raises(BadRowsError):
        policy.engine.step(policy.batch(wrong, behind=1))
