"""Tap of vLLM's engine client: token ids and logprobs, policy versions and sampling parameters of a request.

In: vLLM's engine client, whose `generate` every route calls. Out: for the request in whose context it was called, what
was asked and what was generated. Invariant: the route's answer is the same as without the tap: logprobs are asked for
where the route asked for none, and then it ignores them.

vLLM's engine core puts the label of its weights (`/update_weight_version`) on the tokens of each step in the process that
samples them, and the label changes only between steps, so that a token's version is exact whatever is still in flight.

Runs inside vLLM's process.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from gateway.vllm_plugin.continuation import Continued, Rendered

LEAST_LOGPROB = -9999.0
"""Logprob in place of minus infinity, which JSON cannot represent; vLLM's own answers use the same value."""
SAMPLING_PARAMETERS = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
"""Fields of vLLM's sampling parameters that reshape the distribution, and their names in our field."""
MASKS = ("structured_outputs", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "watermarking", "trace_decode_token_ids")
"""Fields of vLLM's sampling parameters that, where set, mask tokens, force them, or shift their logits."""
_INSTALLED = "_spangrad_tapped"

Labels = list[tuple[int, str]]
"""Pairs for a choice: the output token at which a label of weights begins, and the label."""


@dataclass
class Generation:
    """Prompt of one call of `generate`, and output that has not been taken yet."""

    prompt_token_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


class Tap:
    """The generations of one request to a route."""

    def __init__(self, *, reads_ids: bool, continued: Continued | None = None) -> None:
        """Follow a request.

        Args:
            reads_ids: read ids and logprobs as well, for a route whose answers have no field for them.
            continued: call that the request continues. None: it continues none, and none will continue it.
        """
        self.reads_ids = reads_ids
        self.rendered: Rendered | None = None
        """The prompt as vLLM rendered it, where another call may continue the request."""
        self._continued = continued
        self.generations: list[Generation] = []
        self.sampling: dict[str, Any] | None = None
        """Sampling parameters in effect, vLLM's defaults applied. None: nothing was generated."""
        self._labels: list[list[Labels]] = []
        """Labels of each choice of each generation."""

    def begin(self, sampling_params: Any) -> int:
        """Record a call of `generate`; return the index of the generation."""
        self.generations.append(Generation())
        self._labels.append([[] for _ in range(sampling_params.n)])
        self.sampling = {name: getattr(sampling_params, name) for name in SAMPLING_PARAMETERS}
        budget = getattr(sampling_params, "thinking_token_budget", None)
        masked = any(getattr(sampling_params, name, None) for name in MASKS) or budget not in (None, -1)
        self.sampling["constrained"] = masked
        return len(self.generations) - 1

    def prompt(self, engine_client: Any, prompt: Any) -> Any:
        """Return what vLLM's engine gets for a rendered prompt: where the request continues a call, a prompt that begins with it."""
        if self._continued is None or not isinstance(prompt, dict) or prompt.get("type") != "token":
            return prompt  # images are tied to their places
        ends, rendered = _ends(engine_client), prompt["prompt_token_ids"]
        self.rendered = Rendered.of(rendered, ends)
        ids = self._continued.prompt(rendered, ends)
        if ids is rendered or len(ids) >= engine_client.model_config.max_model_len:
            return prompt
        kept = {name: value for name, value in prompt.items() if name not in {"prompt", "prompt_token_offsets"}}
        return {**kept, "prompt_token_ids": ids}

    def end(self, prompt_index: int, completion: Any) -> None:
        """Record the weights that sampled a choice that has ended."""
        spans = completion.weight_versions or []
        # A stop string may have cut off the tokens of a span.
        self._labels[prompt_index][completion.index] = [(span.start, span.version) for span in spans if span.start < span.end]

    @property
    def labels(self) -> list[Labels]:
        """Return the labels of each choice, in the answer's order; empty where a choice has not ended, or has no tokens."""
        return [labels for choices in self._labels for labels in choices]

    def has_unread(self) -> bool:
        """Return whether output has come since `take` was last called."""
        return any(any(vars(generation).values()) for generation in self.generations)

    def take(self) -> list[dict[str, Any]]:
        """Return the ids and logprobs since the last call, an entry for each generation; empty: nothing is new."""
        if not self.has_unread():
            return []
        unread = [{name: value for name, value in vars(generation).items() if value} for generation in self.generations]
        self.generations = [Generation() for _ in unread]
        return unread


_current: ContextVar[Tap | None] = ContextVar("spangrad_tap", default=None)


def open_tap(engine_client: Any, *, reads_ids: bool, continued: Continued | None = None) -> Tap:
    """Return a tap that reads the calls of `generate` in this context from now on."""
    if _INSTALLED not in vars(engine_client):
        _install(engine_client)
    tap = Tap(reads_ids=reads_ids, continued=continued)
    _current.set(tap)
    return tap


def _ends(engine_client: Any) -> set[int]:
    """Return the tokens that end a turn: those at which vLLM ends an answer by itself."""
    processor = engine_client.input_processor
    listed = processor.generation_config_fields.get("eos_token_id")
    return {end for end in (processor.renderer.get_eos_token_id(), *(listed if isinstance(listed, list) else [listed])) if end is not None}


def _install(engine_client: Any) -> None:
    """Wrap the client's `generate`; requests without a tap get its own generator."""
    generate = engine_client.generate

    def tapped(prompt: Any, sampling_params: Any, *args: Any, **more: Any) -> AsyncGenerator[Any, None]:
        tap = _current.get()
        if tap is None:
            return generate(prompt, sampling_params, *args, **more)
        if tap.reads_ids and sampling_params.logprobs is None:
            # On a copy, since responses repeat the parameters of the request.
            sampling_params = copy(sampling_params)
            sampling_params.logprobs = 0  # the sampled token's alone
        prompt = tap.prompt(engine_client, prompt)
        return _read(generate(prompt, sampling_params, *args, **more), tap, tap.begin(sampling_params))

    engine_client.generate = tapped
    setattr(engine_client, _INSTALLED, True)


async def _read(outputs: AsyncGenerator[Any, None], tap: Tap, prompt_index: int) -> AsyncGenerator[Any, None]:
    prompt_taken = False
    async with aclosing(outputs):
        async for output in outputs:
            generation = tap.generations[prompt_index]
            if tap.reads_ids and output.prompt_token_ids and not prompt_taken:
                generation.prompt_token_ids += output.prompt_token_ids
                prompt_taken = True
            for completion in output.outputs:
                if completion.finish_reason is not None:
                    tap.end(prompt_index, completion)
                if tap.reads_ids:
                    _take_ids(completion, generation)
            yield output


def _take_ids(completion: Any, generation: Generation) -> None:
    generation.token_ids += completion.token_ids
    sampled = zip(completion.logprobs or (), completion.token_ids, strict=False)
    generation.logprobs += [max(logprobs[token].logprob, LEAST_LOGPROB) for logprobs, token in sampled]
    generation.finish_reason = completion.finish_reason or generation.finish_reason
