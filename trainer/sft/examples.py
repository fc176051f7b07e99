"""Examples of a run of `spangrad finetune`: rows of files as token sequences, and rows that cannot be trained, counted by reason.

Invariant: ids that a row holds are used as they are; only a row without ids of this tokenizer is tokenised. Every row of every file is
trained, held out or counted in `left_out`; the same files give the same examples in the same order.

Held-out rows are drawn by groups of rollouts, so that no measured group was trained; rows of rollouts of mode `validate` (or `probe`) are
always held out.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from spangrad.errors import TrainerError
from spangrad.probing.model import configured, vocabulary_size
from spangrad.settings import FinetuneSettings
from trainer.data.source import AttemptKey, BatchRollout
from trainer.sft.files import ExampleFile, FileRow, read_rows
from trainer.sft.objective import Method
from trainer.sft.rendering import Message, Renderer, TokenSequence, UnfitRowError

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
"""Known columns."""


@dataclass(frozen=True, slots=True)
class Example:
    """Unit of a batch: a sequence, or in preference training a chosen and a rejected one."""

    sequences: tuple[TokenSequence, ...]
    unit: str
    source: ExampleFile
    origins: tuple[BatchRollout, ...]


@dataclass(slots=True)
class Examples:
    """Examples of files, with counts of their rows."""

    trained: list[Example] = field(default_factory=list[Example])
    held_out: list[Example] = field(default_factory=list[Example])
    rows: int = 0
    """Number of rows of the files."""
    with_ids: int = 0
    """Number of rows whose own token ids are used."""
    rendered: int = 0
    """Number of rows that were tokenised here."""
    left_out: Counter[str] = field(default_factory=Counter[str])
    """Number of rows that are neither trained nor held out, by reason."""
    unread: set[str] = field(default_factory=set[str])
    """Unknown columns, which are ignored."""


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """Limits of examples for a policy."""

    vocabulary: int
    """Size of the vocabulary: token ids are smaller."""
    longest: int
    """Largest number of tokens of a sequence."""
    device: int
    """Largest number of tokens of an example, whose sequences are processed on a device together."""
    tokenizer: str
    """Hash of the policy's tokenizer."""

    @classmethod
    def of(cls, model: Path, tokenizer: str, settings: FinetuneSettings, device: int) -> LengthLimits:
        """Return the limits of a model directory.

        Raises:
            TrainerError: its config.json has no vocab_size.
            SettingsError: its config.json is not a JSON object.
        """
        vocabulary = vocabulary_size(model)
        if vocabulary is None:
            raise TrainerError(f"{model / 'config.json'} has no vocab_size, without which token ids cannot be checked. Add it.")
        lengths = (configured(model).context_tokens, settings.max_tokens, device)
        return cls(vocabulary, min(length for length in lengths if length), device, tokenizer)


def read_examples(
    sources: Sequence[ExampleFile],
    method: Method,
    renderer: Renderer,
    limits: LengthLimits,
    settings: FinetuneSettings,
    known: Collection[AttemptKey] = (),
) -> Examples:
    """Read all examples of some files; rows of attempts that are `known`, as the branch has trained them, are `trained_before`.

    Raises:
        TrainerError: a file is damaged, or nothing is left to train; the message names the reason.
    """
    examples = Examples()
    measured: list[Example] = []
    remaining: list[Example] = []
    for source in sources:
        for row in read_rows(source):
            examples.rows += 1
            try:
                if row.is_of_no_use:
                    raise UnfitRowError("mode_not_trained")
                if not row.is_held_out and any(origin.key in known for origin in row.origins):
                    raise UnfitRowError("trained_before")
                row_examples = list(_examples(row, method, renderer, limits, examples))
            except UnfitRowError as unfit:
                examples.left_out[str(unfit)] += 1
                continue
            except RecursionError:
                examples.left_out["nested_too_deep"] += 1
                continue
            (measured if row.is_held_out else remaining).extend(row_examples)
    units = list(dict.fromkeys(example.unit for example in remaining))
    rng = np.random.default_rng(settings.seed)
    drawn = rng.permutation(len(units))[: round(settings.held_out * len(units))]
    chosen = {units[at] for at in drawn}
    examples.trained = [example for example in remaining if example.unit not in chosen]
    examples.held_out = measured + [example for example in remaining if example.unit in chosen]
    if not examples.trained:
        raise TrainerError(_nothing_to_train(examples, sources, method))
    return examples


def _nothing_to_train(examples: Examples, sources: Sequence[ExampleFile], method: Method) -> str:
    files = ", ".join(source.name for source in sources)
    why = ", ".join(f"{count} {reason}" for reason, count in sorted(examples.left_out.items()))
    held = f", {len(examples.held_out)} held out" if examples.held_out else ""
    if examples.left_out.keys() == {"trained_before"}:
        return f"nothing in {files} is left to train: of {examples.rows} rows {why}{held}. Give --again to train them once more."
    return (
        f"nothing in {files} can be trained: of {examples.rows} rows {why or 'none is left out'}{held}. {method} reads these columns: "
        f"{_KNOWN[method]} (docs/guides/finetuning.md)."
    )


def _examples(row: FileRow, method: Method, renderer: Renderer, limits: LengthLimits, counts: Examples) -> Iterator[Example]:
    if "PromptIds" not in row.values:  # else a whole transition, whose columns are all known
        counts.unread.update(row.values.keys() - _READ)
    same_tokenizer = row.tokenizers <= {limits.tokenizer}
    read = _supervised if method == "sft" else _pair
    sequences, has_ids = read(row.values, renderer, same_tokenizer)
    for group in sequences:
        for sequence in group:
            _check(sequence, limits)
        if sum(len(sequence.ids) for sequence in group) > limits.device:
            raise UnfitRowError("too_long")
    counts.with_ids += has_ids
    counts.rendered += not has_ids
    yield from (Example(tuple(group), row.unit, row.source, row.origins) for group in sequences)


def _check(tokens: TokenSequence, limits: LengthLimits) -> None:
    tokens.mask[:1] = [0] * len(tokens.mask[:1])  # nothing stands before it, so that it has no probability
    if len(tokens.ids) != len(tokens.mask):
        raise UnfitRowError("mask_of_other_length")
    if not any(tokens.mask):
        raise UnfitRowError("no_reply")
    if len(tokens.ids) > limits.longest:
        raise UnfitRowError("too_long")
    if not all(type(token) is int and 0 <= token < limits.vocabulary for token in tokens.ids):  # a file may hold anything
        raise UnfitRowError("unknown_token")
    if not all(bit in (0, 1) for bit in tokens.mask):
        raise UnfitRowError("mask_not_0_or_1")


def _supervised(values: Mapping[str, Any], renderer: Renderer, same_tokenizer: bool) -> tuple[list[list[TokenSequence]], bool]:
    """Return the sequences of a row, and whether their ids are its own."""
    match values:
        case {"input_ids": list(), "loss_mask": list()} | {"PromptIds": list(), "ResponseIds": list()} if not same_tokenizer:
            raise UnfitRowError("other_tokenizer")
        case {"input_ids": list(ids), "loss_mask": list(mask)}:
            return [[TokenSequence(list(ids), list(mask))]], True
        case {"PromptIds": list(prompt), "ResponseIds": list(response)}:
            return [[TokenSequence([*prompt, *response], [0] * len(prompt) + [1] * len(response))]], True
        case {"messages": list(messages)}:
            return [[sequence] for sequence in _conversation(messages, 0, values.get("tools"), renderer)], False
        case {"prompt": str(prompt), "completion": str(completion)}:
            return [[_completion(prompt, completion, renderer)]], False
        case {"prompt": list(prompt), "completion": list(completion)}:
            return [[sequence] for sequence in _conversation([*prompt, *completion], len(prompt), values.get("tools"), renderer)], False
        case _:
            raise UnfitRowError("unknown_columns")


def _pair(values: Mapping[str, Any], renderer: Renderer, same_tokenizer: bool) -> tuple[list[list[TokenSequence]], bool]:
    """Return the chosen and rejected sequences of a row, and whether their ids are its own."""
    has_ids = False
    match values:
        case {
            "prompt_ids": list(prompt),
            "chosen_ids": list(chosen),
            "chosen_mask": list(chosen_mask),
            "rejected_ids": list(rejected),
            "rejected_mask": list(rejected_mask),
        } if same_tokenizer:
            before, has_ids = [0] * len(prompt), True
            pair = [TokenSequence([*prompt, *chosen], before + chosen_mask), TokenSequence([*prompt, *rejected], before + rejected_mask)]
        case {"prompt": prompt, "chosen": chosen, "rejected": rejected}:
            pair = [_continuation(prompt, reply, values.get("tools"), renderer) for reply in (chosen, rejected)]
        case {"input": {"messages": prompt, **more}, "preferred_output": chosen, "non_preferred_output": rejected}:
            pair = [_continuation(prompt, reply, more.get("tools"), renderer) for reply in (chosen, rejected)]
        case {"chosen": list(chosen), "rejected": list(rejected)}:  # whole conversations that begin alike
            common_length = next(
                (at for at, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), min(len(chosen), len(rejected))
            )
            both = ((messages[:common_length], messages[common_length:]) for messages in (chosen, rejected))
            pair = [_continuation(prompt, reply, values.get("tools"), renderer) for prompt, reply in both]
        case {"prompt_ids": _} if not same_tokenizer:
            raise UnfitRowError("other_tokenizer")
        case _:
            raise UnfitRowError("unknown_columns")
    if pair[0].ids == pair[1].ids:
        raise UnfitRowError("chosen_is_rejected")
    return [pair], has_ids


def _continuation(prompt: Any, reply: Any, tools: Any, renderer: Renderer) -> TokenSequence:
    """Return one sequence of a prompt and its reply, both texts or both messages."""
    if isinstance(prompt, str) and isinstance(reply, str):
        return _completion(prompt, reply, renderer)
    if not isinstance(prompt, list) or not isinstance(reply, list):
        raise UnfitRowError("unknown_columns")
    sequences = _conversation([*prompt, *reply], len(prompt), tools, renderer)
    if len(sequences) != 1:
        raise UnfitRowError("reply_not_in_one_sequence")
    return sequences[0]


def _completion(prompt: str, completion: str, renderer: Renderer) -> TokenSequence:
    if not completion:
        raise UnfitRowError("no_reply")
    return renderer.completion(prompt, completion)


def _conversation(messages: Sequence[Message], first: int, tools: Any, renderer: Renderer) -> list[TokenSequence]:
    """Return the sequences of a conversation; the assistant's messages from `first` on are trained, except those of weight 0.

    An assistant's message at the beginning is not trained: no engine samples from an empty prompt.
    """
    if not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages):
        raise UnfitRowError("unknown_messages")
    trained = [at >= max(first, 1) and it["role"] == "assistant" and it.get("weight", 1) != 0 for at, it in enumerate(messages)]
    if not any(trained):
        raise UnfitRowError("no_reply")
    renderer.require_template()
    return renderer.conversation(messages, trained, _tool_list(tools))


def _tool_list(tools: Any) -> list[Any]:
    """Return the tools of a row, which many public data sets hold as a text of JSON."""
    try:
        tools = json.loads(tools) if tools and isinstance(tools, str) else tools or []
    except ValueError as error:
        raise UnfitRowError("unknown_tools") from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UnfitRowError("unknown_tools")
    return tools


def digest_of(examples: Iterable[Example]) -> str:
    """Return a digest of exactly these examples in this order: 16 hexadecimal digits of SHA-256."""
    import hashlib

    digest = hashlib.sha256()
    for example in examples:
        for tokens in example.sequences:
            for values in (tokens.ids, tokens.mask):
                digest.update(np.asarray([len(values), *values], np.int64).tobytes())
    return digest.hexdigest()[:16]


def batches(examples: Sequence[Example], settings: FinetuneSettings) -> list[list[int]]:
    """Return the indices of the examples of each optimizer step, over all epochs; every epoch in an order of its own."""
    steps: list[list[int]] = []
    for epoch in range(settings.epochs):
        order = np.random.default_rng((settings.seed, epoch)).permutation(len(examples)).tolist()
        steps += [order[at : at + settings.batch_size] for at in range(0, len(order), settings.batch_size)]
    return steps
