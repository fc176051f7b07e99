"""ReMax learns: real verl on a real model, each rollout against the greedy one of its task, under the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import torch
from transformers import AutoModelForCausalLM

from tests.support.policies import PROMPT, trainer_settings, transition_row
from trainer.credit.estimators import estimator
from trainer.data.assemble import assemble
from trainer.data.source import Loaded
from trainer.optim.optimizer import VerlOptimizer

CITIES, TOOLS, ROLLOUTS, STEPS = range(4), 2, 16, 9
SETTINGS = trainer_settings(estimator="remax", learning_rate=3e-3, max_staleness=0)


def test_remax_training_raises_success(tiny_model: Path):
    """The model knows the form of a reply; which of two tools a city needs it must find out, as it does in the demo."""
    engine, generator = VerlOptimizer(tiny_model, SETTINGS), np.random.default_rng(0)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    prompts = [[*PROMPT[:3], PROMPT[3] + city, *PROMPT[4:]] for city in CITIES]
    tools = [PROMPT[3] - TOOLS + tool for tool in range(TOOLS)]
    success, greedy_returns = list[float](), list[float]()
    for step in range(STEPS):
        model.load_state_dict({name: torch.from_numpy(np.array(weight)) for name, weight in engine.weights()}, strict=False)
        with torch.no_grad():
            after = model(torch.tensor(prompts)).logits[:, -1].log_softmax(-1).numpy()
        rows, greedy = list[dict[str, object]](), list[dict[str, object]]()
        for city, (prompt, logprobs) in enumerate(zip(prompts, after, strict=True)):
            right = tools[city % TOOLS]
            success.append(float(np.exp(logprobs[right])))
            chances = np.exp(logprobs, dtype=np.float64)
            sampled = generator.choice(len(chances), ROLLOUTS, p=chances / chances.sum())
            for i, token in enumerate([int(logprobs.argmax()), *sampled.tolist()]):
                mode, into = ("greedy", greedy) if i == 0 else ("train", rows)
                reply = {"PromptIds": prompt, "ResponseIds": [token], "Logprobs": [float(logprobs[token])]}
                facts = {"Mode": mode, "GroupId": f"g{city}", "Version": step, **reply}
                into.append(transition_row(f"{city}-{i}", rewards=(float(token == right),), **facts))
        loaded = Loaded([], pl.DataFrame(rows), pl.DataFrame(greedy))
        batch, metrics, _ = assemble(loaded, SETTINGS, estimator(SETTINGS), lineage=[step], divisor=1)
        greedy_returns.append(metrics["greedy_return"])
        assert engine.step(batch)["logprob_gap_max"] < 1e-4
    by_step = np.array(success).reshape(STEPS, -1).mean(axis=1)
    assert by_step[0] < 0.6
    assert by_step[-1] > 0.9
    assert greedy_returns[-1] == 1.0
