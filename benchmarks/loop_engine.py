"""The engine of the loop's benchmark: answers whose durations are set, over a set number of slots, with weights that can be replaced.

In: chat requests, and what the gateway asks of an engine. Out: an answer of eight tokens with ids, logprobs and the version that sampled
each. Invariant: no more calls run at once than there are slots, others wait in the order in which they came; durations are lognormal with
a set mean, drawn in that order from the seed, so that every run meets the same ones; a call in flight goes on when weights are replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import time
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from benchmarks.gateway_bodies import SAMPLING
from spangrad.weights.checksums import sums_of_directory, tokenizer_hash

TOKENS = 8
PROMPT_IDS = [1, 2, 3, 4]


class Engine:
    """State of the engine, and its routes."""

    def __init__(self, model: Path, slots: int, mean_seconds: float, sigma: float, seed: int) -> None:
        self._slots = asyncio.Semaphore(slots)
        self._draw = random.Random(seed)
        self._location = math.log(mean_seconds) - sigma**2 / 2
        self._sigma = sigma
        self._model = str(model)
        self._tokenizer = tokenizer_hash(model)
        self._sums = sums_of_directory(model)
        self._version = 0
        self._changes: list[tuple[float, int]] = [(0.0, 0)]
        """Time of each change of weights, in seconds of the monotonic clock, with the version that it brought."""
        self._paused_since: float | None = None
        self._pauses: list[tuple[float, float]] = []
        self._busy: list[tuple[float, float]] = []
        """Begin and end of each answer, as are all times that are reported: seconds since 1970."""
        self._calls = 0

    def app(self) -> web.Application:
        """Return the server's application."""
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/spangrad/info", self._info)
        app.router.add_get("/is_paused", self._is_paused)
        app.router.add_get("/get_world_size", self._world_size)
        app.router.add_get("/figures", self._figures)
        app.router.add_post("/{order:.*}", self._order)
        return app

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        probe = body["messages"][0]["content"] == "probe"
        seconds = 0.0 if probe else self._draw.lognormvariate(self._location, self._sigma)
        if probe:
            return web.json_response(self._answer(body, time.monotonic(), 0.0))
        async with self._slots:
            began, wall = time.monotonic(), time.time()
            try:
                await asyncio.sleep(seconds)
            finally:
                self._busy.append((wall, time.time()))
            return web.json_response(self._answer(body, began, seconds))

    def _answer(self, body: dict[str, Any], began: float, seconds: float) -> dict[str, Any]:
        self._calls += 1
        content = f"answer {self._calls}"
        logprob = {"token": "t", "logprob": -0.5, "bytes": [116], "top_logprobs": []}
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": content, "refusal": None, "reasoning": None},
            "logprobs": {"content": [logprob] * TOKENS} if body.get("logprobs") else None,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": list(range(10, 10 + TOKENS)) if body.get("return_token_ids") else None,
        }
        return {
            "id": f"chatcmpl-{self._calls}",
            "object": "chat.completion",
            "created": 1700000000,
            "model": body["model"],
            "choices": [choice],
            "usage": {"prompt_tokens": len(PROMPT_IDS), "total_tokens": len(PROMPT_IDS) + TOKENS, "completion_tokens": TOKENS},
            "prompt_logprobs": None,
            "prompt_token_ids": PROMPT_IDS if body.get("return_token_ids") else None,
            "spangrad": {
                "policy": "policy",
                "tokenizer_hash": self._tokenizer,
                "versions": [self._versions(began, seconds)],
                "sampling": SAMPLING,
            },
        }

    def _versions(self, began: float, seconds: float) -> list[list[int]]:
        """Return the first token and the version of each run of tokens that one version sampled, tokens being spread evenly in time."""
        versions: dict[int, int] = {}
        for token in range(TOKENS):
            at = began + seconds * token / TOKENS
            version = max((change for change in self._changes if change[0] <= at), key=lambda change: change[0])[1]
            versions.setdefault(version, token)
        return [[token, version] for version, token in versions.items()]

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model"}]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _info(self, _: web.Request) -> web.Response:
        served = {"policy": "policy", "version": self._version, "tokenizer_hash": self._tokenizer, "warm": True, "model": self._model}
        return web.json_response({**served, "lora_rank": 0, "zero_adapter": "", "transfer": "", "api_servers": 1, "data_parallel_size": 1})

    async def _is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": self._paused_since is not None})

    async def _world_size(self, _: web.Request) -> web.Response:
        return web.json_response({"world_size": 1})

    async def _figures(self, _: web.Request) -> web.Response:
        return web.json_response({"busy": self._busy, "pauses": self._pauses})

    async def _order(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        name = body.get("method", request.path)
        if name == "/pause":
            self._paused_since = time.time()
        elif name == "/resume" and self._paused_since is not None:
            self._pauses.append((self._paused_since, time.time()))
            self._paused_since = None
        elif name == "/update_weight_version":
            self._version, self._model = int(body["new_version"]), ""
            self._changes.append((time.monotonic(), self._version))
        elif name == "reload_weights":
            self._sums = await asyncio.to_thread(sums_of_directory, Path(body["kwargs"]["weights_path"]))
        elif name == "/spangrad/checksum":
            shards = [[name, [0, [[sums.words, 1]]], msgspec.structs.asdict(sums)] for name, sums in self._sums.items()]
            return web.json_response({"replicas": [[{"shards": shards}]]})
        return web.json_response({"results": [None]})


def run(engine: type[Engine], description: str | None) -> None:
    """Serve an engine on a port."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--mean-seconds", type=float, required=True)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()

    async def app() -> web.Application:
        return engine(chosen.model, chosen.slots, chosen.mean_seconds, chosen.sigma, chosen.seed).app()

    web.run_app(app(), host="127.0.0.1", port=chosen.port, print=None, access_log=None, handler_cancellation=True)


if __name__ == "__main__":
    run(Engine, __doc__)
