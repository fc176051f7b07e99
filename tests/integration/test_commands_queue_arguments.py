"""Arguments of `spangrad queue`'s commands, by the command line."""

from __future__ import annotations

from tests.support.processes import run_spangrad


def test_queue_cancel_with_ambiguous_arguments_exits_2() -> None:
    for arguments in ([], ["r1", "--run", "run"], ["r1", "--group", "g"]):
        done = run_spangrad("queue", "cancel", *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("spangrad: "), done.stderr
