"""`python -m examples.gomoku`: a policy that lays stones at random learns to beat a script."""

from examples.gomoku.game import FIRST, SECOND
from examples.gomoku.task import openings
from examples.learning.example import Example
from examples.learning.run import main
from spangrad.episode.agent import REFERENCE

EXAMPLE = Example(
    name="gomoku",
    agent=REFERENCE,
    environment="examples.gomoku.game:Gomoku",
    model="examples.gomoku.model",
    questions=openings,
    steps=48,
    target=0.85,
    role=FIRST,
    measure="games won",
    settings={
        "runner.episode.turn_tokens": 2,  # a cell, and the reply's end
        "runner.episode.players": {SECOND: {"script": "examples.gomoku.script:small"}},
        "runner.validation_sampling.temperature": 0.7,
        "trainer.credit.reward_roles": [FIRST],
        "trainer.credit.gamma": 0.5,
        "trainer.loss.entropy_coef": 0.0,
        "trainer.optim.betas": [0.9, 0.999],
        "trainer.optim.epochs": 2,
        "trainer.optim.mini_batches": 2,
        "trainer.optim.schedule": "cosine",
        "trainer.optim.warmup_steps": 40,
    },
)

if __name__ == "__main__":
    main(EXAMPLE)
