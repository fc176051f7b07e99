"""The trainer's Ray cluster: a start that failed, and what it left."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import psutil
import pytest

from spangrad.processes import wait_until
from tests.support.policies import trainer_settings
from trainer.distributed.cluster import Cluster

ray = pytest.importorskip("ray")


def test_cluster_start_that_failed_beside_zombie_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of Ray that ended in a failed start is a zombie until it is waited for: it has no command line that could be read."""
    starts, remains = [0], list[subprocess.Popen[bytes]]()

    def init(_temp_dir: str, **_options: Any) -> None:
        starts[0] += 1
        if starts[0] == 1:
            remains.extend(
                subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})", _temp_dir]) for seconds in (0, 600)
            )
            wait_until(lambda: psutil.Process(remains[0].pid).status() == psutil.STATUS_ZOMBIE, 60, "the end of a part of Ray")
            raise RuntimeError("too slow")

    monkeypatch.setattr(ray, "init", init)
    try:
        Cluster(trainer_settings(workers__per_node=1)).close()
        assert starts == [2]
        assert [process.wait(60) for process in remains] == [0, -signal.SIGKILL]
    finally:
        for process in remains:
            process.kill()
