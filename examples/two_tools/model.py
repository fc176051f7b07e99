"""A tiny model that knows the form of the task's replies and nothing of their meaning.

In: a directory and a seed. Out: there, a Hugging Face model (Llama, 117k parameters, float32) and tokenizer (15 words)
after a short supervised warm start on replies with a random tool and a random city. What is left to learn is which tool
a city needs, and to repeat the city that was asked for.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

TOOLS = ("weather", "clock")
CITIES = ("paris", "rome", "oslo", "lima")
WORDS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "system", "user", "assistant", "tool", "say", "error", *TOOLS, *CITIES)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant{% endif %}"
)
MAX_TURNS = 3
WARM_UP_STEPS = 60
WARM_UP_ROWS = 64


Demonstration = tuple[list[int], list[int]]
"""Token ids of a prompt, and of a well-formed reply to it."""


def build_model(directory: Path, seed: int) -> None:
    """Make the model and write it to `directory`; the same seed gives the same weights on the same machine."""
    tokenizer, rng = word_tokenizer(WORDS), random.Random(seed)
    write_model(directory, tokenizer, seed, lambda: _demonstration(tokenizer, rng))


def write_model(directory: Path, tokenizer: PreTrainedTokenizerFast, seed: int, demonstrate: Callable[[], Demonstration]) -> None:
    """Make a model of the tokenizer's words from a seed, warm it up on demonstrations, and write both."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = random_llama(tokenizer, hidden=64, spread=0.15, tied=False)
    _warm_up(model, demonstrate)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)


def word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are words; the first three are the special ones of `WORDS`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    spelled = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    spelled.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=spelled, eos_token="<|im_end|>", pad_token="<|endoftext|>", additional_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def random_llama(tokenizer: PreTrainedTokenizerFast, *, hidden: int, spread: float, tied: bool) -> LlamaForCausalLM:
    """A Llama of two layers that knows nothing.

    Args:
        tokenizer: whose tokens it says.
        hidden: its width; that of its MLPs is twice as much.
        spread: standard deviation of its first weights.
        tied: whether the embedding is the head, too.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    ids = tokenizer.get_vocab()
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,  # the least that vLLM's attention takes
            max_position_embeddings=4096,  # what an engine reserves by default (engine.max_model_len)
            rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
            tie_word_embeddings=tied,
            initializer_range=spread,
            bos_token_id=None,
            eos_token_id=ids["<|im_end|>"],
            pad_token_id=ids["<|endoftext|>"],
            dtype="float32",
        )
    )


def _warm_up(model: LlamaForCausalLM, demonstrate: Callable[[], Demonstration]) -> None:
    """Supervised steps on well-formed replies."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(WARM_UP_STEPS):
        rows = [demonstrate() for _ in range(WARM_UP_ROWS)]
        width = max(len(prompt) + len(reply) for prompt, reply in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        labels = torch.full_like(ids, -100)
        for i, (prompt, reply) in enumerate(rows):
            end = len(prompt) + len(reply)
            ids[i, :end] = torch.tensor(prompt + reply)
            mask[i, :end] = 1
            labels[i, len(prompt) : end] = torch.tensor(reply)
        loss = model(ids, labels=labels, attention_mask=mask).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _demonstration(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Demonstration:
    """A dialogue with up to two failed turns: tool and city are drawn blindly, so that only the form is taught."""
    messages = [{"role": "user", "content": f"say {rng.choice(CITIES)}"}]
    for _ in range(rng.randrange(MAX_TURNS)):
        messages += [{"role": "assistant", "content": _reply(rng)}, {"role": "tool", "content": "error"}]
    prompt = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    return tokenizer.encode(prompt), tokenizer.encode(f"{_reply(rng)} <|im_end|>")


def _reply(rng: random.Random) -> str:
    return f"{rng.choice(TOOLS)} {rng.choice(CITIES)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the two-tools model.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    build_model(arguments.directory, arguments.seed)
