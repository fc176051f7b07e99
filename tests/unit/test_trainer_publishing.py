"""The publication of the head while the gateway is away: retried beside training, the newest alone, and ended by a refusal only."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from spangrad.errors import GatewayError
from spangrad.processes import free_ports, wait_until
from spangrad.settings import GatewaySettings, Settings
from spangrad.types import PolicyVersion
from tests.support.otlp import HttpServer
from tests.support.trainers import FakeOptimizer, FakePublisher, FakeSource, committed, settings, wired, write_base
from trainer.data.batch import Batch
from trainer.loop import Trainer, newest_version
from trainer.publish.offers import WeightSource
from trainer.publish.publisher import EngineUsage, GatewayRefusedError, Publisher
from trainer.publish.rank_sender import RankAddress
from trainer.retries import Outage
from trainer.shutdown import Shutdown, Stopped


class Away(FakePublisher):
    """A gateway that is away while `away` is true."""

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self.away = True
        self.attempts: list[int] = []

    def publish(self, version: PolicyVersion, *, again: bool = False, weights: object = None) -> float:
        self.attempts.append(version.version)
        if self.away:
            raise GatewayError("the gateway at http://gateway does not answer (refused).")
        return super().publish(version, again=again)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


def with_publisher(trainer: Trainer, publisher: Publisher) -> Trainer:
    assert trainer.publishing
    trainer.publishing.publisher = publisher
    return trainer


def served(chosen: Settings) -> list[int]:
    return json.loads((chosen.trainer.directory / "served.json").read_text())


def test_publication_while_gateway_is_away_trains_on_and_publishes_newest_only(
    tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    chosen = settings(base, tmp_path / "policies", groups_per_batch=1)
    source = FakeSource([*"abcd"])
    trainer = wired(chosen, source)
    gateway = Away(chosen.trainer.directory / "served.json")
    with_publisher(trainer, gateway)

    def comes_back() -> None:
        wait_until(lambda: len(trainer.ledger.committed_versions()) == 5, 60, "four steps")
        wait_until(lambda: gateway.attempts[-1] == 4, 60, "an attempt to publish the newest")
        gateway.away = False

    thread = threading.Thread(target=comes_back)
    thread.start()
    trainer.run(follow=False)
    thread.join()
    assert list(committed(trainer)) == [0, 1, 2, 3, 4]
    assert served(chosen) == [0, 0, 4], "versions 1 to 3 never left: the newest was published alone"
    metrics = [one.metrics for one in trainer.ledger.versions()]
    assert ["seconds_publish" in one for one in metrics] == [False, False, False, False, True]
    assert sum(one["publish_retries"] for one in metrics[2:]) >= 1, "the retries of an earlier version, by the fourth step at the latest"
    assert trainer.mirror.written[-1].metrics == metrics[4], "the store's copy has the late metrics"  # type: ignore[attr-defined]
    assert caplog.text.count("Trying again until the gateway answers") == 1
    assert caplog.text.count("the gateway answers again after") == 1


@pytest.mark.parametrize("follow", [False, True])
def test_publication_refused_for_good_ends_run(tmp_path: Path, base: Path, follow: bool) -> None:
    class Refusing(Away):
        def publish(self, version: PolicyVersion, *, again: bool = False, weights: object = None) -> float:
            if self.attempts:
                raise GatewayRefusedError("the gateway refused POST (409): the weights have another checksum.")
            return super().publish(version, again=again)

    chosen = settings(base, tmp_path / "policies")
    trainer = with_publisher(wired(chosen, FakeSource(["a", "b"])), Refusing(tmp_path / "policies/served.json"))
    with pytest.raises(GatewayRefusedError, match=r"\(409\): the weights have another checksum"):
        trainer.run(follow=follow)
    assert list(committed(trainer)) == [0, 1], "what was trained stays committed"


def test_head_replaces_a_newer_version_of_another_branch_that_is_served(tmp_path: Path, base: Path) -> None:
    trainer = wired(settings(base, tmp_path / "policies"), FakeSource([]))
    # Weights of its own: the branch begins with version 1, which main has not.
    other = wired(settings(write_base(tmp_path / "other", 7.0), tmp_path / "policies", branch="other"), FakeSource([]))
    assert (served(other.settings), trainer.ledger.statuses().keys()) == ([0, 0, 1], {0}), "as after `spangrad policy publish`"
    trainer._publish_again()  # pyright: ignore[reportPrivateUsage]
    assert served(trainer.settings)[-1] == 0
    # Where the other branch publishes again, its trainer would go on to.
    other._publish_again()  # pyright: ignore[reportPrivateUsage]
    assert served(other.settings)[-1] == 1
    with pytest.raises(GatewayRefusedError):
        trainer._publish_again()  # pyright: ignore[reportPrivateUsage]


def test_publication_at_end_of_run_is_awaited_until_start_timeout(tmp_path: Path, base: Path) -> None:
    chosen = settings(base, tmp_path / "policies")
    chosen = chosen.model_copy(update={"engine": chosen.engine.model_copy(update={"start_timeout_seconds": 0.3})})
    trainer = with_publisher(wired(chosen, FakeSource(["a", "b"])), Away(tmp_path / "policies/served.json"))
    with pytest.raises(GatewayError, match=r"has not taken version 1 in engine\.start_timeout_seconds = 0\.3 s"):
        trainer.run(follow=False)
    assert list(committed(trainer)) == [0, 1]
    trainer.close()


def test_publication_awaited_ends_at_signal(tmp_path: Path, base: Path) -> None:
    trainer = with_publisher(wired(settings(base, tmp_path / "policies"), FakeSource(["a", "b"])), Away(tmp_path / "policies/served.json"))
    times: list[float] = []

    def terminate() -> None:
        wait_until(lambda: len(trainer.ledger.committed_versions()) == 2, 60, "the step")
        time.sleep(0.3)
        times.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=terminate).start()
    with pytest.raises(Stopped), trainer.shutdown.listening():
        trainer.run(follow=True)
    assert time.monotonic() - times[0] < 30, "it would wait for minutes"
    trainer.close()


class Gateway(HttpServer):
    """Serves what it is told to; one that is made anew on the same port knows what its predecessor served."""

    def __init__(self, port: int, versions: list[int], refused: str = "GET POST") -> None:
        self.versions, self.status, self.refused = versions, 200, refused
        self.refusals: list[bytes] = []
        super().__init__(port)

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        if self.status != 200 and method in self.refused:
            self.refusals.append(body)
            return self.status, {}, b'{"error": {"message": "not now."}}'
        if method == "POST":
            self.versions.append(json.loads(body)["version"])
        return 200, {}, json.dumps({"version": self.versions[-1], "seconds": 0.5}).encode()


class Closing(FakeOptimizer):
    """Has something done to the world at a step."""

    def __init__(self, at: float, act: Callable[[], object]) -> None:
        super().__init__()
        self.at, self.act = at, act

    def step(self, batch: Batch, before_update: Callable[[], None] = lambda: None) -> dict[str, float]:
        metrics = super().step(batch, before_update)
        if self.weight == self.at:
            self.act()
        return metrics


@pytest.mark.parametrize(
    ("status", "refused"), [(None, ""), (404, "GET POST"), (502, "GET POST"), (503, "GET POST"), pytest.param(503, "POST", id="canary")]
)
def test_publication_to_restarted_gateway_resumes_with_newest_version(tmp_path: Path, base: Path, status: int | None, refused: str) -> None:
    """The gateway is away: with status None its port is closed, else a proxy answers with the status in its place; or a canary is out."""
    versions, (port,) = [0], free_ports(1)
    gateways = [Gateway(port, versions, refused)]

    def goes() -> None:
        wait_until(lambda: versions == [0, 1], 60, "version 1, which is published beside this step")
        if status is None:
            gateways.pop().close()
        else:
            gateways[0].status = status
        threading.Thread(target=comes).start()

    def comes() -> None:
        wait_until(lambda: len(trainer.ledger.committed_versions()) == 4, 60, "steps without a gateway")
        if refused == "POST":  # an attempt may have read the head before the last commit
            wait_until(
                lambda: [json.loads(body)["version"] for body in gateways[0].refusals[-1:]] == [3], 60, "an attempt to publish the newest"
            )
        if status is None:
            gateways.append(Gateway(port, versions))
        else:
            gateways[0].status = 200

    chosen = settings(base, tmp_path / "policies", groups_per_batch=1)
    trainer = wired(chosen, FakeSource([*"abc"]), Closing(2, goes))
    with_publisher(trainer, Publisher(GatewaySettings(url=f"http://127.0.0.1:{port}")))
    trainer.run(follow=False)
    assert list(committed(trainer)) == [0, 1, 2, 3]
    assert versions == [0, 1, 3], "version 2 was overtaken while the gateway was away"
    gateways[0].close()


def test_trainer_start_waits_for_starting_gateway(tmp_path: Path, base: Path) -> None:
    class Starting(FakePublisher):
        asked = 0

        def served(self, policy: str) -> int | None:  # type: ignore[override]
            self.asked += 1
            if self.asked == 1:
                raise GatewayError("does not answer")
            return None if self.asked == 2 else super().served(policy)

    chosen = settings(base, tmp_path / "policies")
    trainer = with_publisher(wired(chosen, FakeSource([])), Starting(tmp_path / "policies/served.json"))
    trainer.start()
    assert served(chosen) == [0, 0, 0]


def test_publication_retry_of_transfer_sends_files_from_ranks(tmp_path: Path, base: Path) -> None:
    """Those in memory are in the middle of the next step by then."""
    chosen = settings(base, tmp_path / "policies", weight_sync__method="transfer", groups_per_batch=1)
    sent: list[tuple[Path | None, list[RankAddress]]] = []

    class Sending(Away):
        def publish(self, version: PolicyVersion, *, again: bool = False, weights: object = None) -> float:
            super().publish(version, again=again)
            assert isinstance(weights, WeightSource)
            assert weights.ranks
            sent.append((weights.directory, list(weights.ranks())))
            return 0.25

    ranks = [RankAddress("http://rank", "token")]
    trainer = wired(chosen, FakeSource(["a"]), FakeOptimizer(rank_senders=ranks))
    gateway = Sending(tmp_path / "policies/served.json")
    with_publisher(trainer, gateway)
    batch = trainer.take()
    assert batch
    trainer.step(batch)
    trainer.follow_ups.wait()
    trainer.optimizer.weight = 7.0  # type: ignore[attr-defined]
    gateway.away = False
    assert trainer.publishing
    trainer.publishing.wait()
    head = newest_version(trainer.ledger)
    assert (sent, head.version) == ([(Path(head.policy_version.path), ranks)], 1)


def test_publication_without_ranks_that_send_lets_engines_read_files(tmp_path: Path, base: Path) -> None:
    sent: list[object] = []

    class Sending(FakePublisher):
        def publish(self, version: PolicyVersion, *, again: bool = False, weights: object = None) -> float:
            sent.append(weights)
            return super().publish(version, again=again, weights=weights)

    trainer = wired(settings(base, tmp_path / "policies", weight_sync__method="transfer"), FakeSource([]))
    with_publisher(trainer, Sending(tmp_path / "policies/served.json"))
    assert trainer.publishing
    trainer.publishing.publish()
    assert sent == [None]


def test_publication_reports_idle_share_of_engines_since_the_one_before(tmp_path: Path, base: Path) -> None:
    """A gateway that began anew has counted less than before: nothing is reported for once."""
    usages = [EngineUsage(10.0, 4.0), EngineUsage(14.0, 7.0), EngineUsage(3.0, 1.0), EngineUsage(5.0, 3.0), EngineUsage(9.0, 3.0)]

    class Counting(FakePublisher):
        def publish(self, version: PolicyVersion, *, again: bool = False, weights: object = None) -> float:
            self.usage = usages.pop(0)
            return super().publish(version, again=again, weights=weights)

    trainer = wired(settings(base, tmp_path / "policies"), FakeSource([]))
    assert trainer.publishing
    trainer.publishing.publisher = Counting(tmp_path / "policies" / "served.json")
    reported = [trainer.publishing.publish() for _ in range(5)]
    assert [served.metrics.get("engine_idle") for served in reported if served] == [None, 0.25, None, 0.0, 1.0]


def test_outage_is_logged_at_both_ends_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    outage = Outage("the gateway")
    outage.over()
    for _ in range(3):
        outage.failed(GatewayError("It does not answer."))
    assert outage.is_under_way
    outage.over()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "(3 failed attempts)" in caplog.text
    assert [outage.take_retries(), outage.take_retries()] == [3, 0]


def test_shutdown_sleep_in_shield_ends_at_signal() -> None:
    shutdown = Shutdown()
    began = time.monotonic()

    def sleep() -> None:
        # Not before: where nothing listens, the signal would end the tests.
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        shutdown.sleep(60)

    with pytest.raises(Stopped), shutdown.listening(), shutdown.shielded():
        sleep()
    assert time.monotonic() - began < 30
