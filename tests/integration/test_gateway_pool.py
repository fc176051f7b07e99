"""Two real vLLMs behind one gateway: new weights while calls are in flight, back again, and sleep."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from spangrad.processes import wait_until
from spangrad.settings import BackendSettings, Settings, StoreSettings
from spangrad.store.clickhouse import connect
from spangrad.weights.checksums import checksum_directory
from tests.support.policies import Reference, perturbed
from tests.support.processes import VLLM_PYTHON, engine_settings, fetch, gateway_settings, running_gateway, start

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CHAT = "/v1/chat/completions"
SAMPLED: dict[str, Any] = {
    "model": "policy",
    "messages": [{"role": "user", "content": "say rome"}],
    "temperature": 1.0,
    "max_tokens": 100,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def pair(tiny_model: Path, store: StoreSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """A gateway before two engines of its own, which serve version 0: `tiny_model`."""
    if not VLLM_PYTHON.exists():
        pytest.skip(f"vLLM's environment {VLLM_PYTHON} is not there")
    directory = tmp_path_factory.mktemp("pair")
    engines = [engine_settings(tiny_model, directory / f"cache-{number}") for number in range(2)]
    children = [start("gateway.engine", settings, directory / f"engine-{number}.log") for number, settings in enumerate(engines)]
    try:
        for settings, child in zip(engines, children, strict=True):
            url = f"{settings.gateway.engine_url}/spangrad/info"
            wait_until(lambda url=url: fetch(url).get("warm", False), 240, "vLLM", [child], poll_seconds=0.2)
        more = {"backends": (BackendSettings(url=engines[1].gateway.engine_url),), "spill_path": directory / "spill"}
        settings = gateway_settings(engines[0], store, **more)
        with running_gateway(settings, directory / "gateway.log"):
            wait_until(lambda: statuses(settings) == ["serving"] * 2, 30, "both engines")
            yield settings
    finally:
        for child in children:
            child.stop()


def backends(settings: Settings) -> list[dict[str, Any]]:
    return fetch(f"{settings.gateway.url}/admin/backends")["backends"]


def statuses(settings: Settings) -> list[str]:
    return [backend["status"] for backend in backends(settings)]


def order(settings: Settings, to: str, /, **body: object) -> dict[str, Any]:
    return fetch(f"{settings.gateway.url}/admin/{to}", body)


def publish(settings: Settings, path: Path, version: int, **more: object) -> dict[str, Any]:
    return order(settings, "policies/policy/versions", version=version, path=str(path), checksum=checksum_directory(path), **more)


def rows(settings: Settings, rollouts: str, expected: int) -> list[dict[str, Any]]:
    """The calls of some rollouts, once they have arrived."""
    client = connect(settings.store)
    query = f"SELECT * FROM spangrad.calls WHERE RolloutKey LIKE '{rollouts}' ORDER BY Seq"
    wait_until(lambda: len(list(client.query(query).named_results())) >= expected, 20, "the calls' rows")
    return list(client.query(query).named_results())


@pytest.mark.parametrize("how", ["rolling", "all_at_once"])
def test_publication_with_calls_in_flight_records_version_of_every_token(
    pair: Settings, tiny_model: Path, tmp_path: Path, how: str
) -> None:
    before = fetch(f"{pair.gateway.url}/admin/policies/policy")["version"]
    other = perturbed(tiny_model, tmp_path / "other")
    reference = Reference({before: tiny_model, before + 1: other})
    answers: list[dict[str, Any]] = []
    published = threading.Event()

    def call(rollout: int) -> None:
        asked = 0
        while asked < 2 or not published.is_set():
            answers.append(fetch(f"{pair.gateway.url}/rollout/{how}-{rollout}/attempt/0{CHAT}", SAMPLED))
            asked += 1
        answers.append(fetch(f"{pair.gateway.url}/rollout/{how}-{rollout}/attempt/0{CHAT}", SAMPLED))

    callers = [threading.Thread(target=call, args=(number,)) for number in range(6)]
    for caller in callers:
        caller.start()
    wait_until(lambda: len(answers) >= 6, 60, "the first answers")
    publication = publish(pair, other, before + 1, order=how)
    published.set()
    for caller in callers:
        caller.join()
    assert publication["backends"] == {"policy-0": "serving", "policy-1": "serving"}
    assert [answer["choices"][0]["finish_reason"] for answer in answers] == ["length"] * len(answers)
    recorded = rows(pair, f"{how}-%", len(answers))
    assert len(recorded) == len(answers)
    spanning = 0
    for row in recorded:
        starts, versions = row["Versions.Start"], row["Versions.Version"]
        assert versions in ([before], [before, before + 1], [before + 1])
        spanning += len(versions) > 1
        for begin, end, version in zip(starts, [*starts[1:], None], versions, strict=True):
            assert reference.agrees(row, version)[begin:end].all(), (row["Seq"], begin, version)
    assert {row["Versions.Version"][-1] for row in recorded} == {before, before + 1}
    assert spanning
    assert all(backend["calls"] for backend in backends(pair))

    # Back to what was served before, which is what the next test begins with.
    back = order(pair, "policies/policy/rollback")
    assert (back["version"], back["checksum"]) == (before, checksum_directory(tiny_model))
    (row,) = [fetch(f"{pair.gateway.url}/rollout/{how}-back/attempt/0{CHAT}", SAMPLED) and rows(pair, f"{how}-back", 1)[0]]
    assert row["Versions.Version"] == [before]
    assert reference.agrees(row, before).all()
    assert publish(pair, tiny_model, before + 2)["version"] == before + 2


def test_backends_sleep_and_wake_up_change_status(pair: Settings) -> None:
    """A backend's status follows the orders to sleep and to wake up, which vLLM accepts on a CPU too, where it frees no memory."""
    assert order(pair, "backends/policy-1/sleep")["status"] == "asleep"
    assert fetch(f"{pair.gateway.url}/rollout/asleep-1/attempt/0{CHAT}", SAMPLED)["usage"]["completion_tokens"] == 100
    assert order(pair, "backends/policy-1/wake_up")["status"] == "serving"
    assert statuses(pair) == ["serving"] * 2


def test_policy_asleep_keeps_calls_for_the_version_that_is_published_then(pair: Settings, tiny_model: Path) -> None:
    """A call that reaches a sleeping engine itself waits in it: on a CPU vLLM frees no memory, but stops its scheduler as on a GPU."""
    version = fetch(f"{pair.gateway.url}/admin/policies/policy")["version"] + 1
    assert order(pair, "policies/policy/sleep", level=2, seconds=60)["status"] == "asleep"
    assert [fetch(f"{engine['url']}/is_sleeping") for engine in backends(pair)] == [{"is_sleeping": True}] * 2
    urls = [f"{pair.gateway.url}/rollout/late/attempt/0", *(engine["url"] for engine in backends(pair))]
    with ThreadPoolExecutor() as threads:
        calls = [threads.submit(fetch, url + CHAT, SAMPLED) for url in urls]
        assert order(pair, "policies/policy/sleep", level=2, seconds=60, renew=True)["waiting"] <= 1
        assert publish(pair, tiny_model, version)["version"] == version
        answers = [call.result() for call in calls]
    assert statuses(pair) == ["serving"] * 2
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [100] * 3
    assert [answer["spangrad"]["versions"] for answer in answers[1:]] == [[[[0, version]]]] * 2
    (row,) = rows(pair, "late", 1)
    assert row["Versions.Version"] == [version]
