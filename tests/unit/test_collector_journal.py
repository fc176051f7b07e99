"""The journal: what was appended comes back, and what is torn ends it, at whatever byte."""

from __future__ import annotations

import errno
import os
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collector.write.journal import Journal
from spangrad.errors import StoreError

BODIES = st.lists(st.binary(min_size=1, max_size=300), max_size=6)


def reopened(path: Path) -> list[bytes]:
    journal = Journal(path)
    try:
        return read_bodies(journal)
    finally:
        journal.close()


def read_bodies(journal: Journal) -> list[bytes]:
    """All bodies, each of which is read by its place, too."""
    bodies = list(journal.bodies())
    assert [journal.read(start, len(body)) for start, body in bodies] == [body for _, body in bodies]
    return [body for _, body in bodies]


@settings(deadline=None)
@given(groups=st.lists(BODIES, max_size=4), more=BODIES, cut=st.integers(0, 4000), flipped=st.none() | st.integers(0, 4000))
def test_journal_torn_at_any_byte_keeps_whole_bodies_before(
    groups: list[list[bytes]], more: list[bytes], cut: int, flipped: int | None
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal"
        journal = Journal(path)
        starts = [start for group in groups for start in journal.append(group)]
        assert starts == [start for start, _ in journal.bodies()]
        appended = [body for group in groups for body in group]
        assert read_bodies(journal) == appended
        journal.close()

        data = bytearray(path.read_bytes())
        head, kept = len(data) - sum(12 + len(body) for body in appended), len(data)
        if flipped is not None and head + flipped < len(data):
            data[head + flipped] ^= 1
            kept = head + flipped
        kept = min(kept, head + cut)
        path.write_bytes(data[: head + cut])
        whole, end = list[bytes](), head
        for body in appended:
            end += 12 + len(body)
            if end > kept:
                break
            whole.append(body)

        journal = Journal(path)
        assert read_bodies(journal) == whole
        journal.append(more)
        journal.close()
        assert reopened(path) == whole + more


@settings(deadline=None)
@given(lives=st.lists(BODIES, min_size=1, max_size=5))
def test_journal_cleared_bodies_are_not_read_again(lives: list[list[bytes]]) -> None:
    """Bodies before a clear are not read again, though parts of them may remain in the file behind the new bodies."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal"
        journal = Journal(path)
        for bodies in lives:
            journal.clear()
            assert journal.size == 0
            journal.append(bodies)
            assert journal.size == sum(12 + len(body) for body in bodies)
        journal.close()
        assert reopened(path) == lives[-1]


def test_journal_old_bodies_of_same_length_are_not_read_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append([b"old 1", b"old 2", b"old 3"])
    journal.clear()
    journal.append([b"new 1"])
    assert read_bodies(journal) == [b"new 1"]
    assert b"old 2" in (tmp_path / "journal").read_bytes()
    journal.close()

    assert reopened(tmp_path / "journal") == [b"new 1"]
    assert b"old 2" not in (tmp_path / "journal").read_bytes()


def test_journal_append_of_many_bodies_keeps_all(tmp_path: Path) -> None:
    bodies = [str(number).encode() for number in range(2000)]
    journal = Journal(tmp_path / "journal")
    journal.append(bodies)
    journal.close()

    assert reopened(tmp_path / "journal") == bodies


def test_journal_trailing_zeros_are_no_bodies(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append([b"a"])
    journal.close()
    with (tmp_path / "journal").open("ab") as file:
        file.write(bytes(4096))

    assert reopened(tmp_path / "journal") == [b"a"]


def test_journal_remains_that_name_a_huge_length_end_its_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append([b"a"])
    journal.close()
    with (tmp_path / "journal").open("ab") as file:
        file.write(struct.pack("<IQ", 2**31, 0) + b"remains")
    read, lengths = os.pread, list[int]()

    def recorded(file: int, length: int, at: int) -> bytes:
        lengths.append(length)
        return read(file, min(length, 1000), at)

    monkeypatch.setattr(os, "pread", recorded)

    assert reopened(tmp_path / "journal") == [b"a"]
    assert max(lengths) < 100


@pytest.mark.parametrize("short", [[], [3], [13], [3, 10]])
def test_journal_append_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: list[int]) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append([b"kept"])
    write, sizes = os.pwrite, iter(short)

    def new_rollouts(file: int, data: bytes, at: int) -> int:
        if size := next(sizes, 0):
            return write(file, data[:size], at)
        raise OSError(errno.ENOSPC, "no room")

    def some_pieces(file: int, pieces: list[bytes], at: int) -> int:
        return new_rollouts(file, b"".join(pieces), at)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", some_pieces)
        patched.setattr(os, "pwrite", new_rollouts)
        with pytest.raises(OSError, match="no room"):
            journal.append([b"lost", b"lost too"])
    journal.append([b"next"])
    journal.close()

    assert reopened(tmp_path / "journal") == [b"kept", b"next"]


def test_journal_clear_that_fails_loses_no_later_body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append([b"before"])

    def failing(*_: object) -> int:
        raise OSError(errno.EIO, "the disk fails")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", failing)
        with pytest.raises(OSError, match="the disk fails"):
            journal.clear()
    journal.append([b"after"])
    journal.close()

    assert reopened(tmp_path / "journal") == [b"before", b"after"]


def test_journal_partial_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "journal")
    write = os.pwrite

    def five_bytes(file: int, pieces: list[bytes], at: int) -> int:
        return write(file, b"".join(pieces)[:5], at)

    def four_bytes(file: int, data: bytes, at: int) -> int:
        return write(file, data[:4], at)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", five_bytes)
        patched.setattr(os, "pwrite", four_bytes)
        journal.append([b"first", b"second", b"third"])
    journal.close()

    assert reopened(tmp_path / "journal") == [b"first", b"second", b"third"]


def test_journal_keeps_free_space_for_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "journal")
    monkeypatch.setattr("collector.write.journal.KEPT_FREE", 2**62)

    with pytest.raises(OSError, match="256 MiB"):
        journal.append([b"a"])

    assert (journal.size, read_bodies(journal)) == (0, [])
    journal.close()


def test_journal_read_of_cut_body_raises(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    (start,) = journal.append([b"whole"])
    os.truncate(tmp_path / "journal", start + 3)

    with pytest.raises(OSError, match=r"of 5 bytes at .* there are 3"):
        journal.read(start, 5)
    journal.close()


def test_journal_of_other_format_raises(tmp_path: Path) -> None:
    (tmp_path / "journal").write_bytes(b"something else, long enough to be a head")

    with pytest.raises(StoreError, match="is not a journal that this version reads"):
        reopened(tmp_path / "journal")
