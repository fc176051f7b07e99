"""`python -m examples.math_lora`: an adapter of low rank learns which operator a verb means, in episodes of one turn."""

from examples.calculator.task import questions
from examples.learning.example import Example
from examples.learning.run import main
from spangrad.episode.agent import REFERENCE

EXAMPLE = Example(
    name="math_lora",
    agent=REFERENCE,
    environment="examples.math_lora.problem:WordProblem",
    model="examples.math_lora.model",
    questions=questions,
    steps=60,
    target=0.85,
    role="",
    settings={
        "runner.episode.turn_tokens": 6,  # a number, two operators and operands, and the reply's end
        "trainer.lora.rank": 16,
        "trainer.lora.alpha": 32,
        "trainer.optim.learning_rate": 5e-3,
        "trainer.optim.mini_batches": 2,
        "trainer.optim.schedule": "cosine",
        "trainer.loss.entropy_coef": 0.0,
    },
)

if __name__ == "__main__":
    main(EXAMPLE)
