"""A training run's parts: whatever ends it, they are closed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spangrad.errors import LedgerError
from tests.support.trainers import settings, write_base
from trainer import run


def refuse(_: object) -> None:
    raise LedgerError("the ledger has tables of another schema.")


def test_train_whose_ledger_cannot_be_opened_closes_its_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, closed = list[str](), list[str]()

    class Client:
        url = "http://store"

        def close(self) -> None:
            closed.append("client")

    def connect(*_: Any, **__: Any) -> Client:
        opened.append("client")
        return Client()

    monkeypatch.setattr(run, "connect", connect)
    monkeypatch.setattr(run, "open_ledger", refuse)
    with pytest.raises(LedgerError, match="another schema"):
        run.train(settings(write_base(tmp_path / "base"), tmp_path / "policies"), follow=False)
    assert (opened, closed) == (["client"] * 2,) * 2


def test_train_whose_publisher_is_refused_closes_every_other_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = list[str]()

    class Part:
        url = "http://store"

        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            closed.append(self.name)
            raise OSError(f"{self.name} cannot be closed")

    monkeypatch.setattr(run, "connect", lambda *_, **__: Part("client"))
    chosen = settings(write_base(tmp_path / "base"), tmp_path / "policies")
    ledger = run.open_ledger(chosen)
    monkeypatch.setattr(ledger, "close", Part("ledger").close)
    monkeypatch.setattr(run, "open_ledger", lambda _: ledger)
    monkeypatch.setattr(run, "GroupReader", lambda *_, **__: None)
    monkeypatch.setattr(run, "publisher_of", refuse)
    with pytest.raises(OSError, match="client cannot be closed"):
        run.train(chosen, follow=False)
    assert sorted(closed) == ["client", "client", "ledger"]
