"""Progress of the training as `spangrad up` reads it."""

from __future__ import annotations

import socket
import time

import pytest

from commands.services import progress
from commands.services.progress import ProgressReader
from spangrad.processes import wait_until
from spangrad.settings import Settings, StoreSettings
from spangrad.supervisor.status_text import TrainingProgress


def test_progress_of_a_store_that_hangs_is_unknown_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and never answers
        store = StoreSettings(url=f"http://127.0.0.1:{server.getsockname()[1]}")
        reader, began = ProgressReader(Settings(store=store)), time.monotonic()
        assert [reader.newest() for _ in range(5)] == [None] * 5
        assert time.monotonic() - began < 30


def test_progress_is_read_again_at_intervals_and_unknown_where_it_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SECONDS", 0.0)
    reader, step = ProgressReader(Settings()), 0

    def query() -> TrainingProgress:
        nonlocal step
        step += 1
        time.sleep(3600 if step > 2 else 0)
        return TrainingProgress(step=step)

    monkeypatch.setattr(reader, "_query", query)
    wait_until(lambda: reader.newest() == TrainingProgress(step=2), 30, "the second reading", poll_seconds=0.001)
    wait_until(lambda: reader.newest() is None and step == 3, 30, "the third reading, which is late", poll_seconds=0.001)
