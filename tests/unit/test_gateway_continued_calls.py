"""Calls that the gateway keeps for the next of their conversation: whose they are, and how many."""

from __future__ import annotations

import msgspec

from gateway.dialects import DIALECTS
from gateway.dialects.answer import Choice, EngineAnswer, EngineFacts
from gateway.proxy.context import CallContext
from gateway.proxy.continued_calls import ContinuedCalls
from gateway.recorder.record import CallFacts
from gateway.vllm_plugin.continuation import REQUEST_FIELD, Continued, Rendered
from gateway.vllm_plugin.request_fields import CHAT_PATH
from spangrad.encoding.otlp import SpanIds
from spangrad.http.announcements import AttemptKey
from spangrad.semconv import CONTINUES_HEADER

ATTEMPT = AttemptKey("rollout", 0)
RENDERED = Rendered(2, "d", 1, "e")


def call(response_id: str, *, rendered: bool = True, choices: int = 1) -> CallFacts:
    engine = EngineFacts("policy", "hash", rendered=(2, "d", 1, "e") if rendered else None)
    answer = EngineAnswer(id=response_id, prompts=[[1, 2]], choices={at: Choice([3 + at]) for at in range(choices)}, engine=engine)
    context = CallContext(ATTEMPT, None, None, SpanIds(bytes(16), bytes(8)))
    return CallFacts(context, DIALECTS[CHAT_PATH].parse(b"{}"), 0, 0, answer=answer)


def continued(continued_calls: ContinuedCalls, response_id: str, attempt: AttemptKey | None = ATTEMPT) -> Continued | None:
    fields = continued_calls.fields({CONTINUES_HEADER: response_id}, attempt)
    return Continued.of_field(msgspec.json.decode(msgspec.json.encode(fields))[REQUEST_FIELD])


def test_call_is_continued_by_its_prompt_and_its_reply() -> None:
    continued_calls = ContinuedCalls()
    continued_calls.keep(call("first"))
    assert continued(continued_calls, "first") == Continued([1, 2, 3], RENDERED)


def test_call_of_another_attempt_or_unknown_or_without_one_choice_is_rendered_anew() -> None:
    continued_calls = ContinuedCalls()
    continued_calls.keep(call("first"))
    continued_calls.keep(call("plain", rendered=False))
    continued_calls.keep(call("two", choices=2))
    others = [("first", AttemptKey("rollout", 1)), ("first", None), ("new", ATTEMPT), ("plain", ATTEMPT), ("two", ATTEMPT)]
    assert [continued(continued_calls, *other).ids for other in others] == [[]] * len(others)


def test_request_without_the_header_gets_no_field() -> None:
    assert ContinuedCalls().fields({}, ATTEMPT) == {}


def test_calls_that_ended_first_are_forgotten_first() -> None:
    continued_calls = ContinuedCalls(kept_bytes=140)
    for name in ("first", "second", "third"):
        continued_calls.keep(call(name))
    assert [bool(continued(continued_calls, name).ids) for name in ("first", "second", "third")] == [False, True, True]


def test_call_kept_again_under_one_id_replaces_the_one_before() -> None:
    continued_calls = ContinuedCalls(kept_bytes=140)
    for _ in range(5):
        continued_calls.keep(call("same"))
    assert continued(continued_calls, "same") == Continued([1, 2, 3], RENDERED)
    continued_calls.keep(call("other"))
    assert [bool(continued(continued_calls, name).ids) for name in ("same", "other")] == [True, True]
