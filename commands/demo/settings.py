"""Settings of the demo, and the file that its services read them from.

In: a run directory. Out: settings by dotted key, and a TOML file. Invariant: every file lies under the run directory, every port is free.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

from pydantic import SecretStr

from spangrad.probing.machine import VLLM_PYTHON
from spangrad.processes import free_ports
from spangrad.settings.sources import Origin

CHECKOUT = Path(__file__).resolve().parents[2]
"""Root of the checkout, in which `make setup` installs vLLM's virtual environment."""
SETTINGS = "spangrad.toml"
"""Name of the settings file that every service of a run reads, in the run directory."""


def store_and_gateway(directory: Path, ports: Sequence[int]) -> dict[str, object]:
    """Return settings of a store and a gateway, by dotted key: on the four given ports, with all files under `directory`."""
    grpc, http, sql, gateway = ports
    return {
        "store.path": str(directory / "store"),
        "store.otlp_grpc_port": grpc,
        "store.otlp_http_port": http,
        "store.clickhouse_port": sql,
        "store.url": f"http://127.0.0.1:{sql}",
        "store.otlp_endpoint": f"http://127.0.0.1:{http}",
        "gateway.port": gateway,
        "gateway.url": f"http://127.0.0.1:{gateway}",
        "gateway.spill_path": str(directory / "gateway-spill"),
    }


def demo_settings(directory: Path, *, seed: int, group_size: int) -> dict[str, object]:
    """Return the demo's settings, by dotted key: free ports, all files under `directory`, and the task's hyperparameters."""
    *ports, engine = free_ports(5)
    return {
        **store_and_gateway(directory, ports),
        "gateway.engine_url": f"http://127.0.0.1:{engine}",
        "engine.port": engine,
        "engine.python": str(CHECKOUT / VLLM_PYTHON),
        "engine.model": str(directory / "model"),
        "engine.dtype": "float32",
        "engine.max_model_len": 128,
        "engine.kv_cache_bytes": 64 * 2**20,
        "engine.enforce_eager": True,
        "engine.cache_dir": str(directory.parent / ".vllm-cache"),
        "engine.extra_args": ["--seed", str(seed), "--distributed-executor-backend", "uni"],
        "builder.poll_seconds": 0.1,
        "builder.selection": {"policies": "policy"},
        "builder.rules": [{"name": "tool_error", "kind": "tool_error", "reward": -0.2, "tools": ["weather", "clock"]}],
        "trainer.run_id": "demo",
        "trainer.model": str(directory / "model"),
        "trainer.directory": str(directory / "policies"),
        "trainer.sampling.groups_per_batch": 4,
        "trainer.credit.scheme": "reward_to_go",
        "trainer.credit.baseline": "turn",
        "trainer.optim.learning_rate": 1e-3,
        "trainer.optim.mini_batches": 4,
        "trainer.poll_seconds": 0.05,
        "runner.run_id": "demo",
        "runner.directory": str(directory / "runner"),
        "runner.group_size": group_size,
        "runner.workers": 1,
        "runner.concurrency": 64,
    }


def collector_settings(directory: Path) -> dict[str, object]:
    """Return the settings that put the real Collector in front of the store, by dotted key: every exporter of spans sends to it."""
    grpc, http, health = free_ports(3)
    return {
        "collector.otlp_grpc_port": grpc,
        "collector.otlp_http_port": http,
        "collector.health_port": health,
        "collector.queue_path": str(directory / "collector"),
        "store.otlp_endpoint": f"http://127.0.0.1:{http}",
    }


def direct_mode_settings(*, otelcol: bool) -> dict[str, object]:
    """Return the settings of direct mode, by dotted key: the agent calls vLLM without the gateway.

    No gateway counts the calls then, so a rollout is complete once no span of it has arrived for a while. An attempt's spans are accepted
    before its root span is sent: the store inserts them at once, the Collector forwards them in batches.
    """
    return {"runner.gateway": False, "builder.quiet_seconds": 3 if otelcol else 0.5}


def write_settings(path: Path, origins: Iterable[Origin]) -> None:
    """Write the settings that are not defaults as a TOML file that any command can read; None is written as the text `null`."""
    sections: dict[str, list[str]] = {}
    for origin in origins:
        if origin.source != "default":
            section, name = origin.key.split(".", 1)
            sections.setdefault(section, []).append(f"{name} = {_toml('null' if origin.value is None else origin.value)}")
    path.touch(mode=0o600)  # it may hold tokens
    path.write_text("\n".join(f"[{section}]\n" + "\n".join(lines) + "\n" for section, lines in sections.items()), "utf-8")


def _toml(value: object) -> str:
    """Return a value in TOML syntax: strings, numbers, booleans and paths as JSON, tables inline without the fields that are None.

    Characters are not escaped: TOML refuses JSON's escapes of those beyond 16 bits.
    """
    if isinstance(value, Mapping):
        table = cast("Mapping[str, object]", value)
        return "{" + ", ".join(f"{_toml(name)} = {_toml(item)}" for name, item in table.items() if item is not None) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, cast("Iterable[object]", value))) + "]"
    return json.dumps(value, default=_plain, ensure_ascii=False)


def _plain(value: object) -> str:
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)
