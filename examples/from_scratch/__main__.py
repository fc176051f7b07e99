"""`python -m examples.from_scratch`: the calculator's questions, model and rewards, asked by an agent on bare httpx."""

from dataclasses import replace

from examples.calculator.__main__ import EXAMPLE as CALCULATOR
from examples.learning.run import main

EXAMPLE = replace(CALCULATOR, name="from_scratch", agent="examples.from_scratch.agent:agent")

if __name__ == "__main__":
    main(EXAMPLE)
