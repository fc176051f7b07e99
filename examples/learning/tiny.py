"""A tiny Llama whose tokens are words, taught the form of its replies by supervised steps on made-up transcripts.

In: words, a seed and transcripts. Out: a Hugging Face model and tokenizer in a directory. Invariant: what is taught are the transcripts'
assistant messages (or the odds of their first words) and nothing else; the same seed gives the same weights on the same machine.

Sizes and rates are those at which the three tasks were seen to learn: about 230,000 parameters, AdamW at 3e-3.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.two_tools.model import random_llama, word_tokenizer

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "system", "user", "assistant", "tool")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m.role }} {% if m.content %}{{ m.content }} {% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments.values() | join(' ') }} {% endfor %}"
    "<|im_end|> {% endfor %}{% if add_generation_prompt %}<|im_start|> assistant{% endif %}"
)
"""A tool call is written as the model says it: the tool's name and its arguments, word by word (`word_calls.py` reads it back)."""
RATE = 3e-3
RATE_STEPS = 20
"""Steps over which the rate rises."""
LAST_PART = 0.3
"""Share of the steps that have LAST_RATE of the rate."""
LAST_RATE = 0.3

Transcript = Sequence[Mapping[str, Any]]
"""Messages, role and content, of a whole conversation. An assistant's may have `odds`: the probability of each word as its first, which is
taught in place of the word that was drawn."""
Taught = Mapping[int, Mapping[int, float]]
"""Position in a transcript -> token -> probability."""


def make_model(
    directory: Path, words: Iterable[str], seed: int, transcript: Callable[[random.Random], Transcript], *, steps: int, rows: int
) -> None:
    """Make a model of these words, warm it up and write it.

    Args:
        directory: where to.
        words: the vocabulary; repeated ones count once.
        seed: of weights and transcripts.
        transcript: draws one.
        steps: supervised steps.
        rows: transcripts a step.
    """
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer = word_tokenizer(tuple(dict.fromkeys((*SPECIAL, *words))))
    tokenizer.chat_template = CHAT_TEMPLATE
    model, rng = random_llama(tokenizer, hidden=96, spread=0.12, tied=True), random.Random(seed + 1000)
    _warm_up(model, steps, lambda: [encoded(tokenizer, transcript(rng)) for _ in range(rows)])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)


def encoded(tokenizer: PreTrainedTokenizerFast, transcript: Transcript) -> tuple[list[int], Taught]:
    """Token ids of a transcript, and what is taught of them: the words of the assistant's messages and the end of each."""
    ids: list[int] = []
    taught: dict[int, Mapping[int, float]] = {}
    vocabulary = tokenizer.get_vocab()
    unknown = vocabulary[SPECIAL[0]]
    for message in transcript:
        ids += (vocabulary["<|im_start|>"], vocabulary[message["role"]])
        begin = len(ids)
        ids += (vocabulary.get(word, unknown) for word in f"{message['content']} <|im_end|>".split())
        if message["role"] == "assistant":
            taught |= {place: {ids[place]: 1.0} for place in range(begin, len(ids))}
            if odds := message.get("odds"):
                taught[begin] = {vocabulary[word]: probability for word, probability in odds.items()}
    return ids, taught


def _warm_up(model: LlamaForCausalLM, steps: int, draw: Callable[[], Sequence[tuple[list[int], Taught]]]) -> None:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / RATE_STEPS) * (1 if step < steps * (1 - LAST_PART) else LAST_RATE)
        rows = draw()
        width = max(len(ids) for ids, _ in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        for row, (tokens, _) in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        # Padding is on the right and attention causal, so no mask is needed.
        logprobs = model(ids).logits.log_softmax(-1)
        entries = [
            (row, place - 1, token, probability)
            for row, (_, taught) in enumerate(rows)
            for place, odds in taught.items()
            for token, probability in odds.items()
        ]
        *places, weights = (torch.tensor(column) for column in zip(*entries, strict=True))
        loss = -(weights * logprobs[tuple(places)]).sum() / sum(len(taught) for _, taught in rows)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"warm start, step {step}: loss {float(loss.detach()):.3f}", flush=True)


def model_command(make: Callable[[Path, int], None]) -> None:
    """The command line of a module that makes a model: `DIRECTORY [--seed N]`."""
    parser = argparse.ArgumentParser(description="Make the example's model.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make(arguments.directory, arguments.seed)
