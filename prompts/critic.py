"""The model that criticises and edits, behind any OpenAI-compatible address: the gateway's, unless the settings name another.

In: messages. Out: what the model says. Invariant: calls that go through the gateway say in their baggage that they belong to a search, so
that they are spans of mode `trial` and never of production, and nothing is trained on them.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import aiohttp

from prompts.words import Messages
from spangrad import semconv
from spangrad.errors import PromptError
from spangrad.settings import Settings
from spangrad.text_sanitizer import storable
from spangrad.types import Mode

_AT_ONCE = 8
_TRIES = 4
_PAUSE_SECONDS = 0.5
"""Before the second try; each further pause is twice as long."""


class Critic:
    """A chat model; an async context manager."""

    def __init__(self, settings: Settings, run_id: str) -> None:
        """Ask what prompts.critic_url and prompts.model name, for a search whose trials are of a run."""
        chosen, gateway = settings.prompts, settings.gateway
        self._url = (chosen.critic_url or f"{gateway.url.rstrip('/')}/v1").rstrip("/")
        self._model = chosen.model or gateway.policy
        self._temperature = chosen.temperature
        own = chosen.critic_url is None
        key = chosen.critic_key or (gateway.token if own else None)
        self._headers = {"Authorization": f"Bearer {key.get_secret_value()}"} if key else {}
        if own:
            said = {semconv.RUN_ID: run_id, semconv.ROLLOUT_ID: f"critic-{run_id}", semconv.ROLLOUT_MODE: Mode.TRIAL.value}
            self._headers["baggage"] = ",".join(f"{name}={quote(value, safe='')}" for name, value in said.items())
        self._seconds = chosen.critic_seconds
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        """Connect when something is asked first."""
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=aiohttp.ClientTimeout(total=self._seconds))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close."""
        await self._session.close()

    async def say(self, messages: Messages) -> str:
        """What the model answers.

        Raises:
            PromptError: its server refuses, or answers nothing that can be read, or stays away.
        """
        body: dict[str, Any] = {"model": self._model, "messages": messages}
        if self._temperature is not None:
            body["temperature"] = self._temperature
        problem = ""
        async with self._room:
            for tried in range(_TRIES):
                if tried:
                    await asyncio.sleep(_PAUSE_SECONDS * 2 ** (tried - 1))
                problem, again = await self._ask(body)
                if isinstance(again, str):
                    return again
                if not again:
                    break
        raise PromptError(
            f"the critic at {self._url} gives no answer as model {self._model!r} ({problem}). Set prompts.critic_url and prompts.model to "
            "a chat model that does; what the search has found so far is kept."
        )

    async def _ask(self, body: dict[str, Any]) -> tuple[str, bool | str]:
        """What is wrong, and the answer, else whether to ask again."""
        try:
            async with self._session.post(f"{self._url}/chat/completions", json=body) as answer:
                if answer.status != 200:
                    return f"HTTP {answer.status} {(await answer.text())[:300]}", answer.status == 429 or answer.status >= 500
                said = await answer.json(content_type=None)
                return "", storable(str(said["choices"][0]["message"]["content"] or ""))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return str(error) or type(error).__name__, True
        except (ValueError, LookupError, TypeError) as error:
            return f"its answer is no chat completion: {error!r}", False
