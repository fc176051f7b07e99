"""`python -m examples.retrieval_qa`: the researcher learns to search until it can answer, and to answer what it found."""

from examples.learning.example import Example
from examples.learning.run import main
from examples.retrieval_qa.task import questions

EXAMPLE = Example(
    name="retrieval_qa",
    agent="examples.retrieval_qa.agent:agent",
    evaluator="examples.retrieval_qa.task:evaluate",
    model="examples.retrieval_qa.model",
    questions=questions,
    steps=60,
    target=0.75,
    success=0.999,  # all words right: 0.9 F1 + 0.1, in floating point
)

if __name__ == "__main__":
    main(EXAMPLE)
