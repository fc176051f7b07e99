"""Publication of a branch's head in the background, while gateway or ledger fail."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

from spangrad.errors import GatewayError, LedgerError
from spangrad.settings.sources import load_settings
from spangrad.types import PolicyVersion
from trainer.publish.publishing import HeadPublisher
from trainer.shutdown import Shutdown

HEAD = SimpleNamespace(version=1, policy_version=PolicyVersion("policy", 1, 0, "batch", "float32:0", "/nowhere"))


class FailingLedger:
    """A ledger that fails once, at its fourth question for the head: when the background has published it."""

    questions = 0

    def frontier(self) -> SimpleNamespace:
        self.questions += 1
        if self.questions == 4:
            raise LedgerError("disk I/O error")
        return HEAD

    def statuses(self) -> dict[int, None]:
        return {}


class FailingPublisher:
    """A publisher whose gateway is away at first."""

    usage = None
    stages = sent = cast("dict[str, float]", {})
    published = 0

    def served(self, policy: str) -> int:
        return 0

    def publish(self, *_: object, **__: object) -> float:
        self.published += 1
        if self.published == 1:
            raise GatewayError("the gateway is away")
        return 0.0


def test_publication_in_background_is_repeated_after_ledger_error() -> None:
    phases = SimpleNamespace(is_updated=lambda: True, enter=list[int]().append)
    parts: list[Any] = [FailingPublisher(), FailingLedger(), load_settings({}, env={}), Shutdown(), phases, lambda: None]
    publishing = HeadPublisher(*parts)

    assert publishing.publish() is None
    end = time.monotonic() + 60
    while publishing.is_behind and time.monotonic() < end:
        time.sleep(0.02)
    publishing.close()

    assert not publishing.is_behind
    assert {served.version for served in publishing.collect()} == {1}
