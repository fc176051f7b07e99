"""Client of the model that criticises and edits, at any OpenAI-compatible address: the gateway's, unless the settings name another.

In: messages. Out: the model's reply. Invariant: calls that go through the gateway carry baggage that marks them as part of a search, so
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
_RESPONSE_SECONDS = 300
"""Time limit of one response of the critic model, in seconds."""
_TRIES = 4
_PAUSE_SECONDS = 0.5
"""Pause before the second try, in seconds; each further pause is twice as long."""


class Critic:
    """Connection to a chat model; an async context manager."""

    def __init__(self, settings: Settings, run_id: str) -> None:
        """Configure the model of prompts.critic_url and prompts.model, for a search whose trials belong to a run."""
        chosen, gateway = settings.prompts, settings.gateway
        self._url = (chosen.critic_url or f"{gateway.url.rstrip('/')}/v1").rstrip("/")
        self._model = chosen.model or gateway.policy
        self._temperature = chosen.temperature
        own = chosen.critic_url is None
        key = chosen.critic_key or (gateway.token if own else None)
        self._headers = {"Authorization": f"Bearer {key.get_secret_value()}"} if key else {}
        if own:
            baggage = {semconv.RUN_ID: run_id, semconv.ROLLOUT_ID: f"critic-{run_id}", semconv.ROLLOUT_MODE: Mode.TRIAL.value}
            self._headers["baggage"] = ",".join(f"{name}={quote(value, safe='')}" for name, value in baggage.items())
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        """Open the session."""
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=aiohttp.ClientTimeout(total=_RESPONSE_SECONDS))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the session."""
        await self._session.close()

    async def say(self, messages: Messages) -> str:
        """Return the model's reply.

        Raises:
            PromptError: the server refuses, gives no readable reply, or does not answer.
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
        """Send one request; return the error and whether to retry, or an empty error and the reply."""
        try:
            async with self._session.post(f"{self._url}/chat/completions", json=body) as answer:
                if answer.status != 200:
                    return f"HTTP {answer.status} {(await answer.text())[:300]}", answer.status == 429 or answer.status >= 500
                completion = await answer.json(content_type=None)
                return "", storable(str(completion["choices"][0]["message"]["content"] or ""))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return str(error) or type(error).__name__, True
        except (ValueError, LookupError, TypeError) as error:
            return f"its answer is no chat completion: {error!r}", False
