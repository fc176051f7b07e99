"""A SQL reward that is written after the fact: spans that were trained on already train another branch from the new dataset revision."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from commands.data.rewards import rewards
from spangrad.settings import BuilderSettings, Settings, StoreSettings
from spangrad.store.clickhouse import connect
from spangrad.weights.checksums import tokenizer_hash
from tests.support.policies import PROMPT, sample, trainer_settings
from tests.support.servers import running_store, store_settings
from tests.support.spans import SpanFactory, versions
from trainer.run import train
from transition_builder import loop

BREVITY = Path(__file__).parents[2] / "examples/rewards/brevity.sql"


@pytest.fixture
def own_store(tmp_path: Path) -> Iterator[StoreSettings]:
    """A store that holds nothing else: a backfill takes whatever there is."""
    settings = store_settings(tmp_path / "store")
    with running_store(settings, tmp_path / "store.log"):
        yield settings


def send_rollouts(store: StoreSettings, model: Path) -> None:
    """Two groups of two rollouts, sampled by version 0, which is `model`: one of each group won, and answers differ in length."""
    spans = SpanFactory(run="run")
    for group in ("a", "b"):
        for at, reward in enumerate((1.0, 0.0)):
            rollout = f"{group}-{at}"
            root = spans.root(rollout, calls=1, GroupId=group, GroupSize=2)
            response, logprobs = sample(model, list(PROMPT), 1 + at, 1.0, seed=at + 10 * ord(group))
            facts: dict[str, Any] = {"PromptIds": list(PROMPT), "ResponseIds": response, "Logprobs": logprobs, "Temperature": 1.0}
            facts |= {**versions((0, 0)), "TokenizerHash": tokenizer_hash(model)}
            spans.call(root, rollout=rollout, **facts)
            spans.evaluation(root, reward)
    answer = httpx.post(f"{store.otlp_endpoint}/v1/traces", content=spans.otlp(), headers={"content-type": "application/json"}, timeout=30)
    answer.raise_for_status()


def settings(store: StoreSettings, model: Path, directory: Path, **trainer: Any) -> Settings:
    facts: dict[str, Any] = {
        "run_id": "run",
        "model": model,
        "directory": directory,
        "groups_per_batch": 2,
        "learning_rate": 1e-3,
        "publish": False,
    }
    return Settings(store=store, builder=BuilderSettings(dataset="d"), trainer=trainer_settings(**{**facts, **trainer}))


def test_sql_reward_backfill_trains_new_branch_from_new_revision(own_store: StoreSettings, tiny_model: Path, tmp_path: Path) -> None:
    send_rollouts(own_store, tiny_model)
    main = settings(own_store, tiny_model, tmp_path / "policies")
    loop.build_once(main)
    train(main, follow=False)

    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards" / "brevity.sql").write_text(BREVITY.read_text())
    chosen = {"store.url": own_store.url, "builder.dataset": "d", "builder.rewards_directory": tmp_path / "rewards"}
    flags = [word for name, value in chosen.items() for word in ("--set", f"{name}={value}")]
    rewards(["backfill", "--since", "1h", "--reward", "brevity", *flags], result_action="return_value")
    train(settings(own_store, tiny_model, tmp_path / "policies", branch="brevity", dataset="d@2"), follow=False)

    client = connect(own_store)
    versions = (
        "SELECT Branch, Version, Parent, ParentBranch, round(Metrics['mean_return'], 4), Metrics['updated'], "
        "Metrics['logprob_gap_max'] < 1e-4 "
        "FROM spangrad.policy_versions WHERE BatchId != '' ORDER BY Version"
    )
    assert client.query(versions).result_rows == [
        ("main", 1, 0, "main", 0.5, 1.0, True),
        ("brevity", 2, 0, "brevity", 0.485, 1.0, True),
    ]
    used = (
        "SELECT b.Branch, d.Revision, b.RolloutId FROM spangrad.batches AS b JOIN spangrad.datasets AS d ON d.BuildSpec = b.BuildSpec "
        "ORDER BY d.Revision, b.RolloutId"
    )
    rollouts = ("a-0", "a-1", "b-0", "b-1")
    expected = [(branch, revision, rollout) for branch, revision in (("main", 1), ("brevity", 2)) for rollout in rollouts]
    assert client.query(used).result_rows == expected
    weights = "SELECT uniqExact(Checksum) FROM spangrad.policy_versions"
    assert client.query(weights).result_rows == [(3,)]
    client.close()
