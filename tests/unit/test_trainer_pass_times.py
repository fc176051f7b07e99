"""Times of passes: those of one step of the trainer, and none of a refused step or of a run over files."""

from __future__ import annotations

import pytest

from trainer.optim import pass_times
from trainer.optim.pass_times import PassTimes


class Engine:
    """Engine whose forward pass takes 2 s of a clock that stands still otherwise."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def forward_step(self) -> str:
        self.seconds += 2
        return "output"


def test_pass_times_count_passes_of_one_step_only(monkeypatch: pytest.MonkeyPatch):
    times, engine = PassTimes("cpu"), Engine()
    monkeypatch.setattr(pass_times.time, "perf_counter", lambda: engine.seconds)
    times.watch(engine)
    for _ in range(3):  # a run over files begins no step
        with times.forward_and_backward():
            assert engine.forward_step() == "output"
    assert times.take() == {"seconds_forward": 0, "seconds_backward": 0}
    times.begin()
    for _ in range(3):  # a step that is refused ends without `take`
        engine.forward_step()
    times.begin()
    engine.forward_step()
    with times.forward_and_backward():
        engine.forward_step()
        engine.seconds += 3
    assert times.take() == {"seconds_forward": 4, "seconds_backward": 3}
