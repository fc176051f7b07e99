"""`python -m examples.maze`: a policy learns the way through OpenEnv's maze, which OpenEnv's own server plays."""

from examples.learning.example import Example, Questions
from examples.learning.run import main
from examples.maze.service import serving
from spangrad.episode.agent import REFERENCE

GROUPS = 4
HELD_OUT = 64
REACHED = 10.0
"""Reward of the exit."""
TURNS = 24
"""Moves of an episode; the shortest way has 14."""


def questions(seed: int, count: int) -> Questions:
    """Return seeds for resets. The maze is the same each time."""
    first = (seed + 1) * 100_000
    return Questions([{"seed": first + number} for number in range(count)], [{"seed": number} for number in range(HELD_OUT)])


EXAMPLE = Example(
    name="maze",
    agent=REFERENCE,
    serve=serving,
    model="examples.maze.model",
    questions=questions,
    steps=12,
    target=0.9,
    success=REACHED,
    role="",
    measure="reached the exit",
    groups=GROUPS,
    settings={
        "engine.max_model_len": 512,
        "runner.episode.turns": TURNS,
        "runner.episode.turn_tokens": 2,  # an action, and the reply's end
        "trainer.credit.gamma": 0.9,
        "trainer.loss.entropy_coef": 0.0,
    },
)

if __name__ == "__main__":
    main(EXAMPLE)
