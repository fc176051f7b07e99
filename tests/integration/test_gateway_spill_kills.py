"""The gateway's spill file when its process is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from gateway.recorder.spill import Spill


def all_of(kept: Spill, limit: int = 2**20) -> tuple[list[bytes], int]:
    """Every span that is not released, and the bytes that were left out."""
    spans: list[bytes] = []
    place, damaged = kept.begin, 0
    while place < kept.end:
        piece = kept.extent(place).read(limit)
        spans += [record.span for record in piece.spans]
        place, damaged = piece.end, damaged + piece.damaged
    return spans, damaged


def reopened(directory: Path) -> list[bytes]:
    kept = Spill(directory)
    spans, _ = all_of(kept)
    kept.close()
    return spans


_APPEND_FOREVER = """
import itertools, sys
from pathlib import Path
from gateway.recorder.spill import Spill
kept = Spill(Path(sys.argv[1]))
for number in itertools.count():
    kept.append(b"%d " % number * 5000)
    print(number, flush=True)
"""


def test_spill_after_kill_holds_every_appended_span(tmp_path: Path) -> None:
    for kill in range(3):
        directory = tmp_path / str(kill)
        with subprocess.Popen([sys.executable, "-c", _APPEND_FOREVER, str(directory)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout
            for _ in range(200):
                writer.stdout.readline()
            writer.send_signal(signal.SIGKILL)
            reported = 199 + len(writer.stdout.read().splitlines())
        spans = reopened(directory)
        assert spans == [b"%d " % number * 5000 for number in range(len(spans))]
        assert len(spans) >= reported + 1
