"""The command that the trainer runs to evaluate."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from spangrad.settings import Settings
from spangrad.types import PolicyVersion, VersionStatus
from tests.support.policies import trainer_settings
from trainer.ledger.tables import LedgerVersion
from trainer.monitor.evaluate import Evaluation

METRICS = {
    "groups": 4.0, "rollouts": 16.0, "transitions": 30.0, "merge_ratio": 1.0, "masked_too_long": 0.0, "mean_return": 0.25, "success": 0.5,
    "logprob_gap_max": 2e-6, "staleness_mean": 0.5, "seconds_idle": 6.0, "seconds_train": 1.5, "seconds_publish": 0.5,
}  # fmt: skip


def version(number: int = 3, path: str = "", **metrics: float) -> LedgerVersion:
    facts = PolicyVersion("policy", number, number - 1, f"batch{number}", "", path)
    return LedgerVersion(facts, "main", "main", "run", "train", "", VersionStatus.COMMITTED, {**METRICS, **metrics})


def test_evaluation_command_runs_every_n_steps_and_may_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def ran(*command: str, every: int = 2) -> list[str]:
        chosen = Settings(trainer=trainer_settings(evaluation__every=every, evaluation__command=command))
        evaluation = Evaluation(None, chosen, "spec")  # type: ignore[arg-type]
        for number in range(1, 6):
            evaluation.run_command(version(number), number)
        return sorted(one.name for one in tmp_path.iterdir())

    assert ran() == []
    assert ran(sys.executable, "-c", f"open({str(tmp_path / 'never')!r}, 'x')", every=0) == []
    code = (
        f"import pathlib, sys; here = pathlib.Path({str(tmp_path)!r}); n = len(list(here.iterdir())); (here / str(n)).touch(); sys.exit(n)"
    )
    assert ran(sys.executable, "-c", code) == ["0", "1"]
    assert caplog.messages == ["trainer.evaluation.command ended with exit code 1 for version 4"]
    ran("/nowhere/at/all", every=5)
    assert "trainer.evaluation.command cannot be started" in caplog.messages[-1]
