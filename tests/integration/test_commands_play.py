"""`spangrad play` as a process with a person at its standard input."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

AGENTS = Path(__file__).resolve().parent.parent / "agents"


def test_play_by_a_person_ends_at_ctrl_c_before_a_line_is_typed() -> None:
    words = ["play", "two_guesses:TwoGuesses", "--task", '{"city": "lima"}', "--person", "--directory", str(AGENTS)]
    with subprocess.Popen(
        [sys.executable, "-m", "spangrad", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    ) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.read(2) == "> "
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
            assert process.stderr.read() == ""
        finally:
            process.kill()
