"""A trainer whose store or ledger's database is away for a while: that costs time, and neither the process nor a step."""

from __future__ import annotations

import logging
import socket
import threading
import uuid
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
from pydantic import SecretStr
from sqlalchemy import event

from spangrad.errors import StoreError
from spangrad.processes import wait_until
from spangrad.settings import Settings, StoreSettings
from spangrad.store.clickhouse import connect
from tests.support.built_rollouts import BuiltRollouts, trainer_over
from tests.support.policies import trainer_settings
from tests.support.servers import running_postgres, start_store, store_answers, store_settings
from tests.support.trainers import Cutting, FakeSource, committed, settings, wired, write_base
from trainer.data.source import GroupReader
from trainer.ledger.mirror import Mirror
from trainer.ledger.store_retries import retry_transactions, retrying_client
from trainer.loop import newest_version
from trainer.retries import Outage
from trainer.shutdown import Shutdown

AWAY_SECONDS = 1.5


@contextmanager
def later(start: Callable[[], object], noticed: Callable[[], bool] = lambda: True) -> Generator[Callable[[], None]]:
    """Start a process again a while after the function given was called and its absence was noticed.

    It starts in a thread that lives as long as the block, since it ends with the thread that began it.
    """
    begun, over = threading.Event(), threading.Event()

    def wait() -> None:
        begun.wait()
        while not (noticed() or over.wait(0.05)):
            pass
        if not over.wait(AWAY_SECONDS):
            start()
            over.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield begun.set
    finally:
        over.set()
        begun.set()
        thread.join()


@contextmanager
def relay(port: int) -> Generator[tuple[int, threading.Event]]:
    """Give a port that leads to another one, and an event: once it is set, the next answer breaks off before its end."""
    cutting = threading.Event()
    server = socket.create_server(("127.0.0.1", 0))

    def pass_on(source: socket.socket, target: socket.socket, *, answers: bool) -> None:
        with source, target, suppress(OSError):
            while piece := source.recv(1 << 20):
                if answers and cutting.is_set():
                    cutting.clear()
                    target.sendall(piece[:-10])
                    break
                target.sendall(piece)
            for end in (source, target):
                end.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, store = server.accept()[0], socket.create_connection(("127.0.0.1", port))
                threading.Thread(target=pass_on, args=(client, store), kwargs={"answers": False}, daemon=True).start()
                threading.Thread(target=pass_on, args=(store, client), kwargs={"answers": True}, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield server.getsockname()[1], cutting
    finally:
        server.close()


def _is_noticed(caplog: pytest.LogCaptureFixture, service: str) -> bool:
    return f"Trying again until {service} answers" in caplog.text


def test_trainer_while_store_is_away_waits_for_it(tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trainer")
    run, store = uuid.uuid4().hex[:8], store_settings(tmp_path / "data")
    own = {"run_id": run, "branch": run, "model": tiny_model, "directory": tmp_path / "policies", "max_staleness": 9}
    chosen = Settings(store=store, trainer=trainer_settings(**own, groups_per_batch=1, publish=False))  # type: ignore[arg-type]
    stores = [start_store(store, tmp_path / "log")]

    def cut() -> None:
        stores[0].process.kill()
        come_back()

    noticed = partial(_is_noticed, caplog, "the span store")
    with later(lambda: stores.append(start_store(store, tmp_path / "log")), noticed) as come_back:
        wait_until(lambda: store_answers(store), 60, "the store", stores, poll_seconds=0.05)
        world = BuiltRollouts(chosen, tiny_model)
        for name in "abcd":
            world.group(name, [1.0, 0.0])
        trainer = trainer_over(world, chosen, Cutting(cut))
        client = retrying_client(world.client, trainer.store_outage, trainer.shutdown)
        trainer.source, trainer.mirror = GroupReader(client, chosen), Mirror(client, store, trainer.ledger)
        trainer.run(follow=False)
        assert trainer.ledger.committed_versions() == [0, 1, 2, 3, 4]
        again = BuiltRollouts(chosen, tiny_model)
        lineage = "SELECT Version, RolloutId FROM spangrad.lineage WHERE Branch = %(run)s ORDER BY Version, RolloutId"
        assert again.rows(lineage) == [(version, f"{name}-{i}") for version, name in enumerate("abcd", 1) for i in range(2)]
        retries = [one.metrics["store_retries"] for one in trainer.ledger.versions()[1:]]
        assert (retries[:2], retries[2] >= 1, retries[3]) == ([0, 0], True, 0), "those of the outage, with the step after it"
        assert caplog.text.count("Trying again until the span store answers") == 1
        assert caplog.text.count("the span store answers again after") == 1
        trainer.ledger.close()
        for child in stores:
            child.stop(grace_seconds=0)


def test_patient_client_refused_for_good_does_not_retry(store: StoreSettings) -> None:
    outage, shutdown = Outage("the span store"), Shutdown()
    client = retrying_client(connect(store), outage, shutdown)
    with pytest.raises(StoreError, match="refused"):
        client.query("SELECT Nothing FROM spangrad_internal.builds")
    assert outage.take_retries() == 0


def test_patient_client_whose_answer_breaks_off_retries(store: StoreSettings) -> None:
    outage = Outage("the span store")
    with relay(store.clickhouse_port) as (port, cutting), closing(connect(StoreSettings(url=f"http://127.0.0.1:{port}"))) as plain:
        client = retrying_client(plain, outage, Shutdown())
        cutting.set()
        assert client.query("SELECT number FROM numbers(100)").row_count == 100
        cutting.set()
        assert client.query_arrow("SELECT number FROM numbers(100)").num_rows == 100
    assert outage.take_retries() == 2


def test_trainer_while_ledger_database_is_away_waits_for_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    noticed = partial(_is_noticed, caplog, "the ledger's database")
    with running_postgres() as server, later(server.start, noticed) as come_back:
        url = SecretStr(server.schema("ledger"))
        chosen = settings(write_base(tmp_path / "base"), tmp_path / "policies", groups_per_batch=1, ledger_url=url)
        (tmp_path / "policies").mkdir()

        def cut() -> None:
            server.crash()
            come_back()

        trainer = wired(chosen, FakeSource([*"abc"]), Cutting(cut))
        retry_transactions(trainer.ledger, Outage("the ledger's database"), trainer.shutdown)
        trainer.run(follow=False)
        assert committed(trainer) == {0: [], 1: ["a-0", "a-1"], 2: ["b-0", "b-1"], 3: ["c-0", "c-1"]}
        assert (Path(newest_version(trainer.ledger).policy_version.path) / "optimizer/weight").read_text() == "3.0"
        assert caplog.text.count("Trying again until the ledger's database answers") == 1
        assert caplog.text.count("the ledger's database answers again after") == 1
        trainer.ledger.close()


def test_metrics_whose_transaction_the_database_breaks_off_are_added(tmp_path: Path) -> None:
    with running_postgres() as server, later(server.start) as come_back:
        url = SecretStr(server.schema("ledger"))
        chosen = settings(write_base(tmp_path / "base"), tmp_path / "policies", groups_per_batch=1, ledger_url=url)
        (tmp_path / "policies").mkdir()
        trainer = wired(chosen, FakeSource([]), Cutting(lambda: None))
        retry_transactions(trainer.ledger, Outage("the ledger's database"), trainer.shutdown)
        crashes = list[str]()

        def crash(connection: object, statement: object, *_: object) -> None:
            if "UPDATE versions" in str(statement) and not crashes:
                crashes.append(str(statement))
                server.crash()
                come_back()

        event.listen(trainer.ledger.database.engine, "after_execute", crash)
        trainer.ledger.add_metrics(0, {"late": 1.0})
        assert len(crashes) == 1
        assert trainer.ledger.version(0).metrics["late"] == 1.0
        trainer.ledger.close()
