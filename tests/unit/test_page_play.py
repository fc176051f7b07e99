"""Sessions of play without a process: bounds, turns, ends, hostile texts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from page.actions.requests import PlayRequest, read_request
from page.play.routes import PlayAnswer
from page.play.sessions import PlayBounds, PlaySession, PlaySessions, playable
from spangrad.errors import AgentError
from spangrad.settings import Settings

HANDLERS = {
    "nim": {"environment": "nim:Nim"},
    "leased": {"environment": "http://127.0.0.1:1"},
    "code": {"agent": "agent:run"},
}
SETTINGS = Settings.model_validate({"runner": {"handlers": HANDLERS}})
MARKUP = "<script>alert(1)</script>\u202e"


class Script:
    """Episode whose lines the test writes."""

    def __init__(self) -> None:
        self.waiting: asyncio.Queue[bytes] = asyncio.Queue()
        self.sent: list[dict[str, Any]] = []
        self.has_ended = False

    async def lines(self) -> AsyncIterator[bytes]:
        while line := await self.waiting.get():
            yield line

    async def send(self, line: bytes) -> None:
        self.sent.append(json.loads(line))

    async def end(self) -> None:
        self.has_ended = True

    def write(self, **line: object) -> None:
        self.waiting.put_nowait(json.dumps(line).encode())


def request(number: int = 0, **fields: Any) -> PlayRequest:
    fields = {"author": "Ada", "environment": "nim", "task": "null", "person": True, "role": "first", **fields}
    return PlayRequest(rollout=f"play-{number:032x}", **fields)


async def begun(bounds: PlayBounds | None = None) -> tuple[PlaySession, Script, PlaySessions]:
    """A session, and its episode."""
    script = Script()

    async def start(settings: Settings, request: PlayRequest) -> Script:
        return script

    sessions = PlaySessions(SETTINGS, start, bounds)
    await sessions.begin(request())
    return sessions.get(request().rollout), script, sessions


async def whole(session: PlaySession, begin: int = 0) -> list[dict[str, Any]]:
    """Events of a session until its end."""
    async with asyncio.timeout(30):
        return [event async for _, event in session.events(begin)]


async def at_turn(session: PlaySession) -> int:
    """Number of the turn that waits for the person."""
    async for _, event in session.events():
        if event["kind"] == "turn":
            return event["turn"]
    raise AssertionError("no turn came")


async def test_session_that_does_not_begin_in_time_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("page.play.sessions._BEGIN_SECONDS", 1.0)
    ended = asyncio.Event()

    async def start(settings: Settings, request: PlayRequest) -> Script:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return Script()

    sessions = PlaySessions(SETTINGS, start)
    with pytest.raises(AgentError, match="has not begun within 1 s"):
        await asyncio.to_thread(sessions.begin_from_thread, request())
    await asyncio.wait_for(ended.wait(), 30)


def test_playable_environments_are_those_of_handlers_without_a_lease() -> None:
    assert playable(SETTINGS) == ["nim"]


async def test_session_passes_messages_and_replies_until_the_end() -> None:
    session, script, _ = await begun()
    script.write(role="first", by="user", text="5 sticks")
    script.write(turn=1)
    assert await at_turn(session) == 1
    await session.reply(1, "3")
    script.write(end="1 turns, return +1.")
    events = await whole(session)
    assert [event["kind"] for event in events] == ["begin", "message", "turn", "replied", "end"]
    assert events[1] == {"kind": "message", "role": "first", "by": "user", "text": "5 sticks"}
    assert events[3] == {"kind": "replied", "turn": 1}, "a browser that loads the page again offers no turn that has a reply"
    assert events[-1] == {"kind": "end", "outcome": "done", "text": "1 turns, return +1."}
    assert script.sent == [{"turn": 1, "text": "3"}]
    assert await whole(session, 3) == events[3:], "a browser that connects again gets what it lacks"


@pytest.mark.parametrize(("characters", "fits"), [(6000, True), (6001, False)])
def test_reply_is_as_long_as_the_page_lets_it_be(characters: int, *, fits: bool) -> None:
    body = json.dumps({"rollout": "play-1", "turn": 1, "text": "é" * characters})
    if fits:
        assert msgspec.json.decode(body, type=PlayAnswer).text == "é" * characters
    else:
        with pytest.raises(msgspec.ValidationError, match="length <= 6000"):
            msgspec.json.decode(body, type=PlayAnswer)


async def test_reply_counts_once_and_for_its_own_turn() -> None:
    session, script, _ = await begun()
    with pytest.raises(ValueError, match="turn 1 does not wait for a reply"):
        await session.reply(1, "3")
    script.write(turn=2)
    await at_turn(session)
    with pytest.raises(ValueError, match="turn 1 does not wait"):
        await session.reply(1, "3")
    await session.reply(2, "3")
    with pytest.raises(ValueError, match="turn 2 does not wait"):
        await session.reply(2, "3")
    assert script.sent == [{"turn": 2, "text": "3"}]
    await session.leave("It was left.")


@pytest.mark.parametrize(
    ("line", "outcome", "sentence"),
    [
        (b'{"error": "the environment failed"}', "failed", "the environment failed"),
        (b"", "failed", "ended without an outcome"),
        (b"no JSON", "failed", "wrote what is no event"),
        (b'{"html": "x"}', "failed", "wrote what is no event"),
        (b'{"turn": "x"}', "failed", "wrote what is no event"),
    ],
)
async def test_session_ends_by_the_last_line_of_its_episode(line: bytes, outcome: str, sentence: str) -> None:
    session, script, _ = await begun()
    script.waiting.put_nowait(line)
    end = (await whole(session))[-1]
    assert (end["outcome"], sentence in end["text"]) == (outcome, True)
    await session.leave("")
    assert script.has_ended


async def test_session_shows_hostile_text_unchanged_as_text() -> None:
    session, script, _ = await begun()
    script.write(by="user", text=MARKUP)
    script.write(error=MARKUP)
    assert [event["text"] for event in await whole(session) if "text" in event] == [MARKUP, MARKUP]


async def test_session_without_a_listener_ends() -> None:
    session, script, _ = await begun(PlayBounds(left_seconds=0.05))
    assert (await whole(session))[-1]["text"] == "No browser showed it any more."
    await session.leave("")
    assert script.has_ended


async def test_session_listened_to_before_its_start_does_not_end() -> None:
    session = PlaySession(request(), PlayBounds(left_seconds=0.05))
    with session.listened():
        session.start(Script())
        await asyncio.sleep(0.3)
        assert not session.is_over
    await asyncio.wait_for(whole(session), 30)


async def test_session_with_a_listener_does_not_end() -> None:
    session, _, _ = await begun(PlayBounds(left_seconds=0.05))
    with session.listened():
        await asyncio.sleep(0.2)
        assert not session.is_over
    assert (await whole(session))[-1]["outcome"] == "left"


@pytest.mark.parametrize(
    ("bounds", "sentence"),
    [(PlayBounds(seconds=0.05), "Its time limit of 0.05 seconds"), (PlayBounds(events=3), "It had 3 events")],
)
async def test_session_ends_at_its_bounds(bounds: PlayBounds, sentence: str) -> None:
    session, script, _ = await begun(bounds)
    script.write(by="user", text="a")
    script.write(by="user", text="b")
    assert sentence in (await whole(session))[-1]["text"]


async def test_sessions_are_bounded_in_number_and_end_with_the_page() -> None:
    scripts = list[Script]()

    async def start(settings: Settings, request: PlayRequest) -> Script:
        scripts.append(Script())
        return scripts[-1]

    sessions = PlaySessions(SETTINGS, start, PlayBounds(sessions=2, kept=2))
    await sessions.begin(request(1))
    with pytest.raises(ValueError, match="has begun already"):
        await sessions.begin(request(1))
    assert "Ada plays first in nim" in await sessions.begin(request(2))
    with pytest.raises(ValueError, match="2 episodes are under way"):
        await sessions.begin(request(3))
    await sessions.get(request(1).rollout).leave("It was left.")
    assert "the policy plays in nim" in await sessions.begin(request(3, person=False))
    with pytest.raises(ValueError, match="is played here"):
        sessions.get(request(1).rollout)
    await sessions.close()
    assert all(sessions.get(request(number).rollout).is_over for number in (2, 3))
    assert [script.has_ended for script in scripts] == [True, True, True]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"environment": "os:system"}, "no handler 'os:system' of runner.handlers has an environment to play: nim"),
        ({"environment": "leased"}, "no handler 'leased'"),
        ({"task": "{"}, "the task is no JSON"),
        pytest.param({"task": "[" * 6000}, "the task is no JSON", id="deep"),
    ],
)
async def test_session_of_an_unknown_environment_is_not_begun(fields: dict[str, Any], sentence: str) -> None:
    async def start(settings: Settings, request: PlayRequest) -> Script:
        raise AssertionError("nothing is started")

    with pytest.raises(ValueError, match=sentence):
        await PlaySessions(SETTINGS, start).begin(request(**fields))


async def test_session_that_cannot_start_takes_no_place() -> None:
    async def start(settings: Settings, request: PlayRequest) -> Script:
        raise AgentError("no process")

    sessions = PlaySessions(SETTINGS, start, PlayBounds(sessions=1))
    for _ in range(2):
        with pytest.raises(AgentError, match="no process"):
            await sessions.begin(request())


def test_play_request_names_its_rollout_by_a_fixed_pattern() -> None:
    fields = {"action": "play", "author": "Ada", "environment": "nim", "task": "null", "person": True}
    asked = read_request(json.dumps({**fields, "rollout": f"play-{0:032x}"}).encode())
    assert isinstance(asked, PlayRequest)
    assert asked.rollout == f"play-{0:032x}"
    with pytest.raises(ValueError, match="no action of the page"):
        read_request(json.dumps({**fields, "rollout": "seen-1"}).encode())
