"""A store with what a short training run leaves: spans, rewards, transitions, drops, two versions and their batches.

In: a directory and a model. Out: settings of a running store. Invariant: nothing is written by hand but the spans, and metrics of what this
run did not do; the rest is the builder's, the trainer's and the mirror's own.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from running_store import running_store, store_settings
from sampling import PROMPT, sample
from sections import trainer_settings

import fakes
from spangrad.settings import BuilderSettings, Settings, StoreSettings
from spangrad.store.clickhouse import connect
from spangrad.weights.checksums import tokenizer_hash
from trainer.loop import train
from transition_builder import loop

READ_TOKEN = "read"
ELSEWHERE = """
INSERT INTO otel.policy_versions
SELECT * REPLACE (
    mapUpdate(
        map('seconds_publish', 0.25, 'seconds_idle', 0.5, 'seconds_load', 0.125, 'seconds_credit', 0.0625, 'validate_success', 1.,
            'mfu', 0.25),
        Metrics) AS Metrics,
    now64(6) AS IngestedAt)
FROM otel.policy_versions FINAL WHERE BatchId != ''
"""
"""Metrics of a trainer that follows, publishes, evaluates and has a GPU; this one's stay."""


@contextmanager
def dashboard_world(directory: Path, model: Path) -> Generator[StoreSettings]:
    """The store, which asks readers for READ_TOKEN."""
    store = store_settings(directory / "store", token="write", read_token=READ_TOKEN)
    with running_store(store, directory / "store.log"):
        settings = Settings(
            store=store,
            builder=BuilderSettings(incomplete_after_seconds=0),
            trainer=trainer_settings(
                run_id="run",
                model=model,
                directory=directory / "policies",
                groups_per_batch=2,
                max_staleness=9,
                learning_rate=1e-3,
                publish=False,
            ),
        )
        trained = _trained(model)
        _send(store, trained.otlp())
        # Delivered again but for one, so that nothing takes it for the same request: whoever counts must count each span once.
        _send(store, trained.otlp(*[str(row["SpanId"]) for row in trained.spans[:-1]]))
        _send(store, _held_out(model).otlp())
        loop.build_once(settings)
        train(settings, follow=False)
        client = connect(store)
        client.command(ELSEWHERE)
        client.close()
        yield store


def _trained(model: Path) -> fakes.SpanFactory:
    """Four groups of two rollouts, one of which won; tools and a call that fail, an attempt that crashes, a reward that never came."""
    spans = fakes.SpanFactory(run="run")
    for group in ("a", "b", "c", "d"):
        for at in range(2):
            rollout = f"{group}-{at}"
            if rollout == "d-1":
                spans.root(rollout, attempt=0, calls=0, final=False, failure="crash", GroupId=group)
            attempt = int(rollout == "d-1")
            root = spans.root(rollout, attempt=attempt, calls=1, GroupId=group, GroupSize=2, TaskId=f"task-{group}")
            agent = spans.span("agent", root, rollout=rollout, attempt=attempt, kind="AGENT")
            _call(spans, agent, model, rollout=rollout, attempt=attempt, seed=at + 10 * ord(group))
            tool = {"rollout": rollout, "attempt": attempt, "kind": "TOOL", "status": "Error" if at else "Ok"}
            spans.span("search", agent, **tool, Attributes={"tool.name": "search"})
            spans.evaluation(root, 1.0 - at)
    failed = spans.root("failed", calls=1, GroupId="e", GroupSize=1)
    spans.call(failed, rollout="failed", ErrorType="APIError", HttpStatus=500, ResponseIds=[], Logprobs=[])
    spans.evaluation(failed, 0.0)
    mute = spans.root("mute", calls=1, GroupId="f", GroupSize=1)
    spans.call(mute, rollout="mute")
    return spans


def _held_out(model: Path) -> fakes.SpanFactory:
    """A group that is measured and never trained."""
    spans = fakes.SpanFactory(run="run")
    for at in range(2):
        root = spans.root(f"held-out-{at}", calls=1, GroupId="v", GroupSize=2)
        _call(spans, root, model, rollout=f"held-out-{at}", seed=at)
        spans.evaluation(root, 1.0)
    for row in (*spans.spans, *spans.calls, *spans.roots):
        row["Mode"] = "validate"
    return spans


def _call(spans: fakes.SpanFactory, parent: str, model: Path, *, seed: int, **where: Any) -> str:
    """A call that the model itself answered, as version 0."""
    response, logprobs = sample(model, list(PROMPT), 2, 1.0, seed=seed)
    facts = {"PromptIds": list(PROMPT), "ResponseIds": response, "Logprobs": logprobs, "Temperature": 1.0}
    return spans.call(parent, **facts, TokenizerHash=tokenizer_hash(model), **fakes.versions((0, 0)), **where)


def _send(store: StoreSettings, body: bytes) -> None:
    headers = {"content-type": "application/json", "authorization": "Bearer write"}
    httpx.post(f"{store.otlp_endpoint}/v1/traces", content=body, headers=headers, timeout=30).raise_for_status()
