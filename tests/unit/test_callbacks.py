"""URLs that trajectories may be posted to, signatures of what is posted, and requests that are sent again."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest

from runner.process.callbacks import CallbackRefusedError, Callbacks, require_allowed, signed_headers
from runner.process.wire import Trajectory
from runner.queue.rows import Defaults
from runner.queue.service import Service
from runner.queue.tables import QueueDatabase
from spangrad.errors import QueueError
from spangrad.settings import QueueSettings


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("http://trainer:9000/x", ["trainer:9000"]),
        ("http://Trainer:9000", ["trainer"]),
        ("https://trainer/x?y=1", ["trainer:443"]),
        ("http://[::1]:80/x", ["[::1]"]),
    ],
)
def test_check_callback_of_an_allowed_host_passes(url: str, allowed: list[str]) -> None:
    require_allowed(url, allowed)


@pytest.mark.parametrize(
    ("url", "allowed", "words"),
    [
        ("http://trainer:9001/x", ["trainer:9000"], "does not list trainer:9001"),
        ("http://trainer/x", [], "does not list trainer:80"),
        ("http://trainer@evil/x", ["trainer"], "^callback 'http://evil/x' is refused: .* does not list evil:80"),
        ("http://trainer.evil/x", ["trainer"], "does not list trainer.evil:80"),
        ("http://:80/x", ["trainer"], "is no URL of a host"),
        ("http://trainer:99999/x", ["trainer"], "is no URL of a host"),
    ],
)
def test_check_callback_of_another_host_is_refused(url: str, allowed: list[str], words: str) -> None:
    with pytest.raises(CallbackRefusedError, match=words):
        require_allowed(url, allowed)


def test_signed_headers_hold_the_hmac_of_id_time_and_body() -> None:
    headers = signed_headers("run é/key/0/1", 1700000000, b"{}", "secret")
    assert headers["webhook-id"] == "run%20%C3%A9/key/0/1"
    digest = hmac.digest(b"secret", b"run%20%C3%A9/key/0/1.1700000000.{}", hashlib.sha256)
    assert headers["webhook-signature"] == "v1," + base64.b64encode(digest).decode()


async def test_add_callbacks_again_after_a_lost_commit_delivers_them_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_trajectories(*_: object) -> AsyncGenerator[Trajectory]:
        await asyncio.Event().wait()
        yield

    service = Service(QueueDatabase(f"sqlite:///{tmp_path}/queue.db"), Defaults(lambda _: 300, max_attempts=2, lease_seconds=30))
    callbacks = Callbacks(service, QueueSettings(), no_trajectories)
    begun, begin, do = list[str](), callbacks._begin, service.writer.do

    def note(run_id: str, rollouts: Sequence[str], url: str) -> None:
        begun.extend(rollouts)
        begin(run_id, rollouts, url)

    async def do_and_lose_the_answer(work: Any) -> Any:
        await do(work)
        raise QueueError("the database is away.")

    monkeypatch.setattr(callbacks, "_begin", note)
    with monkeypatch.context() as patch:
        patch.setattr(service.writer, "do", do_and_lose_the_answer)
        with pytest.raises(QueueError):
            await callbacks.add("run", ["r0"], "http://trainer/x")
    for rollouts in (["r0"], ["r0", "r1"]):
        await callbacks.add("run", rollouts, "http://trainer/x")
    assert begun == ["r0", "r1"]
    await callbacks.close()
    await service.close()


async def test_callbacks_after_a_look_that_got_no_thread_are_delivered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries, is_repeated = 0, asyncio.Event()

    async def trajectories(*_: object) -> AsyncGenerator[Trajectory]:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise RuntimeError("can't start new thread")
        is_repeated.set()
        await asyncio.Event().wait()
        yield

    monkeypatch.setattr("runner.process.callbacks._PAUSES", (0.01, 60.0))
    service = Service(QueueDatabase(f"sqlite:///{tmp_path}/queue.db"), Defaults(lambda _: 300, max_attempts=2, lease_seconds=30))
    callbacks = Callbacks(service, QueueSettings(), trajectories)
    await callbacks.add("run", ["r0"], "http://me:s3cret@trainer/x")
    await asyncio.wait_for(is_repeated.wait(), 30)
    await callbacks.close()
    await service.close()
    assert [record.getMessage() for record in caplog.records] == ["callbacks to http://trainer/x wait: can't start new thread"]
