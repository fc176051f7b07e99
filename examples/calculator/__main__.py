"""`python -m examples.calculator`: the calculator's agent learns which operator a verb means."""

from examples.calculator.task import questions
from examples.learning.example import Example
from examples.learning.run import main

EXAMPLE = Example(
    name="calculator",
    agent="examples.calculator.agent:agent",
    evaluator="examples.calculator.task:evaluate",
    model="examples.calculator.model",
    questions=questions,
    steps=60,
    target=0.85,
)

if __name__ == "__main__":
    main(EXAMPLE)
