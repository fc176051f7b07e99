"""The queue, asked by code without an event loop, when its answers break off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spangrad.client.queue_http import QueueHttp, state_demand
from spangrad.errors import QueueError
from spangrad.http.queue_messages import DemandRequest
from spangrad.settings import QueueSettings
from tests.support.servers import raw_server

HALF = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{"rollouts": ['
WHOLE = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 29\r\n\r\n{"rollouts": [], "cursor": 7}'


@pytest.fixture
def answers() -> list[bytes]:
    """Return the server's next answers, of which it repeats the last."""
    return [HALF]


@pytest.fixture
def url(answers: list[bytes]) -> Iterator[str]:
    with raw_server(answers) as address:
        yield address


def test_queue_http_answer_that_breaks_off_is_retried(url: str, answers: list[bytes]) -> None:
    answers[:] = [HALF, WHOLE]
    assert QueueHttp(url, None, "run").ended(0, 1) == ([], 7)


def test_queue_http_answers_that_always_break_off_raise(url: str) -> None:
    message = rf"the queue at {url} does not answer \(IncompleteRead"
    demanded = DemandRequest(policy="policy", branch="main", groups=1, oldest_version=0, filled=0)
    with pytest.raises(QueueError, match=message):
        QueueHttp(url, None, "run", retry_seconds=0).ended(0, 1)
    with pytest.raises(QueueError, match=message):
        state_demand(QueueSettings(url=url), "run", demanded)
