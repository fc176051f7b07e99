"""Placement of services in a cluster: bundles by the settings, addresses, tokens, what is lacking, settings as variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from spangrad.errors import SettingsError
from spangrad.probing.parallel import parallel_sizes
from spangrad.settings import Settings
from spangrad.settings.sources import load_settings, settings_variables
from spangrad.supervisor.placement import (
    BundleGroup,
    Node,
    cluster_values,
    lack_text,
    lacking,
    placement,
    require_tokens,
    shared_paths,
)
from spangrad.supervisor.service import ServiceSpec
from spangrad.supervisor.training_services import training_services

HOME = "10.0.0.1"
QUEUE: dict[str, object] = {"queue.url": "http://127.0.0.1:8190"}
TOKENS: dict[str, object] = {f"{name}.token": "secret" for name in ("store", "queue", "gateway", "engine")}


def in_cluster(values: dict[str, object], *agent: str) -> tuple[Settings, tuple[ServiceSpec, ...]]:
    given = {"engine.model": "m", **values}
    changed = {**given, **cluster_values(load_settings(given, env={}), HOME)}
    settings = load_settings(changed, env={})
    return settings, training_services(settings, Path("logs"), (), agent, settings_variables(changed, env={}))


def groups(values: dict[str, object], *agent: str, gpus: bool = True) -> tuple[BundleGroup, ...]:
    return placement(*in_cluster(values, *agent), gpus=gpus)


def places(reserved: tuple[BundleGroup, ...]) -> list[tuple[str, int, int, bool]]:
    return [(bundle.service, bundle.cpus, bundle.gpus, group.home) for group in reserved for bundle in group.bundles]


def test_placement_keeps_state_at_home_and_gives_gpus_to_trainer_and_engines() -> None:
    assert places(groups(QUEUE)) == [
        ("store", 1, 0, True),
        ("queue", 1, 0, True),
        ("gateway", 1, 0, True),
        ("train", 1, 1, False),
        ("engine", 1, 1, False),
        ("build", 1, 0, False),
    ]


def test_placement_reserves_ranks_first_and_a_group_for_each_engine() -> None:
    values = {
        "trainer.workers.per_node": 8,
        "trainer.workers.nodes": 2,
        "up.engines": 2,
        "engine.extra_args": ["--tensor-parallel-size", "2", "-dp=2"],
    }
    reserved = groups(values)
    assert places(reserved[:2]) == [("ranks", 8, 8, False)] * 2
    assert ("train", 1, 0, True) in places(reserved)
    engines = [group for group in reserved if group.bundles[0].service.startswith("engine")]
    assert [places((group,)) for group in engines] == [[("engine-1", 1, 4, False)], [("engine-2", 1, 4, False)]]
    assert places(groups(values, gpus=False))[0] == ("ranks", 8, 0, False)
    assert ("engine-1", 4, 0, False) in places(groups(values, gpus=False))


def test_placement_spreads_workers() -> None:
    reserved = groups({**QUEUE, "up.workers": 3}, "--agent", "a.py:f")
    assert reserved[-1].strategy == "SPREAD"
    assert [bundle.service for bundle in reserved[-1].bundles] == ["worker-1", "worker-2", "worker-3"]
    assert places(groups({**QUEUE, "up.workers": 3}, "--tasks", "t.jsonl"))[-1] == ("run", 1, 0, False)


@pytest.mark.parametrize(
    ("words", "workers"),
    [
        ([], 1),
        (["--tensor-parallel-size", "4"], 4),
        (["-tp", "2", "--pipeline_parallel_size=2", "--data-parallel-size", "2", "--max-num-seqs", "9"], 8),
        (["--tensor-parallel-size"], 1),
        (["--tensor-par=2", "--seed", "-1", "-O3", "-dpn", "0", "-tp", "4", "--data-parallel-size-local", "2"], 4),
        (["--tensor-parallel-size", "2", "--data-parallel-"], 1),
    ],
)
def test_parallel_sizes_multiply_to_workers(words: list[str], workers: int) -> None:
    assert parallel_sizes(words).workers == workers
    assert parallel_sizes(parallel_sizes(words).arguments) == parallel_sizes(words)


def test_cluster_values_name_home_and_leave_other_machines_alone() -> None:
    settings, services = in_cluster({**QUEUE, "trainer.workers.per_node": 1, "trainer.weight_sync.method": "transfer", "up.engines": 2})
    assert (settings.store.host, settings.store.url) == (HOME, f"http://{HOME}:8123")
    assert settings.store.otlp_endpoint == f"http://{HOME}:4318"
    assert (settings.queue.url, settings.gateway.url) == (f"http://{HOME}:8190", f"http://{HOME}:8180")
    assert (settings.gateway.engine_url, settings.engine.host, settings.engine.url) == ("", "{node}", "http://{node}:8000")
    assert (settings.trainer.workers.ray_address, settings.trainer.weight_sync.transfer_host) == ("{cluster}", "{node}")
    urls = {service.name: service.ready_url for service in services}
    assert urls["store"] == f"http://{HOME}:8123/ping"
    assert [urls["engine-1"], urls["engine-2"]] == ["http://{node}:8000/health", "http://{node}:8001/health"]
    engine = in_cluster({"gateway.engine_url": "", "engine.url": "http://127.0.0.1:8000"})[0].engine
    assert (engine.host, engine.url) == ("{node}", "http://{node}:8000"), "one that registered itself on one machine already"
    elsewhere = {
        "store.url": "http://s:8123",
        "store.otlp_endpoint": "http://s:4318",
        "gateway.engine_url": "http://e:8000",
        "gateway.url": "http://g:8180",
    }
    assert cluster_values(load_settings(elsewhere, env={}), HOME) == {}


def test_cluster_without_tokens_is_refused_unless_it_is_on_loopback() -> None:
    with pytest.raises(SettingsError, match=r"^store\.token, queue\.token, gateway\.token, engine\.token not set"):
        require_tokens(*in_cluster(QUEUE))
    require_tokens(*in_cluster({**QUEUE, **TOKENS}))
    require_tokens(load_settings(QUEUE, env={}), in_cluster(QUEUE)[1])


def test_lacking_names_bundles_that_no_node_has_room_for() -> None:
    nodes = [Node("a", HOME, {"CPU": 8}), Node("b", "10.0.0.2", {"CPU": 8, "GPU": 4})]
    values: dict[str, object] = {**QUEUE, "engine.extra_args": ["-tp", "2"]}
    assert lacking(groups({**values, "trainer.workers.per_node": 2}), nodes, "a") == []
    missing = lacking(groups({**values, "up.engines": 2}), nodes, "a")
    assert [bundle.service for bundle in missing] == ["engine-2"]
    assert lack_text(missing, nodes) == (
        "no node has room for engine-2 (1 CPU and 2 GPU on one node); the cluster has 10.0.0.1 (8 CPU, 0 GPU), 10.0.0.2 (8 CPU, 4 GPU)"
    )
    assert {bundle.service for bundle in lacking(groups(QUEUE), nodes[1:], "a")} == {"store", "queue", "gateway"}


def test_shared_paths_are_those_of_services_away_from_home() -> None:
    settings, services = in_cluster({})
    assert shared_paths(settings, placement(settings, services, gpus=False)) == ["engine.model = m", "trainer.directory = data/policies"]
    settings, services = in_cluster({"gateway.engine_url": "http://e:8000"})
    assert shared_paths(settings, placement(settings, services, gpus=False)) == []
    # Training begins with engine.model where no other is named.
    settings, services = in_cluster({"gateway.engine_url": "http://e:8000", "trainer.workers.per_node": 2})
    assert shared_paths(settings, placement(settings, services, gpus=True)) == ["engine.model = m", "trainer.directory = data/policies"]


def test_settings_variables_resolve_to_equal_settings(tmp_path: Path) -> None:
    file = tmp_path / "spangrad.toml"
    file.write_text(
        'engine.python = "env/python"\nengine.extra_args = ["-tp", "2"]\nstore.ttl_days = "null"\nup.workers = 2\n'
        '[[gateway.clients]]\nname = "n"\ntoken = "t"\n[gateway.models]\n"gpt-4o" = "policy"\n'
        "[trainer.verl]\nactor_rollout_ref.actor.fsdp_config.param_offload = true\n"
    )
    env = {"SPANGRAD_STORE__TOKEN": "s", "SPANGRAD_TRAINER__LORA__RANK": "4", "SPANGRAD_CHGO": "/bin/chgo", "SPANGRAD_HOST": "mark"}
    flags: dict[str, object] = {"gateway.engine_url": "", "engine.enforce_eager": True, "queue.keep_days": None}
    variables = settings_variables(flags, file=file, env=env)
    assert load_settings(env=variables) == load_settings(flags, file=file, env=env)
    assert (variables["SPANGRAD_CHGO"], "SPANGRAD_HOST" in variables) == ("/bin/chgo", False)
