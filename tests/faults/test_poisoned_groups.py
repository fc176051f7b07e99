"""A run into which poisoned groups are put learns as well as the clean one, and skips exactly those.

The span store, its builds, the ledger and verl's optimizer are real; the policy's answers are sampled from each version's checkpoint by
transformers, so that the logprobs of a sound group are true. Poison is what nothing before the trainer stops: logprobs that are no numbers
or another distribution's, rollout ids that were trained under another group, prompts without a token.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.two_tools.model import CITIES, TOOLS, WORDS
from spangrad.settings import Settings, StoreSettings
from tests.support.built_rollouts import CALL, POISON, BuiltRollouts, Rows
from tests.support.policies import PROMPT, trainer_settings, transition_row
from trainer import loop
from trainer.data.source import GroupReader
from trainer.ledger.mirror import Mirror
from trainer.ledger.recovery import open_ledger, prepare
from trainer.ledger.skips import SkipReason
from trainer.shutdown import Shutdown

ROUNDS, EVERY = 20, 5
"""Batches of four sound groups, and after how many of them a poisoned group comes first in line: 4 of 84 groups, 5 %."""
ROLLOUTS = 32


@pytest.mark.slow  # test_trainer_skips and test_trainer_kills hold what is skipped
def test_trainer_run_with_invalid_groups_learns_and_skips_exactly_those(
    store: StoreSettings, tiny_model: Path, tmp_path: Path, report: Callable[[str], None]
) -> None:
    clean, nothing, _ = learn(store, tiny_model, tmp_path / "clean", poison=False)
    poisoned, skipped, injected = learn(store, tiny_model, tmp_path / "poisoned", poison=True)
    report(f"success of the last five batches: clean {clean:.3f}, poisoned {poisoned:.3f}; {len(injected)} groups were poisoned")
    assert (nothing, skipped) == ({}, injected)
    assert clean >= 0.9
    assert poisoned >= clean - 0.05


def learn(
    store: StoreSettings, model: Path, directory: Path, *, poison: bool
) -> tuple[float, dict[str, SkipReason], dict[str, SkipReason]]:
    """Train for ROUNDS batches; return the success of the last five, the skipped groups and the poisoned ones, with their reasons."""
    from trainer.credit.estimators import estimator
    from trainer.optim.optimizer import VerlOptimizer

    learning = trainer_settings(
        run_id=f"poison-{uuid.uuid4().hex[:8]}", model=model, directory=directory, groups_per_batch=4, learning_rate=2e-3, publish=False
    )
    settings = Settings(store=store, trainer=learning)
    world, kinds = BuiltRollouts(settings, model), cycle(POISON.items())
    ledger, injected, successes = open_ledger(settings), dict[str, SkipReason](), list[float]()
    begun = prepare(ledger, settings)
    trainer = loop.Trainer(
        settings=settings,
        ledger=ledger,
        source=GroupReader(world.client, settings),
        optimizer=VerlOptimizer(model, learning),
        normalise=estimator(learning),
        mirror=Mirror(world.client, store, ledger),
        publisher=None,
        shutdown=Shutdown(),
        loaded=begun,
        load_optimizer=lambda version: pytest.fail(f"version {version.version} was loaded anew: nobody moved the branch"),
    )
    trainer.start()
    try:
        for number in range(ROUNDS):
            head = loop.newest_version(ledger)
            groups = list(sound_groups(world, Path(head.policy_version.path), head.version, number))
            if poison and number % EVERY == EVERY - 1:
                reason, spoil = next(kinds)
                name = f"g{number}-poison"
                rows = [{**row, "GroupId": name, **own_names(world, name, i)} for i, row in enumerate(groups[0])]
                world.built(spoil(rows, "g0-paris-0"))
                injected[name] = reason
            for rows in groups:
                world.built(rows)
            successes.append(float(np.mean([row["Rewards.Value"][0] == 1 for rows in groups for row in rows])))
            trainer.run(follow=False)
            assert len(ledger.committed_versions()) == number + 2, "each round's sound groups are a step, whatever was skipped"
        return float(np.mean(successes[-5:])), {group.group_id: reason for group, reason in ledger.skips.reasons().items()}, injected
    finally:
        trainer.optimizer.close()
        ledger.close()


def sound_groups(world: BuiltRollouts, weights: Path, version: int, number: int) -> Iterator[Rows]:
    """Sample a group of answers for each city from a version's weights."""
    for place, city in enumerate(CITIES):
        name = f"g{number}-{city}"
        prompt = [*PROMPT[:3], WORDS.index(city), *PROMPT[4:]]
        yield [
            {
                **transition_row("", PromptIds=prompt, ResponseIds=ids, Logprobs=logprobs, TokenizerHash=world.tokenizer, Version=version),
                **CALL,
                "RunId": world.run,
                "GroupId": name,
                "GroupSize": ROLLOUTS,
                "Rewards.Name": ["reward"],
                "Rewards.Value": [reward(city, [WORDS[token] for token in ids])],
                "Rewards.Source": ["runner"],
                "Rewards.CallId": [""],
                "Rewards.Role": [""],
                "Rewards.Turn": [0],
                **own_names(world, name, i),
            }
            for i, (ids, logprobs) in enumerate(sample(weights, prompt, seed=1000 * number + place))
        ]


def sample(weights: Path, prompt: list[int], seed: int) -> list[tuple[list[int], list[float]]]:
    """Sample ROLLOUTS answers of three tokens, with their logprobs."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    model = load(weights)
    ids, logprobs = torch.tensor([prompt] * ROLLOUTS), list[Any]()
    with torch.no_grad():
        for _ in range(3):
            after = model(ids).logits[:, -1].log_softmax(-1)
            token = torch.multinomial(after.exp(), 1, generator=generator)
            logprobs.append(after.gather(1, token))
            ids = torch.cat([ids, token], 1)
    return list(zip(ids[:, len(prompt) :].tolist(), torch.cat(logprobs, 1).tolist(), strict=True))


@lru_cache(maxsize=1)
def load(weights: Path) -> Any:
    """Load a model; the groups of a batch share it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(weights)


def reward(city: str, words: list[str]) -> float:
    """Return 1 for a call of a tool with the city that was asked for, -1 for what is no call of a tool, else 0."""
    return float(words[1] == city) if words[0] in TOOLS else -1.0


def own_names(world: BuiltRollouts, group: str, place: int) -> dict[str, str]:
    """Name a rollout of a group, its only call and its span."""
    rollout = f"{group}-{place}"
    return {"RolloutId": rollout} | {name: f"{name}-{world.run}-{rollout}" for name in ("CallId", "TransitionId", "TraceId", "SpanId")}
