"""`spangrad play` in a terminal, by a person."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from commands.playing.episode import in_words, total
from commands.playing.host import _text, write_line  # pyright: ignore[reportPrivateUsage]
from commands.training.agents import agent_spec
from commands.training.play import play
from runner.workers.agents import CallableAgent
from spangrad.episode.agent import REFERENCE
from spangrad.episode.environment import StepResult
from spangrad.episode.episode import EpisodeOutcome, EpisodeStep
from spangrad.episode.player import EpisodeEnd, ModelReply
from spangrad.episode.script import ScriptModel
from spangrad.errors import AgentError
from spangrad.settings import RunnerSettings
from spangrad.settings.runner import HandlerSettings

AGENTS = Path(__file__).resolve().parent.parent / "agents"


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("SPANGRAD_STORE__OTLP_ENDPOINT", "http://127.0.0.1:9")


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


def test_play_turns_are_replies_however_many_tools_each_calls() -> None:
    reply, result = ModelReply({"role": "assistant", "content": ""}), StepResult("", 0.5)
    outcome = EpisodeOutcome(EpisodeEnd.DONE, (), (reply,), (EpisodeStep(0, "first", result), EpisodeStep(0, "second", result)))
    assert (total(outcome), in_words(outcome)) == ((1.0, 1), "1 turn, return +1, ended by: done")


def test_play_as_json_has_messages_rewards_and_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("lima\nrome\n"))
    play("two_guesses:TwoGuesses", task='{"city": "lima"}', person=True, json=True, directory=AGENTS)
    played = json.loads(capsys.readouterr().out)
    assert [message["content"] for message in played.pop("messages")] == ["say lima", "lima", "error", "rome", "error"]
    assert played == {"rewards": [0.25, 0.5], "return": 0.75, "end": "done"}


BLACK = ['runner.episode.players={"black": {"script": "duel:echo"}}']


def test_play_of_several_players_prints_each_roles_messages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("ciao\n"))
    play("duel:Duel", task='{"city": "lima"}', person=True, role="white", directory=AGENTS, set_=BLACK)
    printed = [
        "[white] user: say lima",
        "[black] user: say lima\nwhite spoke",
        "[white] assistant: ciao",
        "[white] user: white spoke\nblack spoke",
        "[black] assistant: say lima\nwhite spoke",
        "[black] user: black spoke",
        "",
        "2 turns, return of white +1, return of black -1, ended by: done",
    ]
    assert capsys.readouterr().out.splitlines() == [line for text in printed for line in text.split("\n")]


def test_play_of_several_players_as_json_is_by_role(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("ciao\n"))
    play("duel:Duel", task='{"city": "lima"}', person=True, role="white", json=True, directory=AGENTS, set_=BLACK)
    played = json.loads(capsys.readouterr().out)
    assert {role: len(messages) for role, messages in played.pop("messages").items()} == {"white": 3, "black": 3}
    rewards = [{"white": None, "black": None}, {"white": 1.0, "black": -1.0}]
    assert played == {"rewards": rewards, "return": {"white": 1.0, "black": -1.0}, "end": "done"}


def test_play_greedy_reaches_players_with_a_temperature_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    temperatures: list[object] = []

    def scripted(url: str, key: str, model: str, sampling: Mapping[str, object]) -> ScriptModel:
        temperatures.append(sampling["temperature"])
        return ScriptModel(lambda messages: "ciao")

    monkeypatch.setattr("spangrad.episode.agent.EndpointModel", scripted)
    players = ['runner.episode.players={"black": {"temperature": 1.0}}']
    play("duel:Duel", task='{"city": "lima"}', greedy=True, directory=AGENTS, set_=players)
    assert temperatures == [0.0, 0.0]


@pytest.mark.parametrize("role", [None, "red"])
def test_play_by_a_person_without_a_role_of_the_environment_raises(role: str | None) -> None:
    with pytest.raises(AgentError, match=r"the roles white, black\. Name yours with --role"):
        play("duel:Duel", task='{"city": "lima"}', person=True, role=role, directory=AGENTS, set_=BLACK)


@pytest.mark.parametrize(
    ("environment", "task", "sentence"),
    [
        ("two_guesses:TwoGuesses", "{", "--task '{' is no JSON"),
        pytest.param("two_guesses:TwoGuesses", "[" * 6000, r"--task '\[{199} is no JSON", id="deep"),
        ("two_guesses:StepResult", "1", "two_guesses:StepResult is no class with reset"),
        ("two_guesses:TwoGuesses", '{"city": "lima"}', "standard input ended before the episode"),
    ],
)
def test_play_with_invalid_arguments_raises(monkeypatch: pytest.MonkeyPatch, environment: str, task: str, sentence: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(AgentError, match=sentence):
        play(environment, task=task, person=True, directory=AGENTS)


def test_play_host_text_with_half_a_surrogate_pair_is_a_line(tmp_path: Path) -> None:
    with (tmp_path / "lines").open("wb") as file:
        write_line(file.fileno(), by="user", text="no file \udc80")
    assert (tmp_path / "lines").read_bytes() == b'{"by": "user", "text": "no file ?"}\n'


def test_play_host_tool_call_with_half_a_surrogate_pair_is_shown() -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "open\udc80", "arguments": "{}"}}]
    assert '"name": "open?"' in _text({"role": "assistant", "content": None, "tool_calls": calls})


def test_environment_alone_is_played_by_the_agent_without_code() -> None:
    spec = agent_spec(HandlerSettings(directory=AGENTS, environment="two_guesses:TwoGuesses"), RunnerSettings())
    assert spec == CallableAgent(REFERENCE, environment="two_guesses:TwoGuesses", directory=AGENTS)
    assert spec.name == "two_guesses"
    with pytest.raises(AgentError, match="only --environment"):
        agent_spec(HandlerSettings(directory=AGENTS), RunnerSettings())
