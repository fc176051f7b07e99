"""Ranks of the trainer as its own process sees them: what a step that fails leaves of them."""

from __future__ import annotations

from typing import Any

import pytest

from spangrad.errors import BadRowsError
from trainer.distributed.workers import DistributedWorkers


class Rows:
    """Rows in a queue that may have ended."""

    def __init__(self) -> None:
        self.has_ended, self.cleared = False, 0

    def clear(self) -> None:
        assert not self.has_ended, "there is no queue to clear"
        self.cleared += 1


@pytest.mark.parametrize("stuck", [True, False])
def test_run_of_rows_that_fail_a_check_raises_that_with_ranks_ended_or_not(stuck: bool) -> None:
    """Ranks that refuse rows while others wait for them have all been ended, and the queue with them."""
    workers, rows = DistributedWorkers.__new__(DistributedWorkers), Rows()

    class Refusing:
        replay_buffer = rows

        def train(self, phases: Any) -> None:
            if stuck:  # as `RankCalls` ends them
                workers._trainer, rows.has_ended = None, True
            raise BadRowsError("rows [1] differ by 0.4 nats.", {1: "logprob_gap"})

    workers._trainer = Refusing()
    with pytest.raises(BadRowsError, match=r"rows \[1\]"):
        workers.run(None)  # type: ignore[arg-type]
    assert rows.cleared == (not stuck)
