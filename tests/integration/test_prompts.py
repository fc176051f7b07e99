"""A search for a prompt, whole: real store, gateway, queue, runner and builder; the models are scripted."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gateway.server import running as running_gateway
from runner.queue.server import running as running_queue
from spangrad.agent.prompt_store import Edit, PromptStore, PromptText
from spangrad.processes import free_ports, wait_until
from spangrad.settings import BuilderSettings, Settings, StoreSettings
from spangrad.settings.sources import load_settings
from spangrad.store.clickhouse import connect
from spangrad.types import Mode
from tests.support.fake_engine import FakeEngine
from tests.support.otlp import HttpServer
from tests.support.policies import trainer_settings
from tests.support.runners import queue_settings
from trainer.data.source import GroupReader
from transition_builder.loop import build_once

PHRASE = "Name the country, too."
FIRST = "Say where the city lies."
COUNTRIES = {"rome": "italy", "lima": "peru", "oslo": "norway", "bern": "switzerland", "riga": "latvia", "cairo": "egypt"}
AGENT = """
    import json, urllib.request
    import spangrad
    from opentelemetry import trace

    def call(endpoint, system, user):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        request = urllib.request.Request(endpoint + "/chat/completions", body, {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]

    def ask(given, endpoint):
        with trace.get_tracer("agent").start_as_current_span("ask"):
            first = call(endpoint, spangrad.prompt("places"), given["city"])
            return call(endpoint, spangrad.prompt("places"), first)

    def score(given, output):
        return float(given["country"] in output)
"""


class Engine(FakeEngine):
    """Knows countries, and names them when its prompt says so."""

    def whole(self, asked: dict[str, Any]) -> dict[str, Any]:
        system, user = (asked["messages"][0]["content"], asked["messages"][-1]["content"])
        answer = super().whole(asked)
        reply = f"{user}, {COUNTRIES[user.split(',')[0]]}" if PHRASE in system and user.split(",")[0] in COUNTRIES else user
        for choice in answer["choices"]:
            choice["message"] = {**choice["message"], "content": reply}
        return answer


class CriticModel(HttpServer):
    """Finds the cause at once; its second edit heeds it, the others say something else."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.edits = 0
        super().__init__()

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        system, user = (message["content"] for message in json.loads(body)["messages"])
        if "Find out" in system:
            self.asked.append(user)
            reply = "Runs that name no country score 0."
        else:
            self.edits += 1
            reply = {2: f"Surely:\n<prompt>\n{FIRST} {PHRASE}\n</prompt>", 3: "no prompt"}.get(
                self.edits, f"<prompt>{FIRST} Be polite ({self.edits}).</prompt>"
            )
        whole = {"id": "c", "object": "chat.completion", "created": 0, "model": "critic", "usage": {}}
        message = {"role": "assistant", "content": reply}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        return 200, {"content-type": "application/json"}, json.dumps({**whole, "choices": choices}).encode()


def flags_of(store: StoreSettings, directory: Path, engine: FakeEngine, critic: CriticModel) -> dict[str, Any]:
    (port,) = free_ports(1)
    queue = queue_settings(f"sqlite:///{directory}/queue.db")
    return {
        "store.url": store.url,
        "store.otlp_endpoint": store.otlp_endpoint,
        "gateway.port": port,
        "gateway.url": f"http://127.0.0.1:{port}",
        "gateway.engine_url": f"http://127.0.0.1:{engine.port}",
        "gateway.backends": [{"url": critic.url, "policy": "critic", "kind": "openai"}],
        "gateway.spill_path": str(directory / "spill"),
        "queue.port": queue.queue.port,
        "queue.url": queue.queue.url,
        "queue.db": queue.queue.db.get_secret_value(),
        "runner.directory": str(directory / "runner"),
        "prompts.model": "critic",
        "prompts.branch": 3,
        "prompts.minibatch": 4,
        "prompts.beam_width": 2,
    }


async def spangrad(directory: Path, flags: dict[str, Any], *words: str) -> str:
    """Run a command, which must succeed, and return its output."""
    sets = [word for key, value in flags.items() for word in ("--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}")]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SPANGRAD_")}
    quiet = {"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "langchain,openai,httpx,httpx2", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "spangrad", *words[:3], *sets, *words[3:], cwd=directory, env=environment | quiet,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode() + out.decode()
    return out.decode()


def test_prompt_search_publishes_best_prompt_and_trains_nothing(store: StoreSettings, tmp_path: Path) -> None:
    (tmp_path / "geography.py").write_text(textwrap.dedent(AGENT))
    cities = list(COUNTRIES)
    for name, count in (("learn", 4), ("measure", 6)):
        rows = [{"task_id": f"{name}-{city}", "input": {"city": city, "country": COUNTRIES[city]}} for city in cities[:count]]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    engine = Engine()
    with CriticModel() as critic:
        flags = flags_of(store, tmp_path, engine, critic)
        settings = load_settings(flags, env={})
        now, edits = asyncio.run(search_twice(flags, settings, tmp_path, engine, critic))
    result = json.loads((tmp_path / "found" / "result.json").read_text())
    assert (now.version, now.text) == (result["best"], f"{FIRST} {PHRASE}")
    assert (result["start"], result["gain"], result["p"], result["published"]) == (1, 1.0, 1 / 64, True)
    assert [(entry["round"], entry["best_score"]) for entry in result["rounds"]] == [(0, 0.0), (1, 1.0), (2, 1.0)]
    assert {candidate["version"]: candidate["score"] for candidate in result["candidates"]} == {
        candidate["version"]: float(PHRASE in candidate["text"]) for candidate in result["candidates"]
    }
    # Three edits of the one prompt of round 1, three of each of the two of round 2.
    assert Counter(edit.round for edit in edits) == {1: 3, 2: 6}
    assert {edit.critique for edit in edits} == {"Runs that name no country score 0."}
    first_round = critic.asked[:3]
    assert all(
        FIRST in question and "<run score=0>" in question and "system: [the prompt]" in question and "reply: " in question
        for question in first_round
    )
    assert (tmp_path / "found" / "curve.png").stat().st_size > 5_000
    check_store(settings, result, len(engine.requests))


async def search_twice(
    flags: dict[str, Any], settings: Settings, directory: Path, engine: Engine, critic: CriticModel
) -> tuple[PromptText, list[Edit]]:
    """Run a search twice, the second time from stored results alone; return the published prompt, and the edits that were made."""
    prompts = PromptStore(str(settings.queue.url))
    async with engine.running(), running_gateway(settings), running_queue(settings):
        await asyncio.to_thread(prompts.put, "places", FIRST)
        agent = ("--agent", "geography:ask", "--evaluator", "geography:score", "--rounds", "2", "--out", "found")
        words = ("prompt", "optimise", "places", "--tasks", "learn.jsonl", "--held-out", "measure.jsonl", *agent)
        printed = await spangrad(directory, flags, *words)
        asked = len(critic.asked), critic.edits, len(engine.requests)
        # The same question again: everything is read back, and nobody is asked anything.
        await asyncio.to_thread(prompts.put, "places", FIRST)
        again = await spangrad(directory, flags, *words)
        assert (len(critic.asked), critic.edits, len(engine.requests)) == asked
        now = await asyncio.to_thread(prompts.get, "places")
        assert printed.splitlines()[-1] == again.splitlines()[-1] == f"published places@{now.version}"
        return now, await asyncio.to_thread(prompts.edits, "places")


def check_store(settings: Settings, result: dict[str, Any], calls: int) -> None:
    """Check that the spans of each rollout carry one prompt version, and that no batch can be made of them."""
    run = f"prompt-places-{result['search']}"
    client = connect(settings.store)

    def rows(query: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in client.query(query, parameters={"run": run}).result_rows]

    # The gateway sends its spans behind the answers.
    wait_until(
        lambda: rows("SELECT count() FROM spangrad.calls WHERE RunId = {run:String} AND Policy = 'policy'") == [(calls,)], 20, "the calls"
    )
    version, name = "Attributes['spangrad.prompt.version']", "Attributes['spangrad.prompt.name']"
    spans = rows(
        f"SELECT ServiceName = 'geography', {name}, uniqExact(RolloutId, {version}), uniqExact(RolloutId), countIf({version} = '') "
        "FROM spangrad.rollout_spans WHERE RunId = {run:String} AND RowKind = 'span' AND SpanName IN ('rollout', 'ask') "
        "GROUP BY ALL ORDER BY ALL"
    )
    # Each candidate on the held-out tasks, and two prompts on those to learn from: what the first one did with them is read again.
    rollouts = len(result["candidates"]) * 6 + 2 * 4
    assert spans == [(False, "places", rollouts, rollouts, 0), (True, "places", rollouts, rollouts, 0)]
    # Both calls of an attempt had the prompt that its spans name.
    assert (
        rows(
            "SELECT uniqExact(JSONExtractString(SpanAttributes['spangrad.request.json'], 'messages', 1, 'content')) AS prompts, count() "
            "FROM otel.otel_traces WHERE SpanAttributes['spangrad.run.id'] = {run:String} "
            "AND SpanAttributes['gen_ai.request.model'] = 'policy' "
            "GROUP BY SpanAttributes['spangrad.rollout.id'] HAVING prompts != 1 OR count() != 2"
        )
        == []
    )
    assert rows("SELECT DISTINCT Mode FROM spangrad.calls WHERE RunId = {run:String}") == [("trial",)]
    # They are built like any rollout, with token ids and rewards: only their mode keeps them out of batches.
    builder = BuilderSettings(quiet_seconds=0.1, incomplete_after_seconds=0.1)
    modes = (Mode.TRAIN, Mode.PRODUCTION)
    everything = settings.model_copy(update={"builder": builder, "trainer": trainer_settings(run_id=run, modes=modes)})
    build_once(everything)
    assert rows("SELECT Mode, uniqExact(RolloutId) FROM spangrad.transitions WHERE RunId = {run:String} GROUP BY Mode") == [
        ("trial", rollouts)
    ]
    source = GroupReader(client, everything)
    assert {state.group.mode for state in source.states() if state.whole} == {"trial"}
    assert source.ready() == []
    with pytest.raises(ValueError, match="never trained"):
        trainer_settings(run_id=run, modes=("trial",))
