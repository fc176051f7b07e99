"""Environment on a server with OpenEnv's protocol, as an environment with reset and step: ours, or any other.

In: URLs, a task, actions. Out: observations and results. Invariant: an episode is one session of one server; with ours a reset or a step
whose answer was lost is asked for again by its name or number, and never played again; any other loss ends the episode as a failure of the
environment.

A server of another's making knows no system prompt: its description and the schema of its actions are the prompt. A URL may name a game and
a role, `?session_id=GAME&role=ROLE`: the environment is then that player's, and the others are clients of their own.
"""

from __future__ import annotations

import json
import logging
import math
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from spangrad.agent.propagation import carrier_of
from spangrad.episode.adapters.schema_actions import UnusableReply, described, fields_of_text, instruction
from spangrad.episode.adapters.server_choice import choose, environment_service, note_open
from spangrad.episode.environment import StepResult
from spangrad.episode.openenv_fields import CONTENT, REWARDS_HEADER, action_fields, observation_of
from spangrad.errors import EnvironmentsError
from spangrad.http.json_http import ask
from spangrad.http.retries import RETRIED_STATUSES
from spangrad.http.service import RemoteService, bearer
from spangrad.http.websocket import WebSocket

_LOAD_SECONDS = 2.0
_CONNECT_SECONDS = 10.0
_STEP_SECONDS = 600.0
"""Longest wait for the message of a server that is not ours, in seconds; ours ends each request in its own time, and sends pings."""
_RETURN_SECONDS = 20.0
"""Time for which a lost connection to a session of ours is tried again, in seconds; shorter than the session waits for its user."""
_LOGGED_SECONDS = 3.0
"""Time for which no server gives a session after which that is logged: a short outage is a restart, and is not."""
_PAUSES = (0.1, 1.0)
"""Shortest and longest pause between two tries, in seconds."""
log = logging.getLogger(__name__)
_RAISED, _NO_ACTION = "EXECUTION_ERROR", "VALIDATION_ERROR"
_BUSY, _FATAL = "CAPACITY_REACHED", ("FACTORY_ERROR", "SESSION_ERROR")


class RemoteStepError(Exception):
    """The environment raised an exception, on its server; or the server refused the message."""


class RefusedActionError(RemoteStepError):
    """The server refused the message, since its data are no action."""


class OpenEnvServer:
    """A session of one of several servers."""

    def __init__(self, urls: Sequence[str], token: str | None = None, wait_seconds: float = 300.0) -> None:
        """Open a session at the least loaded server.

        The URLs are those of servers of the same environment, or one with the game and the role to play. Full servers are asked again for
        `wait_seconds`.

        Raises:
            EnvironmentsError: no server gives a session, or a game is named wrongly.
        """
        self.seat = _seat_of(urls)
        """Seat in a game that the server holds for several players: `session_id` and `role`. Empty: the session is this client's alone."""
        self._urls = [url.partition("?")[0].rstrip("/") for url in urls]
        self._token = token
        self._query = urlencode(self.seat or {"session_id": uuid.uuid4().hex})
        """Name of the session, or of the seat: the same for each connection to it."""
        self._step = 0
        self._begun: StepResult | None = None
        """Result of the last reset of a seat, until its first step: others may have acted before its turn, and ended the game."""
        self._ours = False
        self._connection: WebSocket
        self._url = self._open(time.monotonic() + wait_seconds)
        try:
            self.about: Mapping[str, Any] = self._get("/metadata")
            """Description of the environment, as the server has it."""
            self.tools: Sequence[Mapping[str, Any]] = self.about.get("tools") or ()
            self._schema: Mapping[str, Any] = {} if self._ours else self._get("/schema")["action"]
            self.system_prompt = self._system_prompt()
        except BaseException:
            self.close()
            raise

    def reset(self, task: Any) -> Any:
        """Begin an episode; a server of another's making gets the task's fields."""
        data = {"task": task} if self._ours else task if isinstance(task, dict) else {} if task is None else {"task": task}
        self._step = 0
        named = {"request_id": uuid.uuid4().hex} if self._ours else {}
        result = self._result(self._ask({"type": "reset", "data": data, **named}))
        self._begun = result if self.seat else None
        return result.observation

    def step(self, action: Any) -> StepResult:
        """Apply an action; the first one gets what a player earned before its turn, and is not played where the game has ended already."""
        if isinstance(action, UnusableReply):
            return action.result()
        if self._begun is not None and self._begun.done:
            return self._begun
        message: dict[str, Any] = {"type": "step", "data": action_fields(action)}
        if self._ours:
            message |= {"step": self._step + 1, **{name: value for name, value in carrier_of().items() if name == "traceparent"}}
        try:
            result = self._result(self._ask(message))
        except RefusedActionError:
            if self._ours:
                raise
            return UnusableReply(instruction(self._schema)).result()
        begun, self._begun = self._begun, None
        if begun is None or begun.reward is None:
            return result
        return replace(result, reward=begun.reward + (result.reward or 0.0))

    def parse(self, text: str) -> Any:
        """Return the action that a reply means; a server of ours parses it itself."""
        return text if self._ours else fields_of_text(self._schema, text)

    def close(self) -> None:
        """End the session, and see its end."""
        try:
            self._connection.wait_at_most(_CONNECT_SECONDS)
            self._connection.send('{"type": "close"}')
            while self._connection.receive() is not None:
                pass
        except OSError:
            pass  # the server has left
        self._connection.close()
        note_open(self._url, -1)

    def _system_prompt(self) -> str | None:
        if not self._ours:
            return described(self.about.get("description") or "", self._schema)
        if self.seat:
            return self.about["system_prompts"].get(self.seat["role"])
        return self.about.get("system_prompt")

    def _result(self, data: Mapping[str, Any]) -> StepResult:
        fields, metadata = data["observation"], dict(data.get("metadata") or {})
        if self._ours:
            content = metadata.pop(CONTENT, None)
            observation = observation_of(fields) if content is None else content
        else:
            observation = {name: value for name, value in fields.items() if name != "metadata"}
        reward = data.get("reward")
        return StepResult(observation, None if reward is None else float(reward), bool(data.get("done")), metadata)

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message; return the data of the response."""
        text = json.dumps(message)
        end = time.monotonic() + _RETURN_SECONDS
        while True:
            try:
                self._connection.send(text)
                response = self._received()
                break
            except OSError as error:
                if not self._ours or time.monotonic() > end:
                    raise self._lost(f" ({error})") from error
                self._reconnect(end, error)
        data, failed = response["data"], response["type"] == "error"
        if message["type"] == "step" and (not failed or data["code"] == _RAISED):
            self._step += 1  # a server counts no step that it refuses
        if not failed:
            return data
        if data["code"] in (_BUSY, *_FATAL):
            raise self._lost(f": {data['message']} ({data['code']})")
        error = RefusedActionError if data["code"] == _NO_ACTION else RemoteStepError
        raise error(f"{data['message']} ({data['code']})")

    def _received(self) -> dict[str, Any]:
        text = self._connection.receive()
        if text is None:
            raise ConnectionResetError("the server has closed the connection")
        return json.loads(text)

    def _reconnect(self, end: float, cause: OSError) -> None:
        """Return to the session, which waits for its user."""
        self._connection.close()
        while True:
            time.sleep(random.uniform(*_PAUSES))
            try:
                self._connection = self._connect(self._url)
                return
            except OSError as error:
                if time.monotonic() > end:
                    raise self._lost(f" ({error})") from cause

    def _lost(self, why: str) -> EnvironmentsError:
        return EnvironmentsError(f"the environment at {self._url} is lost{why}. Look at its server's log.")

    def _open(self, end: float) -> str:
        """Open a session; return the server's URL."""
        logged_at: float | None = time.monotonic() + _LOGGED_SECONDS
        while True:
            loads = {url: self._load(url) for url in self._urls}
            url = choose(loads)
            try:
                self._ours = loads[url] is not None
                self._connection = self._connect(url)
                if loads[url] == math.inf:
                    self._connection.close()
                    raise ConnectionError("GET /v1/load has no answer, which would tell whose server it is")
                self._connection.send('{"type": "state"}')  # what is full says so unasked
                response = self._received()
                code = response["data"].get("code") if response["type"] == "error" else ""
                refused = EnvironmentsError(f"the environment at {url} gives no session: {response['data'].get('message')}.")
            except OSError as error:
                code, refused = _BUSY, EnvironmentsError(f"the environment at {url} does not answer ({error}). Start it, or fix the URL.")
            if self.seat and not self._ours and code not in (_BUSY, *_FATAL):
                raise EnvironmentsError(f"{url} is no server of `spangrad env serve`, and holds no games. Drop session_id and role.")
            # A server of another's making may refuse a state before the first reset, which is no refusal of the session.
            if code not in (_BUSY, *_FATAL) and not (code and self.seat):
                note_open(url, 1)
                return url
            now = time.monotonic()
            if code != _BUSY or now > end:
                raise refused
            if logged_at is not None and now > logged_at:
                logged_at = None
                log.warning("%s Trying again for %.1f s.", refused, end - now)
            time.sleep(random.uniform(*_PAUSES))

    def _connect(self, url: str) -> WebSocket:
        headers = {**bearer(self._token), **carrier_of(), REWARDS_HEADER: "client"}
        # Of all servers, those of `spangrad env serve` alone open a session under a name that the client gives.
        connection = WebSocket(f"{url}/ws?{self._query}" if self._ours else f"{url}/ws", headers, _CONNECT_SECONDS)
        connection.wait_at_most(math.inf if self._ours else _STEP_SECONDS)
        return connection

    def _load(self, url: str) -> float | None:
        """Return the share of a server's capacity that is in use; infinite: it does not answer; None: it is not ours."""
        try:
            load = ask(replace(self._service(url), retry_seconds=0.0), "GET", "/v1/load", seconds=_LOAD_SECONDS)
            return load["sessions"] / load["capacity"]
        except EnvironmentsError as error:
            if error.http_status == 401:
                raise
            return math.inf if error.http_status in (None, *RETRIED_STATUSES) else None
        except (KeyError, TypeError):
            return None

    def _get(self, path: str) -> Any:
        return ask(self._service(self._url), "GET", path, seconds=_CONNECT_SECONDS)

    def _service(self, url: str) -> RemoteService:
        return environment_service(url, self._token, _RETURN_SECONDS)


def _seat_of(urls: Sequence[str]) -> dict[str, str]:
    """Return the seat that a URL names; empty: it names none."""
    queries = [urlsplit(url).query for url in urls]
    if not any(queries):
        return {}
    named = dict(parse_qsl(queries[0]))
    if len(urls) > 1 or set(named) != {"session_id", "role"}:
        raise EnvironmentsError(
            f"{','.join(urls)} names no seat in a game. Give one URL with the game and the role: http://HOST:PORT?session_id=GAME&role=ROLE."
        )
    return named
