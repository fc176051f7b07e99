"""Events of runs: what waits for them, and what is left of those that nothing waits for."""

from __future__ import annotations

from runner.queue.notifier import Notifier


def test_notifier_keeps_no_event_that_nothing_waits_for() -> None:
    notifier = Notifier()
    awaited = notifier.of("awaited")
    notifier.of("left")
    assert list(notifier.awaited) == ["awaited"]
    assert notifier.of("awaited") is awaited
    notifier.notify("awaited")
    assert awaited.is_set()
    assert not notifier.of("awaited").is_set()
