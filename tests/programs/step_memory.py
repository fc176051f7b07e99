"""Program that measures the peak memory of a real training step on a CPU: `python -m tests.programs.step_memory JOB...`.

In: jobs in JSON, each with `config` (of a model with random weights), `rows`, `tokens` (of a row; all but the first 8 are trained) and
`settings` (of the trainer, by their fields' names). Out: a line of JSON for each with `parameters`, and in bytes above what the process
had before: `loaded`, `held` (after a step), `peak` (in a second step, when the moments are there).

With the environment variables RANK, WORLD_SIZE and SPANGRAD_RENDEZVOUS, a URL, the process is one of several ranks, which get the same
jobs; each passes all rows.

The kernel counts pages. Once all is imported, malloc gives all but small blocks back as soon as they are freed.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from tests.support.policies import NO_ALARM, trainer_settings, transition_row
from trainer.data.batch import Batch, layout
from trainer.data.chains import chains
from trainer.data.merge import separate

_MALLOC = {-3: 8192, -1: 0, -8: 1}
"""Values of M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_ARENA_MAX."""
_SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_WARM_UP: dict[str, Any] = {"config": {"model_type": "qwen2", "num_key_value_heads": 1, **_SMALL}, "rows": 4, "tokens": 64}


def measure(config: dict[str, Any], rows: int, tokens: int, settings: dict[str, Any] | None = None) -> dict[str, int]:
    """Return the memory of a step, in bytes, and the number of parameters."""
    from trainer.optim.optimizer import VerlOptimizer

    with tempfile.TemporaryDirectory() as directory:
        parameters = _save(config, Path(directory))
        before = _settled()
        chosen = trainer_settings(model=Path(directory), alarms__logprob=NO_ALARM, **(settings or {}))
        optimizer = VerlOptimizer(Path(directory), chosen)
        loaded = _settled() - before
        batch = _batch(rows, tokens, config["vocab_size"], has_critic=chosen.credit.estimator == "gae")
        optimizer.step(batch)
        held = _settled() - before
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        optimizer.step(batch)
        return {"parameters": parameters, "loaded": loaded, "held": held, "peak": _status("VmHWM") - before}


def _save(config: dict[str, Any], directory: Path) -> int:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from examples.two_tools.model import WORDS, word_tokenizer

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    model.save_pretrained(directory)
    word_tokenizer(WORDS).save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def _batch(rows: int, tokens: int, vocabulary: int, *, has_critic: bool) -> Batch:
    random, response = np.random.default_rng(0), tokens - 8
    sampled = [
        transition_row(
            f"rollout-{row}",
            PromptIds=random.integers(0, vocabulary, tokens - response).tolist(),
            ResponseIds=random.integers(0, vocabulary, response).tolist(),
            Logprobs=[-1.0] * response,
            rewards=(float(row % 2),),
        )
        for row in range(rows)
    ]
    if not has_critic:
        return layout(separate(pl.DataFrame(sampled), pl.Series(np.linspace(-1, 1, rows))), lineage=[0])
    frame, rewards_of_calls = chains(pl.DataFrame(sampled), pl.repeat(True, rows, eager=True), {})
    return layout(separate(frame, pl.zeros(rows, eager=True)), lineage=[0], rewards=rewards_of_calls)


def _settled() -> int:
    """Return the memory that the process holds, once all that is free is given back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return _status("VmRSS")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _join() -> None:
    from trainer.optim.process import choose_platform, join_group

    os.environ |= {"LOCAL_RANK": "0", "RAY_LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]}
    choose_platform()
    join_group()


if __name__ == "__main__":
    if "SPANGRAD_RENDEZVOUS" in os.environ:
        _join()
    measure(**_WARM_UP)
    for parameter, value in _MALLOC.items():
        assert ctypes.CDLL("libc.so.6").mallopt(parameter, value)
    for argument in sys.argv[1:]:
        print(json.dumps(measure(**json.loads(argument))), flush=True)
