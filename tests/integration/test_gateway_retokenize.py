"""A frozen upstream's calls: retokenised by the gateway, marked in the store."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
import pytest

from gateway.server import running
from spangrad.processes import free_ports
from spangrad.settings import Settings, StoreSettings
from spangrad.settings.sources import load_settings
from spangrad.store.clickhouse import connect
from spangrad.weights.checksums import tokenizer_hash
from tests.support.fake_engine import FakeEngine

ASKED = {"model": "judge", "messages": [{"role": "user", "content": "say rome"}]}


def settings_of(store: StoreSettings, engine: FakeEngine, tokenizer: Path, spill: Path) -> Settings:
    (port,) = free_ports(1)
    flags = {
        "gateway.port": port,
        "gateway.url": f"http://127.0.0.1:{port}",
        "gateway.engine_url": "",
        "gateway.backends": [{"url": f"http://127.0.0.1:{engine.port}", "policy": "judge", "kind": "openai"}],
        "gateway.retokenize": str(tokenizer),
        "gateway.spill_path": str(spill),
    }
    return load_settings(flags, env={}).model_copy(update={"store": store})


async def test_retokenized_calls_are_marked_in_ids_source(
    store: StoreSettings, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(policy="judge", ids_missing=True)
    whole = engine.whole
    monkeypatch.setattr(engine, "whole", lambda asked: {name: value for name, value in whole(asked).items() if name != "spangrad"})
    settings = settings_of(store, engine, tiny_model, tmp_path / "spill")
    url = f"{settings.gateway.url}/rollout/judged/attempt/0/v1/chat/completions"
    async with engine.running(), running(settings), aiohttp.ClientSession() as client, client.post(url, json=ASKED) as answer:
        assert answer.status == 200
        content = json.loads(await answer.read())["choices"][0]["message"]["content"]
    # The gateway has ended: its span is in the store.
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(tiny_model))
    asked = connect(store)
    columns = "IdsSource, TokenizerHash, PromptIds, ResponseIds, Logprobs, `Versions.Version`"
    (row,) = asked.query(f"SELECT {columns} FROM spangrad.calls WHERE RolloutKey = 'judged'").result_rows
    prompt = "<|im_start|> user say rome <|im_end|> <|im_start|> assistant"
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in (prompt, content)]
    assert row == ("retokenized", tokenizer_hash(tiny_model), *ids, [], [])
