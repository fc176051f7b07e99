"""A tiny model with random weights that spells in ASCII: enough to fill in JSON where a grammar holds its hand."""

from __future__ import annotations

from pathlib import Path

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)


def build_spelling_model(directory: Path) -> None:
    """Make the model and write it to `directory`."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
    spelled = [letters.pre_tokenize_str(one)[0][0] for one in CHARACTERS]
    vocabulary = {token: place for place, token in enumerate([*SPECIAL, *spelled])}
    words = Tokenizer(models.BPE(vocabulary, []))
    words.pre_tokenizer = letters
    words.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<|im_end|>", pad_token="<|endoftext|>", additional_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,  # the least that vLLM's attention takes
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=vocabulary["<|im_end|>"],
            pad_token_id=vocabulary["<|endoftext|>"],
            dtype="float32",
        )
    )
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
