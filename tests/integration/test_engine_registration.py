"""A real vLLM that binds beyond loopback behind a token, registers itself, and outlives its gateway."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import SecretStr
from safetensors.numpy import load_file, save_file

from spangrad.processes import free_ports, wait_until
from spangrad.settings import StoreSettings
from spangrad.types import PolicyVersion
from spangrad.weights.checksums import checksum_directory
from tests.support.processes import VLLM_PYTHON, engine_settings, fetch, gateway_settings, running_gateway, start
from trainer.publish.publisher import Publisher

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

HOST = "127.0.0.2"
"""An address that is not loopback's usual one, so that it takes a token to bind it; what goes there stays on this machine."""
ASKED = {"model": "policy", "messages": [{"role": "user", "content": "say rome"}], "max_tokens": 4, "ignore_eos": True, "temperature": 0}


def test_engine_beyond_loopback_registers_and_outlives_its_gateway(
    tiny_model: Path, store: StoreSettings, tmp_path: Path, vllm_cache: Path
) -> None:
    if not VLLM_PYTHON.exists():
        pytest.skip(f"vLLM's environment {VLLM_PYTHON} is not there")
    (port,) = free_ports(1)
    url = f"http://{HOST}:{port}"
    engine = engine_settings(tiny_model, vllm_cache, host=HOST, port=port, url=url)
    behind = gateway_settings(engine, store, engine_url="")
    settings = behind.model_copy(update={"engine": behind.engine.model_copy(update={"token": SecretStr("secret")})})
    vllm = start("gateway.engine", settings, tmp_path / "engine.log")

    def chat() -> dict[str, Any]:
        return fetch(f"{settings.gateway.url}/v1/chat/completions", ASKED)

    def backends() -> list[dict[str, Any]]:
        return fetch(f"{settings.gateway.url}/admin/backends").get("backends", [])

    try:
        wait_until(lambda: "engine ready" in vllm.log.read_text(), 180, "vLLM", [vllm], poll_seconds=0.2)
        assert "go through the gateway" in fetch(f"{url}/pause", {})["error"]
        assert "go through the gateway" in fetch(f"{url}/v1/chat/completions", ASKED)["error"]
        with running_gateway(settings, tmp_path / "first.log"):
            assert chat()["usage"]["completion_tokens"] == 4
            (backend,) = backends()
            assert (backend["url"], backend["has_key"], backend["version"]) == (url, True, 0)
        version = tmp_path / "v1"
        shutil.copytree(tiny_model, version)
        weights = load_file(tiny_model / "model.safetensors")
        save_file({name: value * np.float32(1.1) for name, value in weights.items()}, version / "model.safetensors", {"format": "pt"})
        with running_gateway(settings, tmp_path / "second.log"):
            published = PolicyVersion("policy", 1, 0, "batch", checksum_directory(version), str(version))
            assert Publisher(settings.gateway).publish(published) > 0
            assert (chat()["usage"]["completion_tokens"], backends()[0]["version"]) == (4, 1)
            vllm.stop()
            assert backends() == [], "an engine that ends in good order leaves"
    finally:
        vllm.stop()
