"""Texts of token ids, by the tokenizer that the engine reported.

In: a tokenizer's hash, ids. Out: the text of each token. Invariant: ids are decoded by a tokenizer of that hash or not at all; the texts of
a sequence, joined, are the sequence decoded, so that a character of several tokens is the text of its last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from spangrad.errors import CheckpointError
from spangrad.weights.checksums import tokenizer_hash

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class TokenTexts:
    """Tokenizers that were found, by their hash."""

    def __init__(self, directories: Callable[[str], Iterable[Path]]) -> None:
        """Store the function that returns the directories in which a tokenizer of a hash may be."""
        self._directories = directories
        self._tokenizers: dict[str, Tokenizer] = {}
        self._lock = threading.Lock()

    def pieces(self, hash_: str, *sequences: Sequence[int]) -> tuple[list[list[str]] | list[None], str]:
        """Return the texts of the tokens of each sequence, and a sentence where there are none: they are then None."""
        tokenizer, problem = self._tokenizer(hash_)
        if tokenizer is None:
            return [None] * len(sequences), problem
        return [_decoded(tokenizer, ids) for ids in sequences], ""

    def _tokenizer(self, hash_: str) -> tuple[Tokenizer | None, str]:
        from tokenizers import Tokenizer

        if not hash_:
            return None, "The engine reported no tokenizer, so that the tokens have no texts here."
        with self._lock:
            if hash_ not in self._tokenizers:
                for directory in self._directories(hash_):
                    if _hash_of(directory) == hash_:
                        self._tokenizers[hash_] = Tokenizer.from_file(str(directory / "tokenizer.json"))
                        break
            tokenizer = self._tokenizers.get(hash_)
        problem = f"No directory of this machine holds the tokenizer {hash_}: set engine.model or trainer.model to the model's."
        return tokenizer, "" if tokenizer else problem


def _decoded(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    from tokenizers.decoders import DecodeStream

    stream, texts = DecodeStream(skip_special_tokens=False), list[str]()
    for token in ids:
        if tokenizer.id_to_token(token) is None:
            texts.append(f"[{token}]")
            stream = DecodeStream(skip_special_tokens=False)
        else:
            texts.append(stream.step(tokenizer, token) or "")
    return texts


def _hash_of(directory: Path) -> str:
    """Return the hash of a directory's tokenizer. Empty: it holds none that can be read."""
    try:
        return tokenizer_hash(directory)
    except (CheckpointError, OSError, ValueError):
        return ""
