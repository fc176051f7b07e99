"""`spangrad play` as a process with a person at its standard input."""

from __future__ import annotations

import json
import os
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
from tests.support.processes import run_spangrad
from tests.support.runners import until
from tests.support.scripted_servers import WordPolicy

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


def test_play_by_the_model_is_one_rollout_with_its_rewards() -> None:
    headers = list[dict[str, str]]()

    class Policy(WordPolicy):
        def answer(self, method: str, path: str, headers_: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
            headers.append({name.lower(): value for name, value in headers_.items()})
            return super().answer(method, path, headers_, body)

    words = ["play", "two_guesses:TwoGuesses", "--task", '{"city": "lima"}', "--json", "--directory", str(AGENTS)]
    with Policy(lambda messages: "lima") as policy, OtlpSink() as sink:
        env = {"SPANGRAD_GATEWAY__URL": policy.url, "SPANGRAD_STORE__OTLP_ENDPOINT": sink.url}
        done = run_spangrad(*words, env={**os.environ, **env})
    assert (done.returncode, done.stderr) == (0, "")
    rollout = json.loads(done.stdout)["rollout"]
    identity = {"spangrad.run.id": "play", "spangrad.rollout.id": rollout, "spangrad.rollout.mode": "production"}
    assert len(headers) == 2
    for header in headers:
        baggage = dict(member.split("=") for member in header["baggage"].split(","))
        assert identity.items() <= baggage.items()
    assert sorted(span.name for span in sink.spans if span.name[:4] != "chat") == ["episode", *["execute_tool step"] * 2, "reset"]
    assert len({span.trace_id for span in sink.spans}) == 1
    rewards = [event["gen_ai.evaluation.score.value"] for span in sink.spans for _, event in span.events]
    assert sorted(rewards) == [0.25, 0.5]
    assert all(identity.items() <= span.attributes.items() for span in sink.spans)


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
