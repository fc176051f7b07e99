"""What a run of `spangrad tune` trains on: rows of files as token sequences, and the rows that cannot be trained, counted with a reason.

In: files, the policy's model directory, which method. Out: `Examples`: those to train, those held out, counts. Invariant: ids that a row
holds are used as they are; only a row without ids of this tokenizer is tokenised. Every row of every file is trained, held out or counted
in `left_out`; the same files give the same examples in the same order.

What is held out is drawn by groups of rollouts, so that what is measured was not trained under another name; rows of rollouts of mode
`validate` (or `probe`) are held out whatever the share.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from spangrad.errors import TrainerError
from spangrad.settings import TuningSettings
from trainer.sft.files import RolloutOrigin, Row, Source, read_rows
from trainer.sft.objective import Method
from trainer.sft.rendering import Message, Renderer, Tokens, UnfitRowError

_KNOWN = {
    "sft": "input_ids and loss_mask; PromptIds and ResponseIds; messages; or prompt and completion",
    "dpo": "prompt, chosen and rejected (with prompt_ids, chosen_ids, ... where there are ids); or input, preferred_output and "
    "non_preferred_output",
}
_READ = {
    *("input_ids", "loss_mask", "messages", "tools", "parallel_tool_calls", "prompt", "completion", "meta", "chosen", "rejected", "input"),
    *("prompt_ids", "chosen_ids", "chosen_mask", "rejected_ids", "rejected_mask", "chosen_return", "rejected_return"),
    *("preferred_output", "non_preferred_output"),
}
"""Columns of which something is known."""


@dataclass(frozen=True, slots=True)
class Example:
    """What counts as one in a batch: a sequence, or in preference training the chosen one and the rejected one."""

    sequences: tuple[Tokens, ...]
    unit: str
    source: Source
    origins: tuple[RolloutOrigin, ...]

    @property
    def tokens(self) -> int:
        """Tokens of all its sequences."""
        return sum(len(one.ids) for one in self.sequences)


@dataclass(slots=True)
class Examples:
    """What files gave."""

    trained: list[Example] = field(default_factory=list[Example])
    held_out: list[Example] = field(default_factory=list[Example])
    rows: int = 0
    """That the files hold."""
    with_ids: int = 0
    """Rows whose own token ids are used."""
    rendered: int = 0
    """Rows that were tokenised here."""
    left_out: Counter[str] = field(default_factory=Counter[str])
    """Rows that are neither trained nor held out, by reason."""
    unread: set[str] = field(default_factory=set[str])
    """Columns that say nothing to us."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What fits the policy."""

    vocabulary: int
    """Ids are smaller."""
    longest: int
    """Tokens of a sequence."""
    device: int
    """Tokens of an example: they go through a device together."""
    tokenizer: str
    """Its hash."""

    @classmethod
    def of(cls, model: Path, tokenizer: str, settings: TuningSettings, device: int) -> Limits:
        """Those of a model directory.

        Raises:
            TrainerError: its config.json lacks what is needed.
        """
        config = json.loads((model / "config.json").read_text())
        config = {**config, **config.get("text_config", {})}
        if "vocab_size" not in config:
            raise TrainerError(f"{model / 'config.json'} has no vocab_size, without which token ids cannot be checked. Add it.")
        lengths = (config.get("max_position_embeddings"), settings.max_tokens, device)
        return cls(int(config["vocab_size"]), min(int(one) for one in lengths if one), device, tokenizer)


def read_examples(
    sources: Sequence[Source],
    method: Method,
    renderer: Renderer,
    limits: Limits,
    settings: TuningSettings,
    trained_before: Callable[[Sequence[RolloutOrigin]], Collection[RolloutOrigin]] = lambda _: (),
) -> Examples:
    """Read everything.

    Args:
        sources: the files.
        method: what they are read for.
        renderer: of the policy.
        limits: of the policy.
        settings: the share that is held out, and the seed.
        trained_before: which of some rollouts the branch has trained; rows of those are left out as `trained_before`.

    Raises:
        TrainerError: a file is damaged, or nothing is left to train; the message says why.
    """
    found = Examples()
    measured: list[Example] = []
    rest: list[Example] = []
    for source in sources:
        for row in read_rows(source):
            found.rows += 1
            try:
                if row.is_of_no_use:
                    raise UnfitRowError("mode_not_trained")
                if not row.is_held_out and trained_before(row.origins):
                    raise UnfitRowError("trained_before")
                made = list(_examples(row, method, renderer, limits, found))
            except UnfitRowError as unfit:
                found.left_out[str(unfit)] += 1
                continue
            (measured if row.is_held_out else rest).extend(made)
    units = list(dict.fromkeys(one.unit for one in rest))
    dice = np.random.default_rng(settings.seed)
    drawn = dice.permutation(len(units))[: round(settings.held_out * len(units))]
    chosen = {units[at] for at in drawn}
    found.trained = [one for one in rest if one.unit not in chosen]
    found.held_out = measured + [one for one in rest if one.unit in chosen]
    if not found.trained:
        raise TrainerError(_nothing(found, sources, method))
    return found


def _nothing(found: Examples, sources: Sequence[Source], method: Method) -> str:
    files = ", ".join(one.name for one in sources)
    why = ", ".join(f"{count} {reason}" for reason, count in sorted(found.left_out.items()))
    held = f", {len(found.held_out)} held out" if found.held_out else ""
    return (
        f"nothing in {files} can be trained: of {found.rows} rows {why or 'none is left out'}{held}. {method} reads these columns: "
        f"{_KNOWN[method]} (docs/tuning.md)."
    )


def _examples(row: Row, method: Method, renderer: Renderer, limits: Limits, found: Examples) -> Iterator[Example]:
    if "PromptIds" not in row.values:  # else a whole transition, of which we know every column
        found.unread.update(row.values.keys() - _READ)
    ours = row.tokenizers <= {limits.tokenizer}
    read = _supervised if method == "sft" else _pair
    sequences, has_ids = read(row.values, renderer, ours)
    for group in sequences:
        for one in group:
            _check(one, limits)
        if sum(len(one.ids) for one in group) > limits.device:
            raise UnfitRowError("too_long")
    found.with_ids += has_ids
    found.rendered += not has_ids
    yield from (Example(tuple(group), row.unit, row.source, row.origins) for group in sequences)


def _check(tokens: Tokens, limits: Limits) -> None:
    tokens.mask[:1] = [0] * len(tokens.mask[:1])  # nothing stands before it, so that it has no probability
    if len(tokens.ids) != len(tokens.mask):
        raise UnfitRowError("mask_of_other_length")
    if not any(tokens.mask):
        raise UnfitRowError("no_reply")
    if len(tokens.ids) > limits.longest:
        raise UnfitRowError("too_long")
    if not all(one in range(limits.vocabulary) for one in tokens.ids):  # a file may hold anything: what is no int is in no range
        raise UnfitRowError("unknown_token")
    if not set(tokens.mask) <= {0, 1}:
        raise UnfitRowError("mask_not_0_or_1")


def _supervised(values: Mapping[str, Any], renderer: Renderer, ours: bool) -> tuple[list[list[Tokens]], bool]:
    """The sequences of a row, and whether their ids are its own."""
    match values:
        case {"input_ids": list(ids), "loss_mask": list(mask)}:
            _require_own(ours)
            return [[Tokens(list(ids), list(mask))]], True
        case {"PromptIds": list(prompt), "ResponseIds": list(response)}:
            _require_own(ours)
            return [[Tokens([*prompt, *response], [0] * len(prompt) + [1] * len(response))]], True
        case {"messages": list(messages)}:
            return [[one] for one in _conversation(messages, 0, values.get("tools"), renderer)], False
        case {"prompt": str(prompt), "completion": str(completion)}:
            return [[_completion(prompt, completion, renderer)]], False
        case {"prompt": list(prompt), "completion": list(completion)}:
            return [[one] for one in _conversation([*prompt, *completion], len(prompt), values.get("tools"), renderer)], False
        case _:
            raise UnfitRowError("unknown_columns")


def _pair(values: Mapping[str, Any], renderer: Renderer, ours: bool) -> tuple[list[list[Tokens]], bool]:
    """Chosen and rejected of a row, and whether their ids are its own."""
    match values:
        case {
            "prompt_ids": list(prompt),
            "chosen_ids": list(chosen),
            "chosen_mask": list(chosen_mask),
            "rejected_ids": list(rejected),
            "rejected_mask": list(rejected_mask),
        } if ours:
            before = [0] * len(prompt)
            pair = [Tokens([*prompt, *chosen], before + chosen_mask), Tokens([*prompt, *rejected], before + rejected_mask)]
        case {"prompt": prompt, "chosen": chosen, "rejected": rejected}:
            pair = [_going_on(prompt, one, values.get("tools"), renderer) for one in (chosen, rejected)]
        case {"input": {"messages": prompt, **more}, "preferred_output": chosen, "non_preferred_output": rejected}:
            pair = [_going_on(prompt, one, more.get("tools"), renderer) for one in (chosen, rejected)]
        case {"chosen": list(chosen), "rejected": list(rejected)}:  # whole conversations that begin alike
            alike = next((at for at, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), min(len(chosen), len(rejected)))
            both = ((one[:alike], one[alike:]) for one in (chosen, rejected))
            pair = [_going_on(prompt, one, values.get("tools"), renderer) for prompt, one in both]
        case {"prompt_ids": _}:
            raise UnfitRowError("other_tokenizer")
        case _:
            raise UnfitRowError("unknown_columns")
    if pair[0].ids == pair[1].ids:
        raise UnfitRowError("chosen_is_rejected")
    return [pair], "prompt_ids" in values and ours


def _require_own(ours: bool) -> None:
    if not ours:
        raise UnfitRowError("other_tokenizer")


def _going_on(prompt: Any, reply: Any, tools: Any, renderer: Renderer) -> Tokens:
    """One sequence of a prompt and what follows it, both texts or both messages."""
    if isinstance(prompt, str) and isinstance(reply, str):
        return _completion(prompt, reply, renderer)
    if not isinstance(prompt, list) or not isinstance(reply, list):
        raise UnfitRowError("unknown_columns")
    made = _conversation([*prompt, *reply], len(prompt), tools, renderer)
    if len(made) != 1:
        raise UnfitRowError("reply_not_in_one_sequence")
    return made[0]


def _completion(prompt: str, completion: str, renderer: Renderer) -> Tokens:
    if not completion:
        raise UnfitRowError("no_reply")
    return renderer.completion(prompt, completion)


def _conversation(messages: Sequence[Message], first: int, tools: Any, renderer: Renderer) -> list[Tokens]:
    """Sequences of a conversation; the assistant's messages from `first` on are trained, but for those of weight 0.

    A greeting that nothing stands before is none: no engine is asked with nothing.
    """
    if not all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages):
        raise UnfitRowError("unknown_messages")
    trained = [at >= max(first, 1) and one["role"] == "assistant" and one.get("weight", 1) != 0 for at, one in enumerate(messages)]
    if not any(trained):
        raise UnfitRowError("no_reply")
    renderer.require_template()
    return renderer.conversation(messages, trained, tools if isinstance(tools, list) else None)


def digest_of(examples: Iterable[Example]) -> str:
    """A name for exactly these examples in this order: 16 hex digits of SHA-256."""
    import hashlib

    digest = hashlib.sha256()
    for one in examples:
        for tokens in one.sequences:
            for values in (tokens.ids, tokens.mask):
                digest.update(np.asarray([len(values), *values], np.int64).tobytes())
    return digest.hexdigest()[:16]


def batches(examples: Sequence[Example], settings: TuningSettings) -> list[list[int]]:
    """Places of the examples of each optimiser step, over all epochs; every epoch in an order of its own."""
    steps: list[list[int]] = []
    for epoch in range(settings.epochs):
        order = np.random.default_rng((settings.seed, epoch)).permutation(len(examples)).tolist()
        steps += [order[at : at + settings.batch_size] for at in range(0, len(order), settings.batch_size)]
    return steps
