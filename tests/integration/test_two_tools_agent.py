"""The example agent, unmodified, in a real agent host with all instrumentors, against a small OpenAI-compatible server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from runner.runner import Runner
from runner.workers.agents import CallableAgent
from spangrad import semconv
from spangrad.client.task_files import read_tasks
from spangrad.settings import GatewaySettings, RunnerSettings, Settings, StoreSettings
from spangrad.types import Mode, Task
from tests.support.otlp import OtlpSink, SunkSpan
from tests.support.runners import AttemptGateway

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_tools"
REPLIES = {
    "paris": ["weather paris"],
    "rome": ["weather rome", "weather rome", "clock paris"],
    "oslo": ["clock oslo", "clock lima", "clock"],
    "lima": ["weather lima", "say"],
}


def reply(messages: list[dict[str, str]]) -> str:
    return REPLIES[messages[0]["content"].split()[1]][len(messages) // 2]


async def test_two_tools_agent_spans_and_requests_are_linked(tmp_path: Path) -> None:
    with OtlpSink() as sink, AttemptGateway(reply=reply) as gateway:
        settings = Settings(
            store=StoreSettings(otlp_endpoint=sink.url),
            gateway=GatewaySettings(url=gateway.url),
            runner=RunnerSettings(run_id="run", directory=tmp_path),
        )
        async with Runner(settings, CallableAgent("agent:agent", evaluator="task:evaluate", directory=EXAMPLE)) as runner:
            outcomes = await runner.run([Task(city, {"city": city}) for city in REPLIES], mode=Mode.TRAIN, group_size=1)
        assert [(o.task_id, o.reward, o.calls) for o in outcomes] == [
            ("paris", {"reward": 1.0}, 1),
            ("rome", {"reward": 0.0}, 3),
            ("oslo", {"reward": 0.0}, 3),
            ("lima", {"reward": -1.0}, 2),
        ]
        sent = [chat["messages"] for chat in gateway.chats if chat["messages"][0]["content"] == "say lima"]
        assert sent[-1] == [
            {"role": "user", "content": "say lima"},
            {"role": "assistant", "content": "weather lima"},
            {"role": "tool", "content": "error", "tool_call_id": "call-1"},
        ]
        assert {(chat["model"], chat["max_completion_tokens"], chat["temperature"]) for chat in gateway.chats} == {("policy", 3, 1.0)}
        rome = next(o for o in outcomes if o.task_id == "rome").key.rollout_id
        spans = [span for span in sink.spans if span.attributes[semconv.ROLLOUT_ID] == rome]
        assert len({span.trace_id for span in spans}) == 1
        assert tree(spans) == {
            "rollout": 1,
            "rollout/run": 1,
            "rollout/evaluate": 1,
            "rollout/LangGraph": 1,
            "rollout/LangGraph/model": 3,
            "rollout/LangGraph/model/ChatOpenAI": 3,
            "rollout/LangGraph/model/ChatCompletion": 3,
            "rollout/LangGraph/model/ChatCompletion/POST": 3,
            "rollout/LangGraph/tools": 3,
            "rollout/LangGraph/tools/weather": 2,
            "rollout/LangGraph/tools/clock": 1,
        }
        assert sorted((span.name, span.status) for span in spans if span.attributes.get(semconv.OPENINFERENCE_KIND) == "TOOL") == [
            ("clock", "OK"),
            ("weather", "ERROR"),
            ("weather", "ERROR"),
        ]
        posts = {f"00-{span.trace_id}-{span.span_id}" for span in sink.named("POST")}
        assert {headers["traceparent"][:52] for headers in gateway.chat_headers} == posts
        assert "output.value" in next(span for span in spans if span.name == "ChatCompletion").attributes


def tree(spans: list[SunkSpan]) -> dict[str, int]:
    """Return the number of spans on each path of names from the root."""
    by_id = {span.span_id: span for span in spans}

    def path(span: SunkSpan) -> str:
        return f"{path(by_id[span.parent_id])}/{span.name}" if span.parent_id else span.name

    paths = [path(span) for span in spans]
    return {one: paths.count(one) for one in paths}


def test_two_tools_agent_source_does_not_mention_spangrad() -> None:
    assert "spangrad" not in (EXAMPLE / "agent.py").read_text()


def test_two_tools_tasks_have_one_right_tool_and_priced_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(EXAMPLE), *sys.path])
    import task

    cities = [one.input for one in read_tasks(EXAMPLE / "tasks.jsonl")]
    assert cities == [{"city": city} for city in ("paris", "rome", "oslo", "lima")]
    outcomes = {"right": 1.0, "wrong_city": 0.0, "gave_up": 0.0, "malformed": -1.0}
    assert {outcome: task.evaluate({"city": "paris"}, {"outcome": outcome}) for outcome in outcomes} == outcomes
