"""`spangrad play` in a terminal, by a person."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from commands.training.agents import agent_spec
from commands.training.play import play
from runner.workers.agents import CallableAgent
from spangrad.episode.agent import REFERENCE
from spangrad.errors import AgentError
from spangrad.settings import RunnerSettings

AGENTS = Path(__file__).resolve().parent.parent / "agents"


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_play_by_a_person_prints_each_message_and_the_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("lima\nrome\n"))
    play("two_guesses:TwoGuesses", task='{"city": "lima"}', person=True, directory=AGENTS)
    printed = [
        "user: say lima",
        "assistant: lima",
        "user: error",
        "assistant: rome",
        "user: error",
        "",
        "2 turns, return +0.75, ended by: done",
    ]
    assert capsys.readouterr().out.splitlines() == printed


def test_play_as_json_has_messages_rewards_and_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("lima\nrome\n"))
    play("two_guesses:TwoGuesses", task='{"city": "lima"}', person=True, json=True, directory=AGENTS)
    played = json.loads(capsys.readouterr().out)
    assert [message["content"] for message in played.pop("messages")] == ["say lima", "lima", "error", "rome", "error"]
    assert played == {"rewards": [0.25, 0.5], "return": 0.75, "end": "done"}


@pytest.mark.parametrize(
    ("environment", "task", "sentence"),
    [
        ("two_guesses:TwoGuesses", "{", "--task '{' is no JSON"),
        ("two_guesses:StepResult", "1", "two_guesses:StepResult is no class with reset"),
        ("two_guesses:TwoGuesses", '{"city": "lima"}', "standard input ended before the episode"),
    ],
)
def test_play_with_invalid_arguments_raises(monkeypatch: pytest.MonkeyPatch, environment: str, task: str, sentence: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(AgentError, match=sentence):
        play(environment, task=task, person=True, directory=AGENTS)


def test_environment_alone_is_played_by_the_agent_without_code() -> None:
    spec = agent_spec((), None, None, AGENTS, RunnerSettings(), instrument=False, environment="two_guesses:TwoGuesses")
    assert spec == CallableAgent(REFERENCE, environment="two_guesses:TwoGuesses", directory=AGENTS)
    assert spec.name == "two_guesses"
    with pytest.raises(AgentError, match="only --environment"):
        agent_spec((), None, None, AGENTS, RunnerSettings(), instrument=False)
