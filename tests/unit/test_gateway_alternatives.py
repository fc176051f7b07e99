"""Alternatives of tokens in recorded answers: kept where the client asked for them, bounded, and without effect on what it gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.dialects import DIALECTS
from gateway.dialects import answer as answers
from gateway.dialects.answer import EngineAnswer

GOLDEN = Path(__file__).parent.parent / "fixtures/gateway"


def golden(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{name}.json").read_text())


def read(given: dict[str, Any], body: bytes) -> EngineAnswer:
    """Return the answer that is recorded of vLLM's."""
    dialect = DIALECTS[given["path"]]
    request = dialect.parse(json.dumps(given["request"]).encode())
    if not given["request"].get("stream"):
        return dialect.read(body, request)[0]
    reader = dialect.stream(request)
    reader.feed(body)
    return reader.answer


def recorded(answer: EngineAnswer) -> list[Any]:
    """Return the logprobs of each choice in the recorded response."""
    response = answer.response_json()
    assert response
    return [choice.get("logprobs") for choice in json.loads(response)["choices"]]


def expected(given: dict[str, Any]) -> list[Any]:
    """Return what is to be recorded of vLLM's whole answer: tokens and logprobs, of the sampled ones and of those in their place."""
    choices = json.loads(given["plugged"]["body"])["choices"]

    def of(token: dict[str, Any]) -> dict[str, Any]:
        return {name: token[name] for name in ("token", "logprob")}

    return [
        {
            "content": [
                {**of(token), "top_logprobs": [of(other) for other in token["top_logprobs"]]} for token in choice["logprobs"]["content"]
            ]
        }
        for choice in choices
    ]


@pytest.mark.parametrize("name", ["chat-two", "chat-two-stream"])
def test_chat_answer_to_request_of_top_logprobs_is_recorded_with_them(name: str) -> None:
    given = golden(name)
    assert recorded(read(given, given["plugged"]["body"].encode())) == expected(golden("chat-two"))


def test_chat_answer_to_request_of_logprobs_alone_is_recorded_without() -> None:
    given = golden("chat-two")
    del given["request"]["top_logprobs"]
    assert recorded(read(given, given["plugged"]["body"].encode())) == [None, None]


@pytest.mark.parametrize("name", ["completions-tokens", "completions-tokens-stream"])
def test_completion_to_request_of_logprobs_is_recorded_with_alternatives(name: str) -> None:
    """The form is that of a chat. The stream's logprobs are of another run of the engine: equal but for rounding."""
    given = golden(name)
    kept = [token for logprobs in recorded(read(given, given["plugged"]["body"].encode())) for token in logprobs["content"]]
    choices = [choice["logprobs"] for choice in json.loads(golden("completions-tokens")["plugged"]["body"])["choices"]]
    assert [token["token"] for token in kept] == [token for logprobs in choices for token in logprobs["tokens"]]
    sampled = [logprob for logprobs in choices for logprob in logprobs["token_logprobs"]]
    assert [token["logprob"] for token in kept] == pytest.approx(sampled, abs=1e-4)
    likeliest = [top for logprobs in choices for top in logprobs["top_logprobs"]]
    for token, top in zip(kept, likeliest, strict=True):
        assert {other["token"]: other["logprob"] for other in token["top_logprobs"]} == pytest.approx(top, abs=1e-4)


@pytest.mark.parametrize("logprobs", [0, None])
def test_completion_to_request_of_sampled_logprobs_is_recorded_without(logprobs: int | None) -> None:
    given = golden("completions-tokens")
    given["request"]["logprobs"] = logprobs
    assert recorded(read(given, given["plugged"]["body"].encode())) == [None, None]


def test_completion_that_echoes_its_prompt_is_recorded_without_alternatives() -> None:
    given = golden("completions-echo")
    assert recorded(read(given, given["plugged"]["body"].encode())) == [None]


@pytest.mark.parametrize("name", ["chat-two", "chat-two-stream"])
def test_alternatives_beyond_the_bound_are_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "ALTERNATIVES_MOST", 7)
    given = golden(name)
    answer = read(given, given["plugged"]["body"].encode())
    kept = [token for logprobs in recorded(answer) if logprobs for token in logprobs["content"]]
    assert len(kept) == 3, "two each"
    assert all(len(choice.token_ids) == len(choice.logprobs) > 3 for choice in answer.ordered())


@pytest.mark.parametrize("name", ["chat-two", "chat-two-stream", "completions-tokens", "completions-tokens-stream"])
def test_alternatives_of_another_form_are_no_failure_of_the_answer(name: str) -> None:
    given = golden(name)
    answer = read(given, given["plugged"]["body"].replace('"top_logprobs":[', '"top_logprobs":[null,').encode())
    assert recorded(answer) == [None, None]
    assert not answer.failed
    assert all(len(choice.token_ids) == len(choice.logprobs) > 0 for choice in answer.ordered())


def test_alternatives_after_a_chunk_without_are_left_out() -> None:
    """The alternatives that are kept belong to the first tokens."""
    given = golden("chat-two-stream")
    events = given["plugged"]["body"].encode().split(b"\n\n")
    fourth = [at for at, event in enumerate(events) if b'"top_logprobs":[{' in event][3]
    events[fourth] = events[fourth].replace(b'"top_logprobs":[', b'"top_logprobs":[null,')
    answer = read(given, b"\n\n".join(events))
    counts = [(len(choice.alternatives), len(choice.logprobs)) for choice in answer.ordered()]
    assert sorted(kept < tokens for kept, tokens in counts) == [False, True]
    whole = expected(golden("chat-two"))
    assert [logprobs["content"] for logprobs in recorded(answer)] == [
        choice["content"][: len(kept.alternatives)] for choice, kept in zip(whole, answer.ordered(), strict=True)
    ]
