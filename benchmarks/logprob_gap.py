"""Differences between the logprobs of vLLM and of the trainer for the same tokens, in every combination of their dtypes.

In: which models. Out: a table, and as the last line one JSON object; exit code 1 when a combination is beyond the default limits of its
dtypes. Invariant: vLLM runs as `spangrad engine` runs it, and the statistics are those that a training step reports.

Two random models whose distributions are as peaked as a trained one's: the demo's (117k parameters, a head of its own, 15 tokens) and one
of four layers (hidden size 256, 8,000 tokens). `head` is what logits are computed in on both sides: float32, as by default,
or `model`, the dtype of the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np

from benchmarks.engines import start_engine, wait_for_engines
from benchmarks.scratch import exit_code, scratch
from spangrad.settings import TrainerSettings
from spangrad.settings.trainer_service import AlarmSettings, LogprobAlarm
from trainer.data.batch import Batch
from trainer.monitor import logprob_check
from trainer.optim.optimizer import VerlOptimizer

Head = Literal["float32", "model"]
ENGINES: tuple[tuple[str, Head], ...] = (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "model"))
REQUESTS = 96
PROMPT_TOKENS = 32
HEAD_SPREAD = 0.15
"""Standard deviation of the larger model's head: logits then spread by 2.4, and the likeliest token has a probability of a tenth or so."""
RESPONSE_TOKENS = 64
NO_ALARM = LogprobAlarm(mean=1e9, p99=1e9, pearson=-1, k3=1e9)
STATISTICS = ("logprob_gap_mean", "logprob_gap_p99", "logprob_gap_max", "probs_pearson", "rollout_kl_k3", "outside_clip")


def build_models(directory: Path) -> dict[str, Path]:
    """Write both models and return their directories by name."""
    from benchmarks.random_model import write_model
    from examples.two_tools.model import build_model

    small, larger = directory / "two-tools", directory / "four-layers"
    build_model(small, 0)
    write_model(larger, hidden=256, layers=4, words=8000, seed=0, head_spread=HEAD_SPREAD)
    return {"two-tools": small, "four-layers": larger}


def sample(model: Path, dtype: str, head: Head, directory: Path) -> Batch:
    """Have a vLLM of some dtypes complete random prompts, and return what it recorded as a batch without advantages."""
    words = json.loads((model / "config.json").read_text())["vocab_size"]
    prompts = np.random.default_rng(0).integers(3, words, (REQUESTS, PROMPT_TOKENS))
    cache, log = directory / "vllm-cache", directory / f"{model.name}-{dtype}-{head}.log"
    with ExitStack() as stack, ThreadPoolExecutor(16) as pool:
        child, url = start_engine(model, cache, log, stack, dtype=dtype, head_dtype=head, max_model_len=128, kv_cache_bytes=64 * 2**20)
        wait_for_engines([url], [child])
        choices = list(pool.map(lambda prompt: _complete(url, prompt), prompts.tolist()))
    responses = np.array([choice["token_ids"] for choice in choices])
    return Batch(
        prompts=prompts,
        responses=responses,
        attention_mask=np.ones((REQUESTS, PROMPT_TOKENS + RESPONSE_TOKENS), np.int64),
        response_mask=np.ones_like(responses),
        logprobs=np.array([choice["logprobs"]["token_logprobs"] for choice in choices], np.float32),
        advantages=np.zeros(responses.shape, np.float32),
        temperature=np.ones(REQUESTS, np.float32),
        versions=np.zeros_like(responses),
        staleness=np.zeros(responses.shape, np.int16),
        reshaped=np.zeros(REQUESTS, np.bool_),
        rollout=np.arange(REQUESTS),
        group=np.zeros(REQUESTS, np.int64),
        real_rows=REQUESTS,
    )


def compare(model: Path, batch: Batch, dtype: logprob_check.Dtype, head: Head) -> dict[str, float]:
    """Return the statistics that a step of a trainer of some dtypes reports of a batch."""
    settings = TrainerSettings(dtype=dtype, alarms=AlarmSettings(logprob=NO_ALARM))
    plain = patch("trainer.optim.verl_worker.compute_head_in_float32") if head == "model" else contextlib.nullcontext()
    with plain:
        engine = VerlOptimizer(model, settings)
    metrics = engine.step(batch)
    engine.close()
    return {name: metrics[name] for name in STATISTICS}


def _complete(url: str, prompt: list[int]) -> dict[str, Any]:
    body = {
        "model": "policy",
        "prompt": prompt,
        "max_tokens": RESPONSE_TOKENS,
        "ignore_eos": True,
        "temperature": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
    }
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)["choices"][0]


def excess(engine: str, trainer: logprob_check.Dtype, figures: Mapping[str, float]) -> int:
    """Return how many of a combination's statistics are beyond the default limits."""
    limits = logprob_check.DEFAULTS[logprob_check.engine_dtype(engine), trainer]
    upper = (("logprob_gap_mean", limits.mean), ("logprob_gap_p99", limits.p99), ("rollout_kl_k3", limits.k3))
    return sum(figures[name] > limit for name, limit in upper) + (figures["probs_pearson"] < limits.pearson)


def main(arguments: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Differences between the logprobs of vLLM and of the trainer.")
    parser.add_argument("--models", nargs="+", default=["two-tools", "four-layers"], choices=["two-tools", "four-layers"])
    chosen = parser.parse_args(arguments).models
    figures: dict[str, dict[str, float]] = {}
    beyond = 0
    print(f"{'model':12} {'engine':9} {'trainer':7} {'head':8}" + "".join(f"{name:>18}" for name in STATISTICS))
    with scratch("logprob_gap") as directory:
        models = build_models(directory)
        for model in chosen:
            for dtype, head in ENGINES:
                batch = sample(models[model], dtype, head, directory)
                for trainer in ("fp32", "bf16"):
                    if head == "model" and trainer == "fp32":
                        continue  # a float32 trainer has a float32 head
                    gaps = compare(models[model], batch, trainer, head)
                    figures[f"{model}, engine {dtype}, trainer {trainer}, head {head}"] = gaps
                    beyond += excess(dtype, trainer, gaps) if head == "float32" else 0
                    print(f"{model:12} {dtype:9} {trainer:7} {head:8}" + "".join(f"{gaps[name]:18.7f}" for name in STATISTICS), flush=True)
    print(json.dumps({"benchmark": "logprob_gap", "ours": figures, "checked": {"beyond_the_default_limits": beyond}}))
    return exit_code({"beyond_the_default_limits": beyond})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
