"""Points in time that options of commands give."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from commands.times import parse_time, parse_time_or_age
from spangrad.errors import SettingsError

NOW = datetime(2026, 3, 8, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("7d", datetime(2026, 3, 1, 12, tzinfo=UTC)),
        ("90m", datetime(2026, 3, 8, 10, 30, tzinfo=UTC)),
        ("2026-01-31", datetime(2026, 1, 31, tzinfo=UTC)),
        ("2026-01-31T12:00+02:00", datetime(2026, 1, 31, 10, tzinfo=UTC)),
    ],
)
def test_parse_time_or_age_returns_time_in_utc(text: str, time: datetime) -> None:
    assert parse_time_or_age("--since", text, NOW) == time


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("1000000d", "--since '1000000d' is before the year 1. Write 7d, 12h or 30m for how long ago."),
        ("9" * 5000 + "w", "is before the year 1."),
        ("1y", "2026-01-31T12:00+00:00. Or 7d, 12h or 30m for how long ago (s, m, h, d or w)."),
        ("yesterday", "--since 'yesterday' is no time. Write 2026-01-31,"),
        ("", "--since '' is no time."),
        ("0001-01-01T00:00+14:00", "is no time."),
    ],
)
def test_parse_time_or_age_out_of_range_raises(text: str, sentence: str) -> None:
    with pytest.raises(SettingsError) as raised:
        parse_time_or_age("--since", text, NOW)
    assert sentence in str(raised.value)
    assert len(str(raised.value)) < 200


def test_parse_time_takes_no_age() -> None:
    with pytest.raises(SettingsError, match="--as-of '7d' is no time"):
        parse_time("--as-of", "7d")
