"""`python -m examples.code_repair`: an agent in a sandbox learns to find a bug by failing tests, and to repair it."""

from examples.code_repair.task import questions
from examples.learning.example import Example
from examples.learning.run import main

EXAMPLE = Example(
    name="code_repair",
    agent="examples.code_repair.agent:agent",
    evaluator="examples.code_repair.task:evaluate",
    model="examples.code_repair.model",
    questions=questions,
    steps=30,
    groups=12,
    target=0.75,
    measure="repositories repaired",
    settings={
        "engine.max_model_len": 512,
        "builder.poll_seconds": 1.0,  # a step's rollouts take half a minute: fewer, larger passes
        "trainer.loss.entropy_coef": 0.0,  # a bonus makes random what ends an attempt, and that spreads to earlier replies
        "trainer.optim.mini_batches": 2,
        "runner.concurrency": 12,  # sandboxes of a worker at once: a command has a time limit
    },
)

if __name__ == "__main__":
    main(EXAMPLE)
