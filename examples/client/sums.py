"""An agent of a few lines and the client that trains it, in one file: run it as `python sums.py URL_OF_THE_QUEUE`.

In: a sum. Out: what the model says of it; the reward is 1 where that is the sum. Invariant: what the workers import stands above the last
block, which is this script's alone.
"""

from __future__ import annotations

import json
import random
import sys
import urllib.request
from typing import Any

import spangrad


def score(task: dict[str, Any], answer: str) -> float:
    """1 where the last word is the sum."""
    return float(answer.split()[-1:] == [str(task["sum"])])


@spangrad.rollout(evaluator=score)
def agent(task: dict[str, Any], endpoint: str) -> str:
    """Ask the model that is trained, at the address that belongs to this attempt."""
    body = {"model": "policy", "messages": [{"role": "user", "content": task["question"]}], "temperature": 1.0, "max_tokens": 16}
    request = urllib.request.Request(f"{endpoint}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def questions(seed: int, count: int) -> list[dict[str, object]]:
    """Rows of data; a row that names no `task_id` and `input` is itself what the agent is given."""
    draw = random.Random(seed)
    pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(count)]
    return [{"question": f"What is {a} + {b}?", "sum": a + b} for a, b in pairs]


if __name__ == "__main__":
    client = spangrad.Client(sys.argv[1], run_id="sums", settings={"runner.group_size": 4})
    client.upload_data(questions(seed=1, count=8), test_file=questions(seed=2, count=4))
    print(client.train(agent, n_workers=2, validate_every=4))
