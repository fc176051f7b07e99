"""Arguments of `spangrad queue`'s commands, by the command line."""

from __future__ import annotations

import subprocess
import sys


def test_queue_cancel_with_ambiguous_arguments_exits_2() -> None:
    for arguments in ([], ["r1", "--run", "run"], ["r1", "--group", "g"]):
        done = subprocess.run(
            [sys.executable, "-m", "spangrad", "queue", "cancel", *arguments], capture_output=True, text=True, check=False, timeout=120
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("spangrad: "), done.stderr
