"""Rollouts that wait: what is due, and how long it has waited."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from spangrad.errors import SettingsError
from spangrad.http.json_http import text_of
from spangrad.processes import free_ports
from transition_builder import waiting
from transition_builder.metrics import BuilderMetrics, serve_metrics

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def pending(*ages: tuple[str, float, float]) -> pl.DataFrame:
    """Rollouts by name, with the seconds since their arrival and since they are due."""
    rows = [
        {"RunId": "run", "Mode": "train", "RolloutId": name, "TraceId": f"t-{name}", "IngestedAt": NOW - timedelta(seconds=age)}
        | {"DueAt": NOW - timedelta(seconds=due)}
        for name, age, due in ages
    ]
    return pl.DataFrame(rows)


def test_due_rows_are_new_or_due_by_now() -> None:
    rows = pending(("new", 0, 0), ("dated later", -1, -1), ("later", 100, -4), ("by now", 100, 5))
    assert waiting.due(rows, NOW)["RolloutId"].to_list() == ["new", "dated later", "by now"]


def test_checked_rows_are_due_again_after_a_twentieth_of_their_age() -> None:
    rows = pending(("checked", 100, 1), ("other", 100, 1))
    again = waiting.checked(rows, rows[:1], ["RolloutId"], NOW)
    assert again["DueAt"].to_list() == [NOW + timedelta(seconds=5), NOW - timedelta(seconds=1)]


def test_checked_rows_whose_age_decides_are_due_then_or_at_twice_their_age() -> None:
    rows = pending(("young", 20, 1), ("old", 500, 1), ("built by another", 100, 1))
    due = [NOW + timedelta(seconds=580), NOW + timedelta(seconds=100), None]
    judged = rows.select("RolloutId").with_columns(pl.Series("ChangesAt", due, pl.Datetime("us", "UTC")))
    again = waiting.checked(rows, judged, ["RolloutId"], NOW)
    assert again.columns == rows.columns
    assert again["DueAt"].to_list() == [NOW + timedelta(seconds=seconds) for seconds in (20, 100, 5)]


def test_seconds_until_due_is_that_of_the_first_row() -> None:
    rows = pending(("later", 100, -4), ("sooner", 20, -1))
    assert waiting.seconds_until_due(rows, NOW) == pytest.approx(1.0)
    assert waiting.seconds_until_due(rows, NOW, pl.duration(seconds=30)) == pytest.approx(4.0)
    assert waiting.seconds_until_due(rows.clear(), NOW) == float("inf")


def test_touched_rows_are_due_again() -> None:
    rows = pending(("named", 100, -5), ("traced", 100, -5), ("other", 100, -5))
    arrived = pl.DataFrame({"RolloutKey": ["named", "t-traced"], "TraceId": ["elsewhere", "t-traced"]})
    assert waiting.due(waiting.touched(rows, arrived), NOW)["RolloutId"].to_list() == ["named", "traced"]


def test_continued_traces_are_due_when_they_may_be_silent() -> None:
    rows = pending(("continued", 100, -500), ("sooner", 100, -5), ("other", 100, -500))
    arrived = pl.DataFrame({"TraceId": ["t-continued", "t-sooner"]})
    again = waiting.continued(rows, arrived, NOW + timedelta(seconds=30))
    assert again["DueAt"].to_list() == [NOW + timedelta(seconds=seconds) for seconds in (30, 5, 500)]


def test_rollouts_to_conclude_are_those_due_and_those_that_end_of_training() -> None:
    rows = pending(("just checked", 100, -4), ("long ago", 100, 5))
    ending = pl.concat([pending(("ended", 0, 0)), pending(("served", 0, 0)).with_columns(Mode=pl.lit("production"))])
    assert waiting.to_conclude(rows, ending, NOW).rows() == [("long ago", "t-long ago"), ("ended", "t-ended")]


def test_metrics_show_lag_and_waiting_rollouts_by_mode() -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(
        BuilderMetrics(lambda: waiting.lags(pending(("a", 5, 5), ("b", 3, 3)), silent(), NOW, ["train", "production", "trial"]))
    )
    text = generate_latest(registry).decode()
    assert 'spangrad_builder_lag_seconds{mode="train"} 5.0' in text
    assert 'spangrad_builder_waiting_rollouts{mode="train"} 2.0' in text
    assert 'spangrad_builder_lag_seconds{mode="production"} 7.0' in text
    assert 'spangrad_builder_waiting_rollouts{mode="production"} 1.0' in text
    assert 'spangrad_builder_waiting_rollouts{mode="trial"} 0.0' in text


def silent() -> pl.DataFrame:
    """A silent trace that no runner announced, of two names of its rows."""
    return pl.DataFrame({"Mode": ["", ""], "RolloutKey": ["t", "t"], "IngestedAt": [NOW - timedelta(seconds=7), NOW]})


def test_serve_metrics_beyond_loopback_without_token_raises() -> None:
    for host in ("0.0.0.0", "192.168.1.7"):
        address = f"{host}:{free_ports(1)[0]}"
        with pytest.raises(SettingsError, match=rf"metrics_address = '{address}' would listen beyond this machine without a token"):
            serve_metrics(address, dict, ["", None])


def test_serve_metrics_beyond_loopback_asks_for_token() -> None:
    (port,) = free_ports(1)
    serve_metrics(f"0.0.0.0:{port}", lambda: {"train": (5.0, 2)}, ["secret", "reader"])
    url = f"http://127.0.0.1:{port}/metrics"
    for token in (None, "wrong"):
        assert text_of(url, 30, token) is None
    for token in ("secret", "reader"):
        assert "spangrad_builder_waiting_rollouts" in (text_of(url, 30, token) or "")


def test_serve_metrics_at_an_unusable_address_raises_with_remedy() -> None:
    (port,) = free_ports(1)
    serve_metrics(f"127.0.0.1:{port}", dict, [])
    for unusable in (port, 99999):
        with pytest.raises(SettingsError, match=r"builder\.metrics_address = .* cannot be bound .*Choose another address"):
            serve_metrics(f"127.0.0.1:{unusable}", dict, [])
