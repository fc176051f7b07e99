"""One rollout made by hand, as the store knows it: two attempts, a tool, two calls, of which one has two choices."""

from __future__ import annotations

from typing import Any

from commands.inspection.rollout_record import Build, Call, Conclusion, Record, Reward, Span

MS = 1_000_000


def span(name: str, own: str, parent: str = "", **facts: Any) -> Span:
    known: dict[str, Any] = {
        "run": "run-1",
        "mode": "train",
        "attempt": 0,
        "names_rollout": True,
        "started": 0,
        "trace": "t0",
        "process": "agent",
        "seq": int(own, 16),
        "service": "agent",
        "scope": "",
        "duration": 5 * MS,
        "status": "Unset",
        "message": "",
        "attributes": {},
    }
    return Span(name=name, span=own, parent=parent, **{**known, **facts})


def root(own: str, *, final: bool, **facts: Any) -> Span:
    said = {
        "spangrad.task.id": "paris",
        "spangrad.group.id": "g7",
        "spangrad.group.size": "8",
        "spangrad.rollout.final": str(final).lower(),
    }
    attributes = said | facts.pop("attributes", {})
    return span("rollout", own, process="runner", service="spangrad-runner", attributes=attributes, **facts)


def call(of: str, **facts: Any) -> Call:
    known: dict[str, Any] = {
        "trace": "t1",
        "choice": 0,
        "policy": "policy",
        "versions": (3,),
        "prompt_tokens": 512,
        "response_tokens": 100,
        "finish_reason": "stop",
        "error": "",
        "http_status": 200,
        "aborted": False,
    }
    return Call(span=of, **{**known, **facts})


FAILED = root(
    "a0", final=False, trace="t0", duration=20 * MS, status="Error", message="exit code 1", attributes={"spangrad.rollout.failure": "crash"}
)
SECOND = {"trace": "t1", "attempt": 1}
KEPT = root("b0", final=True, status="Ok", duration=1500 * MS, **SECOND)
AGENT = span("agent", "b1", "b0", duration=1400 * MS, kind="agent", agent="researcher", **SECOND)
LLM = {"llm.token_count.prompt": "512", "llm.token_count.completion": "100"}
CLIENT = span("ChatCompletion", "b2", "b1", duration=700 * MS, status="Ok", kind="llm", attributes=LLM, **SECOND)
GATEWAY = {"kind": "gateway", "process": "gateway", "service": "spangrad-gateway", "scope": "spangrad.gateway", **SECOND}
FIRST_CALL = span("chat policy", "b3", "b2", duration=690 * MS, seq=7, **GATEWAY)
TOOL = span(
    "search",
    "b4",
    "b1",
    duration=40_000,
    status="Error",
    message="ValueError('no  such\npage')Traceback (most recent call last): ...",
    kind="tool",
    tool="search",
    **SECOND,
)
# Its clock is an hour slow, and it came first: neither matters.
SECOND_CLIENT = span("ChatCompletion", "b5", "b1", started=-3600 * 10**9, **SECOND, duration=300 * MS)
SECOND_CALL = span("chat policy", "b6", "b5", duration=200 * MS, seq=8, **GATEWAY)
ORPHAN = span("lost", "b7", "ffff", names_rollout=False, process="", service="other", **SECOND | {"attempt": 0})

WHOLE = Record(
    "rollout-1",
    [SECOND_CALL, SECOND_CLIENT, KEPT, AGENT, CLIENT, FIRST_CALL, TOOL, ORPHAN, FAILED, CLIENT, FIRST_CALL],
    [
        call("b3"),
        call("b3"),
        call("b6", prompt_tokens=700, response_tokens=30, versions=(3, 4), finish_reason="length"),
        call("b6", choice=1, prompt_tokens=700, response_tokens=20),
    ],
    [
        Reward("t1", "b0", "reward", "1", "event"),
        Reward("t1", "b4", "tool_error", "-0.1", "air"),
        Reward("t9", "c0", "style", "0.5", "log"),
        Reward("", "", "brevity", "0.2", "sql"),
    ],
    [
        Build(
            "0123456789abcdef",
            [
                Conclusion(0, "t0", "a1", 0, "researcher", "policy", reason="superseded_attempt", detail="attempt 1 counts"),
                Conclusion(
                    1, "t1", "b3", 0, "researcher", "policy", 3, 0, [("reward", 1.0, "evaluation_event", ""), ("tool", -0.1, "air", "")]
                ),
                *[Conclusion(1, "t1", "b6", choice, "", "policy", reason="mixed_versions", detail="versions 3, 4") for choice in (0, 1)],
            ],
        )
    ],
)
