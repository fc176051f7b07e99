"""Groups of a service's own traces, in a store, sampled from a model with true logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from sampling import PROMPT, sample

import fakes
from spangrad.settings import StoreSettings
from spangrad.types import Mode
from spangrad.weights.checksums import tokenizer_hash

RUN = "service"


def send(
    store: StoreSettings, model: Path, groups: Sequence[str], *, mode: Mode = Mode.PRODUCTION, version: int = 0, size: int = 2
) -> None:
    """Groups of which the first of two rollouts won; with a size above 2 something of each is still to come."""
    spans = fakes.SpanFactory(run=RUN)
    for group in groups:
        for at, reward in enumerate((1.0, 0.0)):
            rollout = f"{group}-{at}"
            root = spans.root(rollout, calls=1, GroupId=group, GroupSize=size)
            response, logprobs = sample(model, list(PROMPT), 1 + at, 1.0, seed=at + 10 * ord(group[-1]))
            facts: dict[str, Any] = {"PromptIds": list(PROMPT), "ResponseIds": response, "Logprobs": logprobs, "Temperature": 1.0}
            facts |= {**fakes.versions((0, version)), "TokenizerHash": tokenizer_hash(model)}
            spans.call(root, rollout=rollout, **facts)
            spans.evaluation(root, reward)
    for row in (*spans.spans, *spans.calls):
        row["Mode"] = mode.value
    answer = httpx.post(f"{store.otlp_endpoint}/v1/traces", content=spans.otlp(), headers={"content-type": "application/json"}, timeout=30)
    answer.raise_for_status()
