"""Unmodified clients through the gateway to a real vLLM: the ids in `calls` are those that vLLM gives to the same messages."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from spangrad.processes import wait_until
from spangrad.settings import Settings
from spangrad.store.clickhouse import connect
from tests.support.processes import fetch

pytestmark = pytest.mark.vllm

CLIENTS = Path(__file__).resolve().parents[1] / "agents" / "clients"


@dataclass(frozen=True)
class Case:
    """A program, and where its client looks for the address."""

    program: str
    base_url: str = "OPENAI_BASE_URL"
    suffix: str = "/v1"
    environment: dict[str, str] = field(default_factory=dict)


CASES = {
    "openai": Case("openai_client.py"),
    "langchain": Case("langchain_client.py"),
    "agents-sdk": Case("agents_sdk.py"),
    "agents-sdk-chat": Case("agents_sdk.py", environment={"AGENTS_API": "chat_completions"}),
    "anthropic": Case("anthropic_client.py", "ANTHROPIC_BASE_URL", ""),
}


FACTS = (
    "PromptIds",
    "ResponseIds",
    "IdsSource",
    "Versions.Start",
    "Versions.Version",
    "TokenizerHash",
    "Temperature",
    "HttpStatus",
    "Aborted",
)


def run(case: Case, address: str, *arguments: str) -> list[str]:
    """The lines that the program prints. It learns the address, and any key, from its environment alone."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    keys = {"OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none", "OPENAI_AGENTS_DISABLE_TRACING": "1", "LANGSMITH_TRACING": "false"}
    environment = {**kept, **keys, case.base_url: address + case.suffix, **case.environment}
    command = [sys.executable, str(CLIENTS / case.program), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", CASES)
def test_gateway_clients_calls_have_ids_of_vllm(gateway: Settings, engine: Settings, name: str) -> None:
    rollout = f"clients-{name}"
    answers = run(CASES[name], f"{gateway.gateway.url}/rollout/{rollout}/attempt/0", "whole", "paris", "stream", "rome")

    direct = [
        fetch(
            f"{engine.gateway.engine_url}/v1/chat/completions",
            {"model": "policy", "messages": [{"role": "user", "content": f"say {city}"}], "temperature": 0, "max_tokens": 8},
        )
        for city in ("paris", "rome")
    ]
    assert answers == [answer["choices"][0]["message"]["content"] for answer in direct]

    client = connect(gateway.store)
    query = f"SELECT * FROM spangrad.calls WHERE RolloutKey = '{rollout}' ORDER BY Seq"
    wait_until(lambda: len(client.query(query).result_rows) >= 2, 60, "the calls' rows")
    rows = list(client.query(query).named_results())
    assert [tuple(row[name] for name in FACTS) for row in rows] == [expected(answer) for answer in direct]
    for row, answer in zip(rows, direct, strict=True):
        assert row["Logprobs"] == pytest.approx([token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]], abs=1e-5)


def expected(answer: dict[str, Any]) -> tuple[Any, ...]:
    """Return the values that `calls` must hold of an answer that vLLM gave directly."""
    extension = answer["spangrad"]
    ids = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    (((start, version),),) = extension["versions"]
    return (*ids, "engine", [start], [version], extension["tokenizer_hash"], 0.0, 200, False)
