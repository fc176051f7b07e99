"""Files that several processes write at once: whole tensors for any reader, whichever process is first, and sums of the whole."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from spangrad.weights.checksums import sums_of_directory
from spangrad.weights.shards import added
from trainer.publish import shared_file
from trainer.publish.shared_file import FilePart, sums_of_parts, write_parts


def split(tensors: dict[str, torch.Tensor], ranks: int) -> list[list[FilePart]]:
    """Return each rank's parts, words divided as evenly as they are not."""
    parts: list[list[FilePart]] = [[] for _ in range(ranks)]
    for name, tensor in tensors.items():
        cuts = [tensor.numel() * (rank * rank) // (ranks * ranks) for rank in range(ranks + 1)]
        for rank, (first, end) in enumerate(itertools.pairwise(cuts)):
            parts[rank].append(FilePart(name, tuple(tensor.shape), first, tensor.reshape(-1)[first:end].numpy()))
    return parts


@given(
    st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=5),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_write_parts_in_any_order_makes_file_of_whole_tensors(tmp_path_factory: pytest.TempPathFactory, shapes, ranks, random) -> None:
    file = tmp_path_factory.mktemp("file") / "model.safetensors"
    tensors = {f"t{at}": torch.randn(shape) for at, shape in enumerate(shapes)}
    order = list(enumerate(split(tensors, ranks)))
    random.shuffle(order)
    for rank, parts in order:
        write_parts(file, parts, {"format": "pt"}, first=rank == 0)
    held = load_file(file)
    assert held.keys() == tensors.keys()
    assert all(torch.equal(held[name], value) for name, value in tensors.items())
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize("ranks", [1, 3])
def test_sums_of_parts_of_all_ranks_are_those_of_file(tmp_path: Path, ranks: int) -> None:
    tensors = {"a": torch.randn(7, 5), "b": torch.randn(3), "c": torch.zeros(4)}
    parts = split(tensors, ranks)
    for rank, own in enumerate(parts):
        write_parts(tmp_path / "model.safetensors", own, {}, first=rank == 0)
    assert added(item for own in parts for item in sums_of_parts(own).items()) == sums_of_directory(tmp_path)


def test_write_parts_continues_after_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(shared_file.os, "pwrite", lambda handle, data, offset: pwrite(handle, data[:7], offset))
    tensor = torch.randn(9, 3)
    write_parts(tmp_path / "file", split({"a": tensor}, 1)[0], {}, first=True)
    assert torch.equal(load_file(tmp_path / "file")["a"], tensor)


def test_write_parts_on_full_disk_raises_and_closes_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shared_file.os, "pwrite", full)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="No space left"):
        write_parts(tmp_path / "file", [FilePart("a", (2,), 0, np.zeros(2, np.float32))], {}, first=True)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
