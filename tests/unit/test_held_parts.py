"""A rank's copy of its parts: its sums follow the words, whether they are read anew or known from what changed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spangrad.weights import sums as sums_module
from spangrad.weights.shards import ChecksumScope
from spangrad.weights.sums import tensor_sums
from trainer.publish import parts as parts_module
from trainer.publish.parts import HeldParts
from trainer.publish.shared_file import FilePart

SIZES = (700, 40)
FIRST = 300
"""Number of the first word of each part in its tensor."""


def parts(named: list[np.ndarray]) -> list[FilePart]:
    return [FilePart(f"w{number}", (FIRST + each.size + 5,), FIRST, each) for number, each in enumerate(named)]


def moved(named: list[np.ndarray], share: float, seed: int) -> list[np.ndarray]:
    """Return the weights with about this share of them changed."""
    generator = np.random.default_rng(seed)
    return [each * np.where(generator.random(each.size) < share, np.float32(1.01), np.float32(1)) for each in named]


@settings(deadline=None)
@given(
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    steps=st.lists(st.tuples(st.sampled_from([0, 0.01, 0.05, 0.9]), st.booleans(), st.booleans()), min_size=1, max_size=6),
)
def test_sums_of_held_parts_equal_those_of_a_new_copy(dtype: str, steps: list[tuple[float, bool, bool]]) -> None:
    """Asked for after each version or not, with changes kept or not, few or many."""
    named = [np.random.default_rng(0).normal(size=size).astype(np.float32) for size in SIZES]
    held = HeldParts(dtype)
    for version, (share, keep, ask) in enumerate(steps):
        named = moved(named, share, version)
        held.take(parts(named), str(version), keep_changes=keep)
        if ask or version == len(steps) - 1:
            new = HeldParts(dtype)
            new.take(parts(named), "new", keep_changes=False)
            for others in ({}, {"w0": "float32"}):
                for scope in (ChecksumScope.FULL, ChecksumScope.SAMPLED):
                    assert held.sums(others, scope) == new.sums(others, scope)


def test_sums_of_held_parts_read_no_word_that_did_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[int]()

    def counted(words: np.ndarray, *arguments: object, **rest: object) -> object:
        read.append(words.size)
        return tensor_sums(words, *arguments, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(parts_module, "tensor_sums", counted)
    mixed = list[int]()
    original = sums_module.mixed_words
    named = [np.random.default_rng(0).normal(size=size).astype(np.float32) for size in SIZES]
    held = HeldParts("bfloat16")
    held.take(parts(named), "0", keep_changes=True)
    held.sums({}, ChecksumScope.FULL)
    assert read == list(SIZES)
    monkeypatch.setattr(sums_module, "mixed_words", lambda words: (mixed.append(words.size), original(words))[1])
    held.take(parts(moved(named, 0.02, seed=1)), "1", keep_changes=True)
    held.sums({}, ChecksumScope.FULL)
    assert read == list(SIZES)
    assert 0 < sum(mixed) < sum(SIZES) / 10
