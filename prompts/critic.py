"""Client of the model that criticises and edits, at any OpenAI-compatible address: the gateway's, unless the settings name another.

In: messages. Out: the model's reply. Invariant: calls that go through the gateway carry baggage that marks them as part of a search, so
that they are spans of mode `trial` and never of production, and nothing is trained on them.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import quote

from prompts.prompt_texts import Messages
from spangrad import semconv
from spangrad.errors import PromptError
from spangrad.http.async_http import AsyncClient
from spangrad.http.service import RemoteService, RequestError
from spangrad.settings import Settings
from spangrad.text_sanitizer import storable
from spangrad.types import Mode

_AT_ONCE = 8
_RESPONSE_SECONDS = 300
"""Time limit of one response of the critic model, in seconds."""
_RETRY_SECONDS = 10.0
"""Time for which a request is retried while the model's server is busy or away, in seconds."""


class Critic:
    """Connection to a chat model."""

    def __init__(self, settings: Settings, run_id: str) -> None:
        """Configure the model of prompts.critic_url and prompts.model, for a search whose trials belong to a run."""
        chosen, gateway = settings.prompts, settings.gateway
        url = (chosen.critic_url or f"{gateway.url.rstrip('/')}/v1").rstrip("/")
        self._model = chosen.model or gateway.policy
        self._temperature = chosen.temperature
        is_gateway = chosen.critic_url is None
        key = chosen.critic_key or (gateway.token if is_gateway else None)
        baggage = {semconv.RUN_ID: run_id, semconv.ROLLOUT_ID: f"critic-{run_id}", semconv.ROLLOUT_MODE: Mode.TRIAL.value}
        headers = {"baggage": ",".join(f"{name}={quote(value, safe='')}" for name, value in baggage.items())} if is_gateway else {}
        service = RemoteService("the critic", url, key, PromptError, "", _RETRY_SECONDS, headers)
        self._client = AsyncClient(service, seconds=_RESPONSE_SECONDS)
        self._room = asyncio.Semaphore(_AT_ONCE)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def complete(self, messages: Messages) -> str:
        """Return the model's reply.

        Raises:
            PromptError: the server refuses, gives no readable reply, or does not answer.
        """
        body: dict[str, Any] = {"model": self._model, "messages": messages}
        if self._temperature is not None:
            body["temperature"] = self._temperature
        async with self._room:
            try:
                completion = await self._client.send("POST", "/chat/completions", json.dumps(body).encode(), dict)
                return storable(str(completion["choices"][0]["message"]["content"] or ""))
            except RequestError as failure:
                problem = str(failure)
            except (LookupError, TypeError) as error:
                problem = f"its answer is no chat completion: {error!r}"
        raise PromptError(
            f"the critic at {self._client.service.url} gives no answer as model {self._model!r} ({problem}). Set prompts.critic_url and "
            "prompts.model to a chat model that does; what the search has found so far is kept."
        )
