"""Ends of attempts at the gateway: calls in flight are cut at once, later ones are refused and not counted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from benchmarks.gateway_bodies import ANSWER_TOKENS
from gateway.dialects import DIALECTS
from gateway.followers.controller import Followers
from gateway.proxy.admin import Admin
from gateway.proxy.counts import Counts
from spangrad.http.announcements import AttemptKey, ClosedAttempt, ClosingRequest
from tests.support.gateways import (
    ASKED,
    END,
    EVENTS,
    PLAIN_EVENTS,
    STREAM_HEAD,
    Exchange,
    Stage,
    ask,
    ask_raw,
    between,
    chunk,
    following,
    of_the_first,
    recorded,
    staged,
)

FIRST, SECOND = "/rollout/r/attempt/0", "/rollout/r/attempt/1"
MESSAGE = "attempt 0 of rollout r has ended (cancelled). No more of its calls are answered."


@pytest.fixture
async def stage() -> AsyncGenerator[Stage]:
    async with staged() as stage:
        yield stage


async def close(stage: Stage) -> tuple[int, Any]:
    """Close the first attempt."""
    return await ask(stage, "POST", "/attempts/close", {"attempts": [{"rollout_id": "r", "attempt": 0, "reason": "cancelled"}]})


def error(body: bytes) -> tuple[str, str]:
    """Message and type of an error."""
    fields = json.loads(body)["error"]
    return fields["message"], fields["type"]


async def test_close_attempt_ends_calls_in_flight_and_refuses_later_calls(stage: Stage) -> None:
    await stage.announce(FIRST)
    stage.engine.go_on.clear()
    call = asyncio.create_task(stage.chat(FIRST))
    await stage.engine.arrived.wait()
    assert await close(stage) == (200, {"status": "closed"})
    status, body = await asyncio.wait_for(call, 30)
    await asyncio.wait_for(stage.engine.left.wait(), 30)
    assert (status, error(body)) == (410, (MESSAGE, "attempt_closed"))
    stage.engine.go_on.set()
    status, body = await stage.chat(FIRST)
    assert (status, error(body)) == (410, (MESSAGE, "attempt_closed"))
    (span,) = await stage.spans()
    assert (span.attributes["error.type"], span.attributes["http.response.status_code"]) == ("attempt_closed", 410)
    assert await stage.count(FIRST) == (1, False), "refused calls are not counted: they have no span"
    assert len(stage.engine.requests) == 1
    assert "spangrad_gateway_calls_refused_late_total 1.0" in await (await stage.client.get("/metrics")).text()


async def test_close_spares_other_attempts_of_the_rollout(stage: Stage) -> None:
    stage.engine.go_on.clear()
    calls = [asyncio.create_task(stage.chat(path)) for path in (SECOND, "")]
    await stage.engine.arrived.wait()
    await close(stage)
    stage.engine.go_on.set()
    assert [(await call)[0] for call in calls] == [200, 200]
    assert (await stage.chat(SECOND))[0] == 200


async def test_close_breaks_a_stream_that_has_begun(stage: Stage) -> None:
    stage.engine.go_on.clear()
    async with asyncio.timeout(30), stage.client.post(f"{FIRST}/v1/chat/completions", json={**ASKED, "stream": True}) as answer:
        await answer.content.readuntil(b"\n\n")
        await close(stage)
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
        await stage.engine.left.wait()


async def test_close_attempt_ends_requests_that_pass_through(stage: Stage) -> None:
    stage.engine.go_on.clear()
    passing = [asyncio.create_task(ask(stage, "POST", f"{path}/v1/embeddings", {})) for path in (FIRST, SECOND)]
    while len(stage.engine.bodies) < 2:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.01)
    await close(stage)
    for answer in (await asyncio.wait_for(passing[0], 30), await ask(stage, "POST", f"{FIRST}/v1/embeddings", {})):
        assert (answer[0], answer[1]["error"]["message"]) == (410, MESSAGE)
    stage.engine.go_on.set()
    assert (await passing[1])[0] == 418, "the other attempt goes on"


async def test_close_at_a_follower_waits_for_no_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Admin.close

    async def hang_at_controller(admin: Admin, request: ClosingRequest) -> web.Response:
        if isinstance(getattr(admin._close_elsewhere, "__self__", None), Followers):
            await asyncio.Event().wait()
        return await answer(admin, request)

    monkeypatch.setattr(Admin, "close", hang_at_controller)
    async with staged() as stage, following(stage) as follower:
        assert (await asyncio.wait_for(close(follower), 10))[0] == 200
        assert (await follower.chat(FIRST))[0] == 410


@pytest.mark.parametrize("at_follower", [False, True])
async def test_close_reaches_calls_at_all_gateways(stage: Stage, at_follower: bool) -> None:
    async with following(stage) as follower, following(stage) as other:
        stage.engine.go_on.clear()
        calls = [asyncio.create_task(gateway.chat(FIRST)) for gateway in (stage, follower, other)]
        while len(stage.engine.requests) < 3:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)
        await close(follower if at_follower else stage)
        assert [(await asyncio.wait_for(call, 30))[0] for call in calls] == [410, 410, 410]


async def test_close_attempt_unreadable_order_is_refused(stage: Stage) -> None:
    status, body = await ask(stage, "POST", "/attempts/close", {"attempts": [{"rollout_id": "r"}]})
    assert status == 400
    assert "JSON with a list `attempts`" in body["error"]["message"]


async def test_limit_closed_attempt_keeps_its_first_reason() -> None:
    counts = Counts()
    for reason in ("cancelled", "lost"):
        counts.close(ClosedAttempt(rollout_id="r", attempt=0, reason=reason))
    closed = counts.closed(AttemptKey("r", 0))
    assert closed is not None
    assert closed.reason == "cancelled"
    assert counts.closed(None) is None


async def test_token_budget_limits_each_call_to_the_rest_and_closes_attempt(stage: Stage) -> None:
    await stage.announce(FIRST, limits={"max_output_tokens": 4})
    assert [(await stage.chat(FIRST, **asked))[0] for asked in ({"max_tokens": 3}, {"max_tokens": 9}, {})] == [200, 200, 410]
    assert [request["max_tokens"] for request in stage.engine.requests] == [3, 1], "an answer has three tokens"
    (_, second) = await stage.spans(2)
    assert second.attributes["gen_ai.request.max_tokens"] == 1
    assert await stage.ends(FIRST) == "token_budget"
    assert await stage.count(FIRST) == (2, False)


async def test_token_budget_used_up_by_a_stream_lets_it_end_whole() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.send(STREAM_HEAD, *map(chunk, EVENTS))
        await asyncio.sleep(0.05)  # the engine's end of the stream comes by itself
        await exchange.send(END)

    async with between(answer) as (stage, _):
        await stage.announce(FIRST, limits={"max_output_tokens": ANSWER_TOKENS})
        assert await ask_raw(stage, stream=True) == (200, b"".join(PLAIN_EVENTS), True)
        (span,) = await stage.spans()
        assert recorded(span) == of_the_first(ANSWER_TOKENS)
        assert await stage.ends(FIRST) == "token_budget"


async def test_token_budget_sets_a_limit_where_a_request_has_none(stage: Stage) -> None:
    await stage.announce(FIRST, limits={"max_output_tokens": 8})
    await stage.chat(FIRST, n=2)
    assert stage.engine.requests[0]["max_completion_tokens"] == 4


async def test_call_budget_refuses_the_next_call(stage: Stage) -> None:
    await stage.announce(FIRST, limits={"max_calls": 2})
    answers = [await stage.chat(FIRST) for _ in range(3)]
    assert [status for status, _ in answers] == [200, 200, 410]
    assert error(answers[2][1]) == ("attempt 0 of rollout r has ended (call_budget). No more of its calls are answered.", "attempt_closed")
    assert await stage.count(FIRST) == (2, False)


async def test_stage_past_its_limit_cuts_and_refuses_calls_until_the_next_stage(stage: Stage) -> None:
    await stage.announce(FIRST)
    stage.engine.go_on.clear()
    call = asyncio.create_task(stage.chat(FIRST))
    await stage.engine.arrived.wait()
    assert await stage.start_stage(FIRST, "run", 0.2) == 200
    over = (410, ("attempt 0 of rollout r has ended (run_timeout). No more of its calls are answered.", "attempt_closed"))
    for answer in (await asyncio.wait_for(call, 30), await asyncio.wait_for(stage.chat(FIRST), 30)):
        assert (answer[0], error(answer[1])) == over
    await asyncio.wait_for(stage.engine.left.wait(), 30)
    assert await stage.ends(FIRST) == "run_timeout"
    stage.engine.go_on.set()
    await stage.start_stage(FIRST, "evaluate", 600)
    assert (await stage.chat(FIRST))[0] == 200
    assert await stage.ends(FIRST) == ""
    assert await stage.count(FIRST) == (2, False), "what was refused is not counted"


async def test_stage_that_follows_gives_a_call_in_flight_its_own_limit(stage: Stage) -> None:
    await stage.start_stage(FIRST, "init", 600)
    stage.engine.go_on.clear()
    calls = [asyncio.create_task(stage.chat(path)) for path in (FIRST, SECOND)]
    while len(stage.engine.requests) < 2:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.01)
    await stage.start_stage(FIRST, "run", 0.1)
    assert (await asyncio.wait_for(calls[0], 30))[0] == 410
    stage.engine.go_on.set()
    assert (await asyncio.wait_for(calls[1], 30))[0] == 200, "the other attempt has no stage"


async def test_stage_over_without_a_call_is_no_reason(stage: Stage) -> None:
    await stage.announce(FIRST)
    await stage.start_stage(FIRST, "run", 1e-9)
    assert await stage.ends(FIRST) == ""


async def test_stage_after_the_attempt_was_closed_opens_nothing(stage: Stage) -> None:
    await close(stage)
    await stage.start_stage(FIRST, "evaluate", 600)
    status, body = await stage.chat(FIRST)
    assert (status, error(body)[0]) == (410, MESSAGE)


async def test_stage_unknown_is_refused(stage: Stage) -> None:
    assert await stage.start_stage(FIRST, "rest", 1) == 400
    assert await stage.start_stage(FIRST, "run", 0) == 400


@pytest.mark.parametrize(
    ("dialect", "asked", "limited"),
    [
        ("/v1/chat/completions", {"max_tokens": 3}, {"max_tokens": 3}),
        ("/v1/chat/completions", {"max_completion_tokens": 30, "max_tokens": 2}, {"max_completion_tokens": 5, "max_tokens": 2}),
        ("/v1/chat/completions", {"n": 9}, {"n": 9, "max_completion_tokens": 1}),
        ("/v1/completions", {}, {"max_tokens": 5}),
        ("/v1/completions", {"prompt": [[1, 2], [3]], "n": 2}, {"prompt": [[1, 2], [3]], "n": 2, "max_tokens": 1}),
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2}, {"prompt": ["a", "b"], "max_tokens": 2}),
        ("/v1/messages", {"max_tokens": 6}, {"max_tokens": 5}),
        ("/v1/chat/completions", {"max_tokens": "3"}, {"max_tokens": "3"}),
        ("/v1/chat/completions", {"max_tokens": 8.0, "n": "2"}, {"max_tokens": 2, "n": "2"}),
        ("/v1/chat/completions", {"max_tokens": "many"}, {"max_tokens": 5}),
        ("/v1/responses", {"max_output_tokens": None}, {"max_output_tokens": 5}),
    ],
)
def test_limited_request_asks_for_no_more_tokens(dialect: str, asked: dict[str, Any], limited: dict[str, Any]) -> None:
    request = DIALECTS[dialect].parse(json.dumps(asked).encode()).limited(5)
    assert json.loads(msgspec.json.encode(request.fields)) == json.loads(request.raw) == limited


@pytest.mark.parametrize(("dialect", "limited"), [("/v1/completions", {}), ("/v1/chat/completions", {"max_completion_tokens": 50})])
def test_limited_request_without_length_keeps_the_engines_default(dialect: str, limited: dict[str, Any]) -> None:
    assert DIALECTS[dialect].parse(b"{}").limited(50).fields == limited
