"""`spangrad run` as a user meets it: what it prints of rollouts that failed, and how it ends."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from commands.training.agents import AgentOptions
from commands.training.run import run
from spangrad.errors import QueueError
from tests.support.otlp import OtlpSink
from tests.support.runners import AttemptGateway

pytestmark = pytest.mark.usefixtures("quick_agents")

AGENT = """
    import json, urllib.request

    def odd(given, endpoint):
        if given == "call":
            body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "x"}]}).encode()
            urllib.request.urlopen(urllib.request.Request(endpoint + "/chat/completions", body)).read()
            return 1.0
        if given == "self":
            from span_processors.reward import reward
            reward(1.0)
            return None
        if given == "raise":
            raise RuntimeError("bad day\\nand worse")
        return given

    def score(given, output):
        return "good"
"""
MORE = "see `spangrad rollout show ROLLOUT`"


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the agent's directory, which is made the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(textwrap.dedent(AGENT))
    return tmp_path


def outcome(capsys: pytest.CaptureFixture[str], inputs: list[object], *command: str, **options: Any) -> tuple[int, list[str]]:
    """The exit code, and what stands below the table; ROLLOUT is a rollout's id."""
    lines = [json.dumps({"task_id": f"task {place}", "input": given}) for place, given in enumerate(inputs)]
    Path("tasks.jsonl").write_text("\n".join(lines))
    code = 0
    with OtlpSink() as sink, AttemptGateway() as gateway:
        settings = [f"store.otlp_endpoint={sink.url}", f"gateway.url={gateway.url}", "runner.max_attempts=1"]
        try:
            run(*command, tasks="tasks.jsonl", group_size=2, set_=settings, options=AgentOptions(**options))
        except SystemExit as ended:
            code = int(str(ended.code))
    *_, below = capsys.readouterr().out.partition(f"task {len(inputs) - 1} ")
    return code, [re.sub(r"show \S+`", "show ROLLOUT`", line) for line in below.splitlines()[1:]]


def test_run_prints_each_failure_reason_with_count_and_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(capsys, ["call", "raise", "good", "raise"], agent="mine.py:odd") == (
        0,
        [
            f"4 failed, exception: RuntimeError: bad day: and worse; {MORE}",
            f"2 failed, invalid_output: the reward is 'good', not a finite number: name an evaluator, or return a number; {MORE}",
        ],
    )


def test_run_program_that_cannot_start_prints_its_error_and_exits_1(capsys: pytest.CaptureFixture[str], directory: Path) -> None:
    code, (line,) = outcome(capsys, [1], sys.executable, "nowhere.py")
    assert code == 1
    assert line.startswith("2 failed, exit_code: exit code 2: ")
    assert line.endswith(f"can't open file '{directory / 'nowhere.py'}': [Errno 2] No such file or directory; {MORE}")


def test_run_evaluator_without_number_prints_failure_and_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(capsys, ["call"], agent="mine.py:odd", evaluator="mine.py:score") == (
        1,
        [f"2 failed, evaluation: the reward is 'good', not a finite number; {MORE}"],
    )


def test_run_agents_without_policy_call_print_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(capsys, [1.0], agent="mine.py:odd") == (
        0,
        ["no rollout called the policy: agents find the gateway in OPENAI_BASE_URL, or in their argument `endpoint`"],
    )
    assert outcome(capsys, ["call", 1.0], agent="mine.py:odd") == (0, [])


def test_run_agents_that_reward_themselves_name_where_rewards_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(capsys, ["call", "self"], agent="mine.py:odd") == (
        0,
        [f"2 recorded rewards on the spans of the agent; {MORE}, or the table spangrad.rollouts"],
    )


def test_run_without_terminal_logs_number_of_ended_rollouts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("commands.console._LOG_SECONDS", 0)
    caplog.set_level("INFO")
    outcome(capsys, ["call"], agent="mine.py:odd")
    lines = [record.message for record in caplog.records if record.name == "spangrad"]
    assert lines == [f"running: {ended} of 2 rollouts" for ended in range(3)]


def test_run_reads_stored_tasks_after_the_services_answer_and_files_before(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def stop(*_: object) -> None:
        done.append("waited")
        raise InterruptedError

    monkeypatch.setattr("commands.training.run.await_services", stop)
    monkeypatch.setattr("commands.training.run.read_tasks", lambda tasks: done.append(f"read {tasks}"))
    monkeypatch.setattr("spangrad.client.task_store.TaskStore.read", lambda _, name: done.append(f"read {name}"))
    for tasks in ("tasks.jsonl", "queue:mine"):
        with pytest.raises(InterruptedError):
            run(options=AgentOptions(agent="mine.py:odd"), tasks=tasks, set_=["queue.url=http://127.0.0.1:9"])
    assert done == ["read tasks.jsonl", "waited", "waited"]


def test_run_with_stored_tasks_without_queue_url_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commands.training.run.await_services", lambda *_: pytest.fail("it waited first"))
    with pytest.raises(QueueError, match=r"set queue\.url"):
        run(options=AgentOptions(agent="mine.py:odd"), tasks="queue:mine")
