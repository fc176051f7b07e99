"""Environment on a server of the Open Reward Standard (ORS), as an environment with reset, step and tools.

In: a URL, a task, tool calls. Out: what tools return, with their rewards. Invariant: a call has an id of its own, by which the server does
not play it twice.

Source: ors-sdk 0.1.0.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast
from urllib.parse import urlsplit

from spangrad.episode.adapters.server_choice import choose, environment_service, note_open
from spangrad.episode.environment import StepResult, ToolAction
from spangrad.errors import EnvironmentsError
from spangrad.http.json_http import ask
from spangrad.http.service import RemoteService, RequestError

_SECONDS = 600.0
_RETRY_SECONDS = 60.0


class OrsServer:
    """A session on one of several servers; a URL may end in the environment's name."""

    def __init__(self, urls: Sequence[str], token: str | None = None) -> None:
        """Choose a server, and find its environment.

        Raises:
            EnvironmentsError: the server does not answer, or has no environment.
        """
        chosen = choose(dict.fromkeys(urls))
        parts = urlsplit(chosen)
        self._token = token
        self._base = f"{parts.scheme}://{parts.netloc}"
        self._session = ""
        name = parts.path.strip("/")
        if not name:
            names = self._ask("GET", "/list_environments")
            if not names:
                raise EnvironmentsError(f"{self._base} has no environment. Serve one.")
            name = names[0]
        self._name = name
        self.tools: Sequence[Mapping[str, Any]] = ()
        """Known after a reset: a task may bring its own."""
        self._chosen = chosen
        note_open(chosen, 1)

    def reset(self, task: Any) -> Any:
        """Begin a session; a task is `{"split", "index"}`, or else the specification of a task.

        Raises:
            EnvironmentsError: the task is no object, or the server refuses it.
        """
        if not isinstance(task, dict | None):
            raise EnvironmentsError(f'{self._base}: the task {task!r:.200} is no object. Give {{"split", "index"}} or a specification.')
        values = cast("dict[str, Any]", task or {})
        self._delete()
        self._session = self._created()
        given = values if set(values) == {"split", "index"} or "task_spec" in values else {"task_spec": values}
        self._ask("POST", "/create", {"env_name": self._name, **given})
        self.tools = [_tool(tool) for tool in self._listed_tools()]
        return _parts(self._ask("GET", f"/{self._name}/prompt"))

    def step(self, action: Any) -> StepResult:
        """Call a tool; a reply without one is asked for one."""
        if not isinstance(action, ToolAction):
            return StepResult("Call a tool.")
        call = {"name": action.name, "input": dict(action.arguments), "task_id": uuid.uuid4().hex}
        answer = json.loads("".join(self._streamed(f"/{self._name}/call", call)))
        if not answer["ok"]:
            return StepResult(f"error: {answer['error']}")
        output = answer["output"]
        reward = output.get("reward")
        metadata = dict(output.get("metadata") or {})
        return StepResult(_parts(output["blocks"]), None if reward is None else float(reward), bool(output.get("finished")), metadata)

    def close(self) -> None:
        """End the session."""
        self._delete()
        note_open(self._chosen, -1)

    def _listed_tools(self) -> list[dict[str, Any]]:
        try:
            return self._ask("GET", f"/{self._name}/task_tools")["tools"]
        except EnvironmentsError as error:
            if error.http_status != 404:
                raise
            return self._ask("GET", f"/{self._name}/tools")["tools"]

    def _created(self) -> str:
        parts = [text for kind, text in self._events("/create_session", {}) if kind == "task_id"]
        if not parts:
            raise EnvironmentsError(f"{self._base} gives no session. Look at its log.")
        return parts[0]

    def _delete(self) -> None:
        if not self._session:
            return
        for path in ("/delete", "/delete_session"):
            try:
                self._ask("POST", path, {})
            except EnvironmentsError:
                pass  # the server knows it no more
        self._session = ""

    @property
    def _service(self) -> RemoteService:
        headers = {**({"X-Session-ID": self._session} if self._session else {}), **({"X-API-Key": self._token} if self._token else {})}
        return environment_service(self._base, None, _RETRY_SECONDS, headers)

    def _ask(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Any:
        return ask(self._service, method, path, body, seconds=_SECONDS)

    def _streamed(self, path: str, body: Mapping[str, object]) -> Iterator[str]:
        """Yield the parts of a streamed answer."""
        for kind, text in self._events(path, body):
            if kind == "error":
                raise EnvironmentsError(f"{self._base}{path}: {text}. Look at its server's log.")
            if kind in ("chunk", "end"):
                yield text
            if kind == "end":
                return
        raise EnvironmentsError(f"{self._base}{path}: the answer breaks off. Look at its server's log.")

    def _events(self, path: str, body: Mapping[str, object]) -> Iterator[tuple[str, str]]:
        """Yield the server-sent events of an answer: name and data."""
        headers = {**self._service.headers, "Accept": "text/event-stream"}
        request = urllib.request.Request(self._base + path, json.dumps(body).encode(), headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as response:
                yield from _parsed(line.decode().rstrip("\r\n") for line in response)
        except urllib.error.HTTPError as error:
            failure = RequestError.of_response(error.code, error.read(), None, str(error.reason))
            raise self._service.error_for(failure, "POST", path) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._service.error_for(RequestError.of_connection(error), "POST", path) from error


def _parsed(lines: Iterator[str]) -> Iterator[tuple[str, str]]:
    kind, data = "", list[str]()
    for line in lines:
        name, _, value = line.partition(":")
        if not line:
            if kind:
                yield kind, "\n".join(data)
            kind, data = "", []
        elif name == "event":
            kind = value.strip()
        elif name == "data":
            data.append(value.removeprefix(" "))


def _parts(blocks: Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """Return blocks as the content of a message: text alone as text."""
    if all(block["type"] == "text" for block in blocks):
        return "\n".join(block["text"] for block in blocks)
    return [
        {"type": "text", "text": block["text"]}
        if block["type"] == "text"
        else {"type": "image_url", "image_url": {"url": f"data:{block['mimeType']};base64,{block['data']}"}}
        for block in blocks
    ]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    parameters = tool.get("input_schema") or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": tool["name"], "description": tool["description"], "parameters": parameters}}
