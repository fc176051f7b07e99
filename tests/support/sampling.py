"""Samples drawn from a model with transformers, so that their logprobs are true."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import polars as pl

from fakes import transition_row
from spangrad.settings.trainer_service import LogprobAlarm
from spangrad.weights.adapters import adapter_facts

NO_ALARM = LogprobAlarm(mean=1e9, p99=1e9, pearson=-1, k3=1e9)
"""Limits that nothing exceeds, for rows whose logprobs are made up."""
PROMPT = (1, 4, 7, 11, 2, 1, 5)
"""`<|im_start|> user say CITY <|im_end|> <|im_start|> assistant` in the two-tools vocabulary; the fourth token is the city."""


def sampled_rows(model: Path, count: int, *, temperature: float, seed: int, length: int = 3, **changes: object) -> list[dict[str, object]]:
    """Rows of transitions with responses of 1 to `length` tokens."""
    rows: list[dict[str, object]] = []
    for i in range(count):
        prompt = [*PROMPT[:3], PROMPT[3] + i % 4, *PROMPT[4:]]
        response, logprobs = sample(model, prompt, 1 + i % length, temperature, seed=1000 * seed + i)
        facts = {"PromptIds": prompt, "ResponseIds": response, "Logprobs": logprobs, "Temperature": temperature}
        rows.append(transition_row(f"{seed}-{i}", **{**facts, **changes}))
    return rows


def sampled_by(rows: pl.DataFrame, version: int) -> pl.DataFrame:
    """Rows of which all tokens were sampled by one version."""
    return rows.with_columns(pl.lit(version).alias("Version"), pl.lit([version]).alias("Versions.Version"))


def sample(model: Path, prompt: list[int], length: int, temperature: float, *, seed: int) -> tuple[list[int], list[float]]:
    """A response of `length` tokens, and the logprob of each."""
    import torch

    dice = torch.Generator().manual_seed(seed)
    response: list[int] = []
    logprobs: list[float] = []
    for _ in range(length):
        after = distribution(model, [*prompt, *response], temperature)
        token = int(torch.multinomial(after.exp(), 1, generator=dice))
        response.append(token)
        logprobs.append(float(after[token]))
    return response, logprobs


def logprobs_of(model: Path, prompt: list[int], response: list[int], temperature: float = 1.0) -> list[float]:
    """Logprob of each token of a response under a model."""
    return [float(distribution(model, [*prompt, *response[:i]], temperature)[token]) for i, token in enumerate(response)]


def distribution(model: Path, ids: list[int], temperature: float) -> Any:
    """Logprobs of all tokens that may follow."""
    import torch

    with torch.no_grad():
        return (_load(model)(torch.tensor([ids])).logits[0, -1] / temperature).log_softmax(-1)


@lru_cache(maxsize=8)
def _load(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    adapter = adapter_facts(model)
    if adapter is None:
        return AutoModelForCausalLM.from_pretrained(model)
    from peft import PeftModel

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(adapter.base), model)
