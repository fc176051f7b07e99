"""Output of an action: what ends it, and that it does not depend on how the bytes were cut."""

from __future__ import annotations

import re
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from runner.tools.output import ActionOutput

MARKER = b"\x1emarker\x1f"
PATTERNS = [re.compile(rb"> $"), re.compile(rb"ba+\?")]
PIECES = st.sampled_from([b"text ", b"\x1emark", b"ba", b"a?", b"> ", MARKER, b"\n"])


def read(pieces: list[bytes], patterns: list[re.Pattern[bytes]], most_bytes: int = 2**16) -> tuple[str, str | None, bool]:
    output = ActionOutput(most_bytes, MARKER, patterns)
    ended = any(output.add(piece) for piece in pieces)
    return output.text(), output.matched, ended


@given(data=st.lists(PIECES, max_size=12).map(b"".join), cuts=st.sets(st.integers(0, 80)))
def test_output_cut_anywhere_is_the_same(data: bytes, cuts: set[int]) -> None:
    bounds = [0, *sorted(cut for cut in cuts if 0 < cut < len(data)), len(data)]
    pieces = [data[begin:end] for begin, end in pairwise(bounds)]
    assert read(pieces, PATTERNS[1:]) == read([data], PATTERNS[1:])
    before, marker, _ = data.partition(MARKER)
    assert read(pieces, []) == (before.decode(), None, bool(marker))


def test_match_ends_output_and_leaves_the_rest_unread() -> None:
    output = ActionOutput(100, MARKER, PATTERNS)
    assert output.add(b"one\nbaa? two" + MARKER)
    assert (output.text(), output.matched, output.unread) == ("one\n", r"ba+\?", b" two" + MARKER)


def test_match_behind_marker_is_of_no_action() -> None:
    assert read([b"one", MARKER + b"baa?"], PATTERNS) == ("one", None, True)


def test_pause_leaves_a_marker_that_has_begun_unread() -> None:
    output = ActionOutput(100, MARKER)
    assert not output.add(b"one" + MARKER[:4])
    output.pause()
    following = ActionOutput(100, MARKER)
    assert following.add(output.unread + MARKER[4:])
    assert (output.text(), following.text()) == ("one", "")


def test_long_output_keeps_beginning_and_end() -> None:
    text, _, ended = read([b"a" * 60, b"b" * 60, MARKER], [], most_bytes=20)
    assert ended
    assert text == f"{'a' * 10}\n[100 bytes left out]\n{'b' * 10}"
