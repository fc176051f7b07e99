"""Prompts at the queue's server, and how agents get them: versions, what is published, what an attempt is pinned to."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import context

import spangrad
from runner.queue.prompts import rows as prompt_rows
from runner.queue.tables import METADATA
from runner.runner import Runner
from runner.workers.agents import CallableAgent, CommandAgent
from spangrad import semconv
from spangrad.agent import prompt_client
from spangrad.agent.prompt_store import Edit, PromptStore
from spangrad.agent.propagation import carrier_of, with_baggage
from spangrad.database import Database
from spangrad.errors import PromptError
from spangrad.http.tokens import agent_token
from spangrad.settings import GatewaySettings, PromptSettings, RunnerSettings, Settings, StoreSettings
from spangrad.types import Mode, PromptVersion, Task
from tests.support.otlp import OtlpSink
from tests.support.runners import AttemptGateway, queue_settings, serving


def facts(prompt: Any) -> tuple[object, ...]:
    return prompt.version, prompt.text, prompt.published


async def test_prompt_store_versions_are_kept_and_published(queue_db: str) -> None:
    chosen = queue_settings(queue_db)
    store = PromptStore(str(chosen.queue.url), retry_seconds=0)

    def use() -> None:
        with pytest.raises(PromptError, match=r"no prompt greeting is published\. `spangrad prompt list`"):
            store.get("greeting")
        assert facts(store.put("greeting", "one")) == (1, "one", True)
        assert facts(store.put("greeting", "two \u00e9", publish=False)) == (2, "two \u00e9", False)
        assert facts(store.put("other", "two \u00e9", publish=False)) == (1, "two \u00e9", False)
        assert facts(store.get("greeting")) == (1, "one", True)
        assert facts(store.put("greeting", "two \u00e9")) == (2, "two \u00e9", True)
        assert facts(store.put("greeting", "one")) == (1, "one", True)
        assert [facts(prompt) for prompt in store.versions("greeting")] == [(1, "one", True), (2, "two \u00e9", False)]
        assert [(prompt.name, *facts(prompt)) for prompt in store.newest()] == [
            ("greeting", 1, "one", True),
            ("other", 1, "two \u00e9", False),
        ]
        first = Edit("s", 1, 1, 0, "too short", None)
        assert store.edit("greeting", "three", first) == 3
        assert store.edit("greeting", "four", first) == 3, "what was written first holds"
        assert store.edit("greeting", None, Edit("s", 1, 1, 1, "the same", None)) is None
        assert [(edit.number, edit.critique, edit.version) for edit in store.edits("greeting", "s")] == [
            (0, "too short", 3),
            (1, "the same", None),
        ]
        assert store.edits("greeting", "t") == []
        assert facts(store.get("greeting")) == (1, "one", True)
        for name, text, problem in (("a b", "x", "matching regex"), ("a", "", "length"), ("a", "x\x00", "matching regex")):
            with pytest.raises(PromptError, match=problem):
                store.put(name, text)
        with pytest.raises(PromptError, match="no prompt greeting has version 9"):
            store.get("greeting", 9)

    async with serving(chosen):
        await asyncio.to_thread(use)
    async with serving(chosen):
        assert facts(await asyncio.to_thread(store.get, "greeting")) == (1, "one", True)
    with pytest.raises(PromptError, match=r"the queue at .* does not answer"):
        store.get("greeting")


async def test_prompt_route_with_baggage_pins_version(tmp_path: Path) -> None:
    chosen = queue_settings(f"sqlite:///{tmp_path}/queue.db", queue__token="secret")
    store = PromptStore(str(chosen.queue.url), "secret")
    async with serving(chosen), aiohttp.ClientSession(str(chosen.queue.url)) as anybody:
        await asyncio.to_thread(store.put, "greeting", "one", publish=False)
        await asyncio.to_thread(store.put, "greeting", "two")
        token = {"Authorization": "Bearer secret"}
        pinned = {
            **token,
            "baggage": carrier_of(with_baggage(context.Context(), {semconv.PROMPT_NAME: "greeting", semconv.PROMPT_VERSION: "1"}))[
                "baggage"
            ],
        }
        for headers, query, expected in (
            (token, "", (200, "two", "2")),
            (pinned, "", (200, "one", "1")),
            (pinned, "?version=2", (200, "two", "2")),
            ({**token, "baggage": ";;=,"}, "", (200, "two", "2")),
            (token, "?version=x", (400, '{"error":"GET /v1/prompts/greeting/text: version=\'x\' is no whole number."}', None)),
            ({}, "", (401, '{"error":"this queue asks for its token: send `Authorization: Bearer` with queue.token."}', None)),
        ):
            async with anybody.get(f"/v1/prompts/greeting/text{query}", headers=headers) as answer:
                assert (answer.status, await answer.text(), answer.headers.get("Spangrad-Prompt-Version")) == expected


async def test_agents_token_reads_prompts_and_nothing_else(queue_db: str) -> None:
    chosen = queue_settings(queue_db, queue__token="secret")
    agents = agent_token("secret")
    async with serving(chosen), aiohttp.ClientSession(str(chosen.queue.url), headers={"Authorization": f"Bearer {agents}"}) as agent:
        kept = await asyncio.to_thread(PromptStore(str(chosen.queue.url), "secret").put, "greeting", "one")
        assert await asyncio.to_thread(PromptStore(str(chosen.queue.url), agents).get, "greeting") == kept
        statuses: dict[tuple[str, str], int] = {}
        for method, path in (
            ("GET", "/v1/prompts/greeting/text"),
            ("PUT", "/v1/prompts/greeting"),
            ("GET", "/v1/prompts/greeting/edits"),
            ("GET", "/v1/rollouts"),
            ("POST", "/v1/leases"),
            ("GET", "/v1/nothing"),
        ):
            async with agent.request(method, path) as answer:
                statuses[method, path] = answer.status
        assert list(statuses.values()) == [200, 401, 401, 401, 401, 401], statuses


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["x", "y", "z"]), st.booleans()), max_size=12))
def test_prompt_versions_are_dense_and_unique_by_text(puts: list[tuple[str, str, bool]]) -> None:
    from spangrad.database import Owner, database_url

    owner = Owner("the test's database", "none", PromptError, "nothing is lost.", lock=1, beginning="None.")
    database = Database(database_url("sqlite://", owner), METADATA, owner)
    texts: dict[str, list[str]] = {"a": [], "b": []}
    heads: dict[str, str] = {}
    for name, text, publish in puts:
        with database.transaction() as transaction:
            kept = prompt_rows.put(transaction, name, prompt_rows.Put(text=text, publish=publish))
        assert kept.new == (text not in texts[name])
        texts[name] += [text] if kept.new else []
        heads |= {name: text} if publish else {}
        assert kept.version == texts[name].index(text) + 1
    with database.reading() as connection:
        for name in "ab":
            stored = prompt_rows.versions(connection, name).prompts
            assert [(prompt.version, prompt.text) for prompt in stored] == list(enumerate(texts[name], 1))
            published = prompt_rows.get(connection, name, None)
            assert (published.text if published else None) == heads.get(name)
    database.close()


async def test_prompt_within_attempt_has_one_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = queue_settings(f"sqlite:///{tmp_path}/queue.db")
    store = PromptStore(str(chosen.queue.url))
    monkeypatch.setenv(prompt_client.URL, str(chosen.queue.url))

    def within(**entries: str) -> spangrad.Prompt:
        names = {
            "rollout": semconv.ROLLOUT_ID,
            "attempt": semconv.ROLLOUT_ATTEMPT,
            "name": semconv.PROMPT_NAME,
            "version": semconv.PROMPT_VERSION,
        }
        token = context.attach(with_baggage(context.Context(), {names[key]: value for key, value in entries.items()}))
        try:
            return spangrad.prompt("greeting")
        finally:
            context.detach(token)

    def use() -> None:
        store.put("greeting", "one")
        assert (within(rollout="r", attempt="0"), within().version) == ("one", 1)
        store.put("greeting", "two")
        asked = [within(rollout="r", attempt="0"), within(rollout="r", attempt="1"), within()]
        assert [(str(prompt), prompt.name, prompt.version) for prompt in asked] == [
            ("one", "greeting", 1), ("two", "greeting", 2), ("two", "greeting", 2)
        ]  # fmt: skip
        assert within(rollout="r", attempt="1", name="greeting", version="1") == "one"
        assert within(rollout="r", attempt="2", name="other", version="1") == "two"
        assert spangrad.prompt("greeting", 1) == "one"

    async with serving(chosen):
        await asyncio.to_thread(use)


async def test_prompt_too_long_for_variable_of_program_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = queue_settings(f"sqlite:///{tmp_path}/queue.db")
    store = PromptStore(str(chosen.queue.url))
    environ = {prompt_client.NAME: "long", prompt_client.VARIABLE: "SYSTEM_PROMPT"}
    for name, value in {prompt_client.URL: str(chosen.queue.url), **environ}.items():
        monkeypatch.setenv(name, value)
    most = 32 * os.sysconf("SC_PAGE_SIZE") - len("SYSTEM_PROMPT=\0")

    def use() -> None:
        store.put("long", "x" * most)
        variables = prompt_client.program_variables(environ)
        assert subprocess.run(["true"], env=variables, check=False).returncode == 0
        store.put("long", "x" * (most - 1) + "\u00e9")
        with pytest.raises(PromptError, match=rf"^version 2 of the prompt long has {most + 1} bytes, and .* holds {most}\. Shorten"):
            prompt_client.program_variables(environ)

    async with serving(chosen):
        await asyncio.to_thread(use)


CALLABLE = """
    import spangrad
    from opentelemetry import trace

    def ask(given):
        with trace.get_tracer("agent").start_as_current_span("pinned"):
            first = spangrad.prompt("greeting")
        with trace.get_tracer("agent").start_as_current_span("fetched"):
            other = spangrad.prompt("other")
        return {"greeting": first.version, "other": other.version}
"""
PROGRAM = """
import os
print(int(os.environ["SPANGRAD_PROMPT_VERSION"]) + 10 * (os.environ["SYSTEM_PROMPT"] == "two,\\nof lines"))
"""


async def test_attempts_are_pinned_to_prompt_of_task_and_spans_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "langchain,openai,httpx,httpx2")
    (tmp_path / "mine.py").write_text(textwrap.dedent(CALLABLE))
    queue = queue_settings(f"sqlite:///{tmp_path}/queue.db")
    store = PromptStore(str(queue.queue.url))
    with OtlpSink() as sink, AttemptGateway() as gateway:
        chosen = Settings(
            store=StoreSettings(otlp_endpoint=sink.url),
            gateway=GatewaySettings(url=gateway.url),
            runner=RunnerSettings(run_id="run", directory=tmp_path / "runner"),
            queue=queue.queue,
            prompts=PromptSettings(pin="greeting", variable="SYSTEM_PROMPT"),
        )
        async with serving(queue):
            await asyncio.to_thread(store.put, "greeting", "one", publish=False)
            await asyncio.to_thread(store.put, "greeting", "two,\nof lines")
            await asyncio.to_thread(store.put, "other", "three")
            tasks = [Task("first", None, PromptVersion("greeting", 1)), Task("published", None)]
            async with Runner(chosen, CallableAgent("mine:ask", directory=tmp_path)) as runner:
                outcomes = await runner.run(tasks, mode=Mode.TRIAL, group_size=1)
            assert [outcome.reward for outcome in outcomes] == [{"greeting": 1.0, "other": 1.0}, {"greeting": 2.0, "other": 1.0}]
            program = CommandAgent((sys.executable, "-c", PROGRAM), directory=tmp_path)
            async with Runner(chosen, program) as runner:
                outcomes = await runner.run(tasks, mode=Mode.TRIAL, group_size=1)
            assert [(outcome.reward, outcome.detail) for outcome in outcomes] == [({"reward": 1.0}, ""), ({"reward": 12.0}, "")]
    named = sorted(
        (span.name, span.attributes[semconv.PROMPT_NAME], span.attributes[semconv.PROMPT_VERSION])
        for span in sink.spans
        if span.name in {"rollout", "pinned", "fetched"}
    )
    roots = [("rollout", "greeting", 1), ("rollout", "greeting", 2)]
    # The span in which another prompt was fetched names that one.
    assert named == sorted(
        [*roots, *roots, ("pinned", "greeting", 1), ("pinned", "greeting", 2), ("fetched", "other", 1), ("fetched", "other", 1)]
    )
    assert {span.attributes[semconv.ROLLOUT_MODE] for span in sink.named("rollout")} == {"trial"}
