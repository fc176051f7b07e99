"""Reads token ids and logprobs where vLLM's own code gets them, for the routes whose answers have no place for them.

In: vLLM's engine client, whose `generate` every route calls. Out: for the request in whose context it was called, what
was asked and what came. Invariant: what the route gets is what it would have got: logprobs are asked for where it asked
for none, and then it does not look at them.

Runs inside vLLM's process.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field
from typing import Any

LEAST_LOGPROB = -9999.0
"""As vLLM's own answers write it: JSON knows no infinity."""
_INSTALLED = "_spangrad_tapped"


@dataclass
class Generation:
    """What one call of `generate` was asked, and what of its answer has not been taken yet."""

    prompt_token_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


class Tap:
    """The generations of one request to a route."""

    def __init__(self) -> None:
        self.generations: list[Generation] = []

    def has_news(self) -> bool:
        """Whether something has come since it was last taken."""
        return any(any(vars(one).values()) for one in self.generations)

    def take(self) -> list[dict[str, Any]]:
        """What has come since it was last taken, a place for each generation; empty: nothing."""
        if not self.has_news():
            return []
        news = [{name: value for name, value in vars(one).items() if value} for one in self.generations]
        self.generations = [Generation() for _ in news]
        return news


_current: ContextVar[Tap | None] = ContextVar("spangrad_tap", default=None)


def open_tap(engine_client: Any) -> Tap:
    """Read what `generate` is asked and gives from now on, in this context."""
    if _INSTALLED not in vars(engine_client):
        _install(engine_client)
    tap = Tap()
    _current.set(tap)
    return tap


def _install(engine_client: Any) -> None:
    """Put ourselves before the client's `generate`; other requests get the generator that they would have got."""
    generate = engine_client.generate

    def tapped(prompt: Any, sampling_params: Any, *args: Any, **more: Any) -> AsyncGenerator[Any, None]:
        tap = _current.get()
        if tap is None:
            return generate(prompt, sampling_params, *args, **more)
        if sampling_params.logprobs is None:
            # Of a copy, since responses repeat what was asked.
            sampling_params = copy(sampling_params)
            sampling_params.logprobs = 0  # the sampled token's alone
        tap.generations.append(Generation())
        return _read(generate(prompt, sampling_params, *args, **more), tap, len(tap.generations) - 1)

    engine_client.generate = tapped
    setattr(engine_client, _INSTALLED, True)


async def _read(outputs: AsyncGenerator[Any, None], tap: Tap, place: int) -> AsyncGenerator[Any, None]:
    told_prompt = False
    async with aclosing(outputs):
        async for output in outputs:
            generation = tap.generations[place]
            if output.prompt_token_ids and not told_prompt:
                generation.prompt_token_ids += output.prompt_token_ids
                told_prompt = True
            for completion in output.outputs:
                generation.token_ids += completion.token_ids
                sampled = zip(completion.logprobs or (), completion.token_ids, strict=False)
                generation.logprobs += [max(one[token].logprob, LEAST_LOGPROB) for one, token in sampled]
                generation.finish_reason = completion.finish_reason or generation.finish_reason
            yield output
