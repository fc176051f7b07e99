"""`python -m examples.text_to_sql`: writer and rewriter learn to write queries that a checker accepts and that find what was asked for."""

from __future__ import annotations

import argparse
from functools import partial

from examples.learning.example import Example
from examples.learning.run import main
from examples.text_to_sql.task import questions

TRAINED = {"both": "(re)?writer_agent", "writer": "writer_agent", "rewriter": "rewriter_agent"}
"""Pattern of the names of agents whose calls are trained."""


def example(trained: str, checker: str) -> Example:
    """The example, with these agents trained and this checker."""
    return Example(
        name="text_to_sql",
        agent="examples.text_to_sql.agent:agent",
        evaluator="examples.text_to_sql.task:evaluate",
        model="examples.text_to_sql.model",
        questions=partial(questions, oracle=checker == "oracle"),
        steps=70,
        target=0.75 if checker == "model" else 0.85,
        settings={"builder.selection": {"policies": "policy", "agents": TRAINED[trained]}},
        judge="checker" if checker == "model" else None,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--train", choices=TRAINED, default="both", help="whose calls are trained")
    parser.add_argument("--checker", choices=("model", "oracle"), default="model", help="who judges")
    own, rest = parser.parse_known_args()
    main(example(own.train, own.checker), rest, parents=[parser])
