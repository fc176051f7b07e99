"""Reads what vLLM's own code gets of a request: token ids and logprobs, policy versions and sampling parameters.

In: vLLM's engine client, whose `generate` every route calls. Out: for the request in whose context it was called, what
was asked and what came. Invariant: what the route gets is what it would have got: logprobs are asked for where it asked
for none, and then it does not look at them.

vLLM's engine core puts the label of its weights (`/update_weight_version`) on the tokens of each step in the process that
samples them, and the label moves only between steps, so that a token's version is exact whatever is still on its way.

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
SAMPLING_PARAMETERS = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
"""Fields of vLLM's sampling parameters that reshape the distribution, and their names in our field."""
MASKS = ("structured_outputs", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "watermarking", "trace_decode_token_ids")
"""Fields of vLLM's sampling parameters that, where set, keep tokens from being sampled, put them in, or shift their logits."""
_INSTALLED = "_spangrad_tapped"

Labels = list[tuple[int, str]]
"""Output tokens of a choice at which a label of weights begins, and the labels."""


@dataclass
class Generation:
    """What one call of `generate` was asked, and what of its answer has not been taken yet."""

    prompt_token_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


class Tap:
    """The generations of one request to a route."""

    def __init__(self, *, reads_ids: bool) -> None:
        """Follow a request; `reads_ids`: ids and logprobs, too, which the route has no place for."""
        self.reads_ids = reads_ids
        self.generations: list[Generation] = []
        self.sampling: dict[str, Any] | None = None
        """Sampling parameters in effect, vLLM's defaults applied. None: nothing was generated."""
        self._labels: list[list[Labels]] = []
        """Of each generation: of each of its choices."""

    def begin(self, sampling_params: Any) -> int:
        """Note that `generate` was called; return the place of the generation."""
        self.generations.append(Generation())
        self._labels.append([[] for _ in range(sampling_params.n)])
        self.sampling = {name: getattr(sampling_params, name) for name in SAMPLING_PARAMETERS}
        budget = getattr(sampling_params, "thinking_token_budget", None)
        masked = any(getattr(sampling_params, name, None) for name in MASKS) or budget not in (None, -1)
        self.sampling["constrained"] = masked
        return len(self.generations) - 1

    def end(self, place: int, completion: Any) -> None:
        """Note which weights sampled a choice that has ended."""
        spans = completion.weight_versions or []
        # A stop string may have cut off the tokens of a span.
        self._labels[place][completion.index] = [(span.start, span.version) for span in spans if span.start < span.end]

    @property
    def labels(self) -> list[Labels]:
        """Labels of each choice, in the order of the answer's; empty where a choice has not ended, or has no tokens."""
        return [labels for choices in self._labels for labels in choices]

    def has_news(self) -> bool:
        """Whether something has come since it was last taken."""
        return any(any(vars(generation).values()) for generation in self.generations)

    def take(self) -> list[dict[str, Any]]:
        """Ids and logprobs that have come since they were last taken, a place for each generation; empty: nothing."""
        if not self.has_news():
            return []
        news = [{name: value for name, value in vars(generation).items() if value} for generation in self.generations]
        self.generations = [Generation() for _ in news]
        return news


_current: ContextVar[Tap | None] = ContextVar("spangrad_tap", default=None)


def open_tap(engine_client: Any, *, reads_ids: bool) -> Tap:
    """Read what `generate` is asked and gives from now on, in this context."""
    if _INSTALLED not in vars(engine_client):
        _install(engine_client)
    tap = Tap(reads_ids=reads_ids)
    _current.set(tap)
    return tap


def _install(engine_client: Any) -> None:
    """Put ourselves before the client's `generate`; other requests get the generator that they would have got."""
    generate = engine_client.generate

    def tapped(prompt: Any, sampling_params: Any, *args: Any, **more: Any) -> AsyncGenerator[Any, None]:
        tap = _current.get()
        if tap is None:
            return generate(prompt, sampling_params, *args, **more)
        if tap.reads_ids and sampling_params.logprobs is None:
            # Of a copy, since responses repeat what was asked.
            sampling_params = copy(sampling_params)
            sampling_params.logprobs = 0  # the sampled token's alone
        return _read(generate(prompt, sampling_params, *args, **more), tap, tap.begin(sampling_params))

    engine_client.generate = tapped
    setattr(engine_client, _INSTALLED, True)


async def _read(outputs: AsyncGenerator[Any, None], tap: Tap, place: int) -> AsyncGenerator[Any, None]:
    prompt_taken = False
    async with aclosing(outputs):
        async for output in outputs:
            generation = tap.generations[place]
            if tap.reads_ids and output.prompt_token_ids and not prompt_taken:
                generation.prompt_token_ids += output.prompt_token_ids
                prompt_taken = True
            for completion in output.outputs:
                if completion.finish_reason is not None:
                    tap.end(place, completion)
                if tap.reads_ids:
                    _take_ids(completion, generation)
            yield output


def _take_ids(completion: Any, generation: Generation) -> None:
    generation.token_ids += completion.token_ids
    sampled = zip(completion.logprobs or (), completion.token_ids, strict=False)
    generation.logprobs += [max(logprobs[token].logprob, LEAST_LOGPROB) for logprobs, token in sampled]
    generation.finish_reason = completion.finish_reason or generation.finish_reason
