"""`spangrad play` as a process with a person at its standard input."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from commands.playing import process as process_module
from commands.playing.process import start_play
from page.actions.requests import PlayRequest
from spangrad.processes import process_start
from spangrad.settings import Settings
from tests.support.otlp import OtlpSink
from tests.support.runners import until

AGENTS = Path(__file__).resolve().parent.parent / "agents"


def test_play_by_a_person_ends_at_ctrl_c_before_a_line_is_typed() -> None:
    words = ["play", "two_guesses:TwoGuesses", "--task", '{"city": "lima"}', "--person", "--directory", str(AGENTS)]
    with subprocess.Popen(
        [sys.executable, "-m", "spangrad", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.read(2) == "> "
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
            assert process.stderr.read() == ""
        finally:
            process.kill()


async def test_play_process_that_ends_leaves_no_process_of_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "servant.py").write_text(
        "import subprocess\n\n\nclass Servant:\n"
        "    def reset(self, task):\n        return str(subprocess.Popen(['sleep', '600']).pid)\n\n"
        "    def step(self, action):\n        raise AssertionError\n"
    )
    handlers = {"servant": {"environment": "servant:Servant", "directory": str(tmp_path)}}
    request = PlayRequest(rollout="play-0", author="Ada", environment="servant", task="null", person=True, role="", policy="")
    with OtlpSink() as sink:
        settings = Settings.model_validate({"runner": {"handlers": handlers}, "store": {"otlp_endpoint": sink.url}})
        process = await start_play(settings, request)
        line = await anext(process.lines())
        child = int(msgspec.json.decode(line)["text"])
        assert process_start(child)
        await process.end()
        await until(lambda: _has_ended(child))
        monkeypatch.setattr(process_module, "kill_group", lambda group: pytest.fail(f"process group {group} may be that of others"))
        await process.end()


async def _has_ended(pid: int) -> bool:
    return not process_start(pid)
