"""Every dialect through the gateway to a real vLLM, beside a vLLM that knows nothing of us: what clients see, what is recorded."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spangrad.processes import wait_until
from spangrad.settings import Settings
from spangrad.store.clickhouse import connect
from tests.support.dialects import comparable
from tests.support.processes import VLLM_PYTHON, engine_settings, running_bare_vllm

pytestmark = pytest.mark.vllm

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
TALK = [{"role": "user", "content": "say rome"}]
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"model": "policy", "messages": TALK, "temperature": 0, "max_tokens": 8},
    COMPLETIONS: {"model": "policy", "prompt": "say rome", "temperature": 0, "max_tokens": 8, "ignore_eos": True},
    RESPONSES: {"model": "policy", "input": "say rome", "temperature": 0, "max_output_tokens": 8},
    MESSAGES: {"model": "policy", "messages": TALK, "temperature": 0, "max_tokens": 8},
}
DRAWN = {"temperature": 1, "top_k": 1, "n": 2}
"""Greedy, with several choices."""

ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {}),
    "chat-logprobs": (CHAT, {"logprobs": True, "top_logprobs": 2}),
    "chat-ids": (CHAT, {"return_token_ids": True}),
    "chat-two": (CHAT, DRAWN),
    "chat-stop": (CHAT, {"stop": ["lima"]}),
    "completions": (COMPLETIONS, {}),
    "completions-many": (COMPLETIONS, {**DRAWN, "prompt": ["say rome", "say", "weather lima say"]}),
    "completions-tokens": (COMPLETIONS, {"prompt": [[7, 12], [7]], "logprobs": 2}),
    "completions-ids": (COMPLETIONS, {"return_token_ids": True}),
    "completions-echo": (COMPLETIONS, {"echo": True, "logprobs": 1}),
    "responses": (RESPONSES, {}),
    "responses-talk": (RESPONSES, {"instructions": "say", "input": TALK}),
    "responses-cut": (RESPONSES, {"max_output_tokens": 1}),
    "responses-logprobs": (RESPONSES, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    "responses-messages": (RESPONSES, {"enable_response_messages": True}),
    "messages": (MESSAGES, {}),
    "messages-system": (MESSAGES, {"system": [{"type": "text", "text": "say"}], "top_p": 0.9}),
    "messages-cut": (MESSAGES, {"max_tokens": 1}),
    "messages-stop": (MESSAGES, {"stop_sequences": ["lima"]}),
    "messages-turns": (MESSAGES, {"messages": [*TALK, {"role": "assistant", "content": [{"type": "text", "text": "clock rome"}]}, *TALK]}),
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "completions-cold": (COMPLETIONS, {"temperature": -1}),
    "completions-long": (COMPLETIONS, {"max_tokens": 4096}),
    "responses-nobody": (RESPONSES, {"model": "nobody"}),
    "responses-empty": (RESPONSES, {"input": None}),
    "messages-nobody": (MESSAGES, {"model": "nobody"}),
    "messages-endless": (MESSAGES, {"max_tokens": 0}),
    "messages-empty": (MESSAGES, {"messages": None}),
}


@pytest.fixture(scope="module")
def bare(tiny_model: Path, vllm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a vLLM without our plugin."""
    if not VLLM_PYTHON.exists():
        pytest.skip(f"vLLM's environment {VLLM_PYTHON} is not there")
    directory = tmp_path_factory.mktemp("bare")
    settings = engine_settings(tiny_model, vllm_cache)
    with running_bare_vllm(settings, directory / "bare.log"):
        yield settings.gateway.engine_url


@pytest.fixture(scope="module")
def rows(gateway: Settings) -> Callable[[str, int], list[dict[str, Any]]]:
    client = connect(gateway.store)

    def of_rollout(rollout: str, expected: int) -> list[dict[str, Any]]:
        query = f"SELECT * FROM spangrad.calls WHERE RolloutKey = '{rollout}' ORDER BY Seq, ChoiceIndex"
        calls: list[dict[str, Any]] = []

        def arrived() -> bool:
            calls[:] = client.query(query).named_results()
            return len(calls) >= expected

        wait_until(arrived, 60, "the calls' rows", poll_seconds=0.2)
        return calls

    return of_rollout


def ask(url: str, body: object | None = None) -> tuple[int, str, bytes]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=60) as answer:
            return answer.status, answer.headers["content-type"], answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["content-type"], error.read()


def engine_ids(bare: str, path: str, asked: dict[str, Any]) -> tuple[list[list[int]], list[list[int]]]:
    """Return vLLM's own token ids of the prompt and of the answer of each choice, asked for in a dialect that has them."""
    if path == RESPONSES:
        answer = json.loads(ask(bare + path, {**asked, "enable_response_messages": True})[2])
        return [answer["input_messages"][0]["tokens"]], [answer["output_messages"][0]["tokens"]]
    if path == MESSAGES:
        system = [{"role": "system", "content": part["text"]} for part in asked.pop("system", [])]
        texts = [one["content"] if isinstance(one["content"], str) else one["content"][0]["text"] for one in asked["messages"]]
        flat = [{**one, "content": text} for one, text in zip(asked["messages"], texts, strict=True)]
        asked = {**asked, "messages": [*system, *flat], "stop": asked.pop("stop_sequences", [])}
        path = CHAT
    answer = json.loads(ask(bare + path, {**asked, "echo": False, "return_token_ids": True})[2])
    choices = answer["choices"]
    return [one.get("prompt_token_ids") or answer["prompt_token_ids"] for one in choices], [one["token_ids"] for one in choices]


@pytest.mark.parametrize("name", ASKED)
def test_gateway_dialect_answers_as_vllm_and_records_ids(
    name: str, bare: str, gateway: Settings, rows: Callable[[str, int], list[Any]]
) -> None:
    path, more = ASKED[name]
    asked = {**BASE[path], **more}
    prefix = f"{gateway.gateway.url}/rollout/dialect-{name}/attempt/1"
    for body in (asked, {**asked, "stream": True}):
        status, kind, own = ask(bare + path, body)
        seen = ask(prefix + path, body)
        assert (seen[0], seen[1], comparable(seen[2])) == (status, kind, comparable(own))
        assert status == 200
    prompts, responses = engine_ids(bare, path, dict(asked))
    choices = len(responses)
    calls = rows(f"dialect-{name}", 2 * choices)
    assert [row["ChoiceIndex"] for row in calls] == [*range(choices)] * 2
    for row in calls:
        expected = ([], []) if name == "completions-echo" else (prompts[row["ChoiceIndex"]], responses[row["ChoiceIndex"]])
        assert (row["PromptIds"], row["ResponseIds"]) == expected
        assert len(row["Logprobs"]) == len(row["ResponseIds"])
        assert row["IdsSource"] == ("none" if name == "completions-echo" else "engine")
        assert (row["Attempt"], row["Model"], row["Policy"], row["ErrorType"], row["Aborted"]) == (1, "policy", "policy", "", False)
        assert (row["Versions.Start"], len(row["Versions.Version"])) == ([0], 1)
        assert row["FinishReason"] in ("stop", "length")


@pytest.mark.parametrize("name", REFUSED)
def test_gateway_dialect_refusals_are_those_of_vllm(name: str, bare: str, gateway: Settings, rows: Callable[[str, int], list[Any]]) -> None:
    path, more = REFUSED[name]
    asked = {**BASE[path], **more}
    status, kind, own = ask(bare + path, asked)
    seen = ask(f"{gateway.gateway.url}/rollout/refused-{name}/attempt/0{path}", asked)
    assert (seen[0], seen[1], comparable(seen[2])) == (status, kind, comparable(own))
    assert status >= 400
    (row,) = rows(f"refused-{name}", 1)
    assert (row["HttpStatus"], row["ErrorType"], row["IdsSource"]) == (status, str(status), "none")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"model": "policy", "input": "say rome"}),
        ("/v1/messages/count_tokens", {"model": "policy", "messages": TALK}),
        ("/v1/responses/resp_nobody", None),
        ("/v1/completions/render", {"model": "policy", "prompt": "say rome"}),
    ],
)
def test_gateway_unknown_route_answers_as_vllm(path: str, body: object, bare: str, gateway: Settings) -> None:
    status, kind, own = ask(bare + path, body)
    for prefix in ("", "/rollout/passed/attempt/0"):
        seen = ask(gateway.gateway.url + prefix + path, body)
        assert (seen[0], seen[1], comparable(seen[2])) == (status, kind, comparable(own))
