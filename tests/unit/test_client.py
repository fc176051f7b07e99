"""The client's parts that need no queue: what its workers are told, what a terminal shows."""

from __future__ import annotations

import io
import re
from datetime import UTC, datetime

import pytest

from spangrad.client.client import Client
from spangrad.client.result import ProgressLine, RolloutTally
from spangrad.settings.sources import load_settings


def agent(task: object) -> float:
    return 1.0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_client_workers_get_settings_including_null(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPANGRAD_STORE__TTL_DAYS", "7")
    given = {"runner.run_id": "mine", "queue.keep_days": None, "store.ttl_days": None, "trainer.optim.betas": [0.8, 0.9]}
    given["trainer.as_of"] = datetime(2026, 1, 2, tzinfo=UTC)
    client = Client("http://127.0.0.1:9", settings=given)
    assert (client.run_id, client.settings.queue.keep_days, client.settings.store.ttl_days) == ("mine", None, None)
    assert load_settings(env=client._work(agent, None, None).environment) == client.settings
    assert Client("http://127.0.0.1:9", run_id="other", settings=given).run_id == "other"


def test_show_prints_script_output_unchanged() -> None:
    out = Terminal()
    with ProgressLine("training", 4, out) as show:
        print("[INST] :key: [/INST]", end="", flush=True)
        show.print_line("test data [/s]")
    uncoloured = re.sub(r"\x1b\[[\d;?]*\w", "", out.getvalue())
    assert "[INST] :key: [/INST]" in uncoloured
    assert "test data [/s]" in uncoloured


def test_rollout_tally_counts_rewards_of_failures() -> None:
    tally = RolloutTally()
    ended = [
        ("succeeded", None, {"reward": {"white": 1.0, "black": 0.5}, "style": 0.5}),
        ("failed", "timeout", {"reward": -1.0}),
        ("dead", "crash", None),
    ]
    for state, reason, rewards in ended:
        tally.add({"state": state, "attempts": [{"reason": reason, "rewards": rewards}], "group_id": "g", "group_size": 3})
    assert (tally.measure.outcomes, tally.measure.mean_reward, tally.groups) == ({"succeeded": 1, "timeout": 1, "crash": 1}, 0.5, 1)
