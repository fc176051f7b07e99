"""Trains in children forked from a process that has imported everything, so that a start costs a second instead of ten.

In: on stdin, a line of JSON a child: trainer's and store's settings. Out: on stdout the child's process id, then its exit code. Invariant:
this process runs nothing of what it imports: threads would not survive a fork.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from spangrad.settings import Settings

LOADED = "is loaded on"
"""In the log once the weights are loaded."""


@dataclass
class Nursery:
    """The process that forks, as the test sees it."""

    process: subprocess.Popen[str]
    log: Path

    def start(self, settings: Settings) -> int:
        """Begin to train; the child's process id."""
        values = {"trainer": settings.trainer.model_dump(mode="json"), "store": settings.store.model_dump(mode="json")}
        assert self.process.stdin
        self.process.stdin.write(json.dumps(values) + "\n")
        self.process.stdin.flush()
        return self._number()

    def wait(self) -> int:
        """The child's exit code; negative: the signal that ended it."""
        return self._number()

    def _number(self) -> int:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        return int(line)


@contextmanager
def nursery(log: Path) -> Generator[Nursery]:
    """A process that forks trainers until the block ends."""
    root = Path(__file__).parents[2]
    # verl reads these as it is imported; the trainer would set them later.
    of_verl = {
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "trainer.optim.cpu_platform",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, text=True, cwd=root,
            env={**os.environ, "PYTHONPATH": str(root), "SPANGRAD_CONFIG": "", **of_verl},
        )  # fmt: skip
    try:
        yield Nursery(process, log)
    finally:
        process.kill()
        process.wait()


def _serve(train: Callable[[Settings], None]) -> None:
    for line in sys.stdin:
        child = os.fork()
        if not child:
            code = 1
            try:
                train(Settings.model_validate(json.loads(line)))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    import verl.trainer.config
    import verl.trainer.ppo.core_algos
    import verl.workers.config
    import verl.workers.engine_workers
    import verl.workers.utils.losses  # noqa: F401

    from trainer import loop
    from trainer.optim import optimizer  # noqa: F401

    logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s", force=True)  # verl has its own
    _serve(lambda settings: loop.train(settings, follow=False))
