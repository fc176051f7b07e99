"""The gateway's spill: what was appended is there, whole and in order, whatever befalls the process or the file's tail."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.recorder import spill
from gateway.recorder.spill import Spill, frames
from spangrad.errors import GatewayError

SPANS = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=6)
HEADER_BYTES = 8
FILES = settings(deadline=None, max_examples=60)
"""A disk takes its time."""


def contents(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(directory.glob("*.spill")))


def framed(directory: Path, spans: list[bytes]) -> bytes:
    """The bytes that a spill makes of spans."""
    for path in directory.glob("*"):
        path.unlink()
    kept = Spill(directory)
    for span in spans:
        kept.append(span)
    data = contents(directory)
    kept.close()
    return data


def all_of(kept: Spill, limit: int = 2**20) -> tuple[list[bytes], int]:
    """Every span that is not released, and the bytes that were left out."""
    spans: list[bytes] = []
    place, damaged = kept.begin, 0
    while place < kept.end:
        piece = kept.extent(place).read(limit)
        spans += [one.span for one in piece.spans]
        place, damaged = piece.end, damaged + piece.damaged
    return spans, damaged


def reopened(directory: Path) -> list[bytes]:
    kept = Spill(directory)
    spans, _ = all_of(kept)
    kept.close()
    return spans


@FILES
@given(spans=SPANS, data=st.data())
def test_spill_cut_at_any_byte_loses_only_cut_spans(
    spans: list[bytes], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = framed(directory := tmp_path_factory.mktemp("spill"), spans)
    cut = data.draw(st.integers(0, len(whole)))
    ends = [sum(HEADER_BYTES + len(span) for span in spans[: place + 1]) for place in range(len(spans))]
    (path,) = directory.glob("*.spill")
    path.write_bytes(whole[:cut])
    assert reopened(directory) == [span for span, end in zip(spans, ends, strict=True) if end <= cut]


@FILES
@given(spans=SPANS, data=st.data())
def test_spill_flipped_byte_in_last_frame_loses_only_its_span(
    spans: list[bytes], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = bytearray(framed(directory := tmp_path_factory.mktemp("spill"), spans))
    at = data.draw(st.integers(len(whole) - HEADER_BYTES - len(spans[-1]), len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    (path,) = directory.glob("*.spill")
    path.write_bytes(whole)
    assert reopened(directory) == spans[:-1]


@FILES
@given(spans=SPANS, data=st.data())
def test_spill_flipped_byte_in_span_or_checksum_loses_only_that_span(
    spans: list[bytes], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = bytearray(framed(tmp_path_factory.mktemp("spill"), spans))
    which = data.draw(st.integers(0, len(spans) - 1))
    begin = sum(HEADER_BYTES + len(span) for span in spans[:which])
    whole[begin + data.draw(st.integers(4, HEADER_BYTES + len(spans[which]) - 1))] ^= data.draw(st.integers(1, 255))
    read, end, damaged = frames(bytes(whole))
    assert [span for span, _ in read] == [*spans[:which], *spans[which + 1 :]]
    assert (end, damaged) == (len(whole), HEADER_BYTES + len(spans[which]))


@FILES
@given(spans=SPANS, zeros=st.integers(1, 50))
def test_spill_trailing_zeros_are_no_span(spans: list[bytes], zeros: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    whole = framed(directory := tmp_path_factory.mktemp("spill"), spans)
    (path,) = directory.glob("*.spill")
    path.write_bytes(whole + bytes(zeros))
    assert reopened(directory) == spans


@FILES
@given(spans=SPANS, segment_bytes=st.integers(1, 100), limit=st.integers(1, 100), released=st.integers(0, 6), restart=st.booleans())
def test_spill_order_is_kept_over_segments_restarts_and_releases(
    spans: list[bytes], segment_bytes: int, limit: int, released: int, restart: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("spill")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spill, "SEGMENT_BYTES", segment_bytes)
        kept = Spill(directory)
        ends = [kept.append(span) for span in spans]
        assert all_of(kept, limit) == (spans, 0)
        released = min(released, len(spans))
        if released:
            kept.release(ends[released - 1])
        assert kept.waiting_bytes == sum(HEADER_BYTES + len(span) for span in spans[released:])
        if restart:
            kept.close()
            kept = Spill(directory)
            left, _ = all_of(kept)
            # What was released may come again, up to a segment of it; what was not is there.
            assert left == spans[len(spans) - len(left) :]
            assert len(left) >= len(spans) - released
            spans, released = left, 0
        kept.append(b"one more")
        assert all_of(kept, limit) == ([*spans[released:], b"one more"], 0)
        kept.close()


def test_spill_released_segments_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "SEGMENT_BYTES", 100)
    kept = Spill(tmp_path)
    ends = [kept.append(bytes(42)) for _ in range(4)]
    assert sorted(path.name for path in tmp_path.glob("*.spill")) == [f"{place:020}.spill" for place in (0, 100)]
    kept.release(ends[0])
    assert len(list(tmp_path.glob("*.spill"))) == 2
    kept.release(ends[2])
    assert [path.name for path in tmp_path.glob("*.spill")] == [f"{100:020}.spill"]
    kept.release(ends[3])
    kept.close()
    assert list(tmp_path.glob("*.spill")) == []


def test_spill_directory_in_use_raises(tmp_path: Path) -> None:
    kept = Spill(tmp_path)
    with pytest.raises(GatewayError) as caught:
        Spill(tmp_path)
    assert str(caught.value) == (
        f"gateway.spill_path = {tmp_path} is in use by the gateway of process {os.getpid()}. "
        "Stop that one, or set gateway.spill_path to another directory."
    )
    kept.close()
    Spill(tmp_path).close()


def test_spill_path_not_a_directory_raises(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(GatewayError, match=r"gateway.spill_path = .*file cannot be used: File exists\. Set it to a directory"):
        Spill(tmp_path / "file")


def test_spill_append_on_full_disk_leaves_nothing_partial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Spill(tmp_path)
    kept.append(b"first")
    before = contents(tmp_path)
    writev = os.writev

    def full(file: int, parts: list[bytes]) -> int:
        """Takes half of what it is given, as a disk does that gets full."""
        data = b"".join(parts)
        return writev(file, [data[: len(data) // 2]])

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        with pytest.raises(OSError, match="No space left") as caught:
            kept.append(b"second")
        assert caught.value.errno == errno.ENOSPC
    assert contents(tmp_path) == before
    kept.append(b"third")
    assert all_of(kept) == ([b"first", b"third"], 0)
    kept.close()


def test_spill_partial_frame_that_cannot_be_removed_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Spill(tmp_path)
    writev = os.writev

    def broken(file: int, parts: list[bytes]) -> int:
        writev(file, [b"half of a frame"])
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def stuck(file: int, size: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    kept.append(b"first")
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", broken)
        patch.setattr(os, "ftruncate", stuck)
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output"):
                kept.append(b"second")
    kept.append(b"third")
    assert all_of(kept) == ([b"first", b"third"], 0)
    kept.close()
    assert reopened(tmp_path) == [b"first", b"third"]
