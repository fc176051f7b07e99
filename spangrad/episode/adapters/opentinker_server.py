"""Environment on a server of OpenTinker, as an environment with reset and step.

In: a URL, a task, actions. Out: observations and results. Invariant: a step is sent once, since the server would play a second one.

Source: https://github.com/open-tinker/OpenTinker, the environment server.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from spangrad.episode.adapters.server_choice import choose, environment_service, note_open
from spangrad.episode.environment import StepResult
from spangrad.errors import EnvironmentsError
from spangrad.http.json_http import ask

_JOB = "spangrad"
_SECONDS = 600.0
_RETRY_SECONDS = 60.0


class OpenTinkerServer:
    """An instance on one of several servers."""

    def __init__(self, urls: Sequence[str], token: str | None = None) -> None:
        self._url = choose(dict.fromkeys(urls))
        self._service = environment_service(self._url, token, _RETRY_SECONDS)
        self._instance = ""
        self.system_prompt: str | None = None
        """Known after the first reset."""
        note_open(self._url, 1)

    def reset(self, task: Any) -> Any:
        """Begin an episode in a new instance; the task's fields go along."""
        self._finalize()
        self._instance = uuid.uuid4().hex
        values = cast("dict[str, Any]", task) if isinstance(task, dict) else {} if task is None else {"task": task}
        answer = self._post("/reset", values)
        self.system_prompt = answer.get("system_prompt")
        return answer["observation"]

    def step(self, action: Any) -> StepResult:
        """Apply an action."""
        answer = self._post("/step", {"action": action}, retried=False)
        reward = answer.get("reward")
        return StepResult(answer["observation"], None if reward is None else float(reward), bool(answer["done"]), answer.get("info") or {})

    def close(self) -> None:
        """Release the instance."""
        self._finalize()
        note_open(self._url, -1)

    def _finalize(self) -> None:
        if self._instance:
            try:
                self._post("/finalize", {}, retried=False)
            except EnvironmentsError:
                pass  # the server knows it no more
            self._instance = ""

    def _post(self, path: str, values: Mapping[str, Any], *, retried: bool = True) -> Any:
        service = self._service if retried else replace(self._service, retry_seconds=0.0)
        return ask(service, "POST", path, {**values, "instance_id": self._instance, "job_id": _JOB}, seconds=_SECONDS)
