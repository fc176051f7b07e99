"""The example of prompt optimisation, as its command runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.prompt_optimisation.__main__ import run
from examples.prompt_optimisation.task import FIRST_PROMPT

pytestmark = [pytest.mark.slow]


def test_prompt_optimisation_example_finds_both_sentences(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    summary = run(tmp_path / "run", 0)
    assert (summary["start"], summary["best"], summary["published"], summary["p"]) == (1, 3, True, 1 / 256)
    candidates = summary["candidates"]
    assert isinstance(candidates, list)
    assert [(candidate["round"], candidate["parent"], candidate["score"], candidate["failed"]) for candidate in candidates] == [
        (0, None, 0, 0),
        (1, 1, 0.5, 0),
        (2, 2, 1, 0),
    ]
    assert candidates[2]["text"] == f"{FIRST_PROMPT} Answer with the date and nothing else. Write dates as YYYY-MM-DD."
    assert (tmp_path / "run" / "curve.png").stat().st_size > 5_000
    printed = [line.split() for line in capfd.readouterr().out.splitlines()[-3:]]
    assert [(version, worth) for version, _, worth in printed] == [("1", "0.0"), ("2", "0.5"), ("3", "1.0")]
