"""What is kept of attempts on disk is bounded: the newest rollouts stay, whatever their ids are made of."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from runner.workers.attempt_files import AttemptFiles


def test_attempt_files_prune_keeps_newest_rollouts_of_any_id(tmp_path: Path) -> None:
    files = AttemptFiles(tmp_path, 20)
    names = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(100)]
    for number, name in enumerate(names):
        files.end(name, 0, {"reason": "crash"})
        os.utime(tmp_path / "attempts" / name, (number, number))
    files.end(names[0], 1, {"reason": "crash"})
    files.prune()
    assert {path.name for path in (tmp_path / "attempts").iterdir()} == {names[0], *names[-19:]}, "a new attempt makes a rollout new"
