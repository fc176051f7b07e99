"""Agent Lightning 0.3.0's own gateway, its `LLMProxy` (LiteLLM's proxy with its callbacks), recording into its own store, `agl store`.

In: an empty directory, the upstream's address. Out: `Setup`s. Invariant: each proxy is a process tree of its own, and all record into one
store; what is compared with ours is asked for logprobs too, which its callback `logprobs` does.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gateway_bodies import POLICY, Bodies
from benchmarks.gateway_routes import Kind, Setup
from benchmarks.peers import agent_lightning
from benchmarks.peers.environment import peer_environment
from spangrad.processes import Child, answers, free_ports, wait_until

START_SECONDS = 120
ANSWER_SPAN = "raw_gen_ai_request"
"""The span, of some seven a request, that holds the upstream's answer: its readers take token ids from it."""

_SERVE = """
import asyncio, json, signal, sys
from agentlightning import LightningStoreClient, LLMProxy

async def main(port, store, models, options):
    proxy = LLMProxy(port=port, host="127.0.0.1", launch_mode="mp", store=LightningStoreClient(store), model_list=models, **options)
    await proxy.start()
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await ended.wait()
    await proxy.stop()

if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])))
"""


@dataclass(frozen=True)
class _Variant:
    kinds: frozenset[Kind]
    options: Mapping[str, Sequence[str]]
    """Options of LLMProxy."""


_RECORD = ("return_token_ids", "logprobs", "opentelemetry")
_VARIANTS = {
    # Its streams are no streams: it asks the engine for a whole answer, and cuts that into pieces.
    "peer": _Variant(frozenset(Kind), {"callbacks": _RECORD}),
    # Without that conversion: streams as the engine gives them, of which its record holds no token ids.
    "peer_streaming": _Variant(frozenset({Kind.STREAM}), {"callbacks": _RECORD, "middlewares": ("rollout_attempt",)}),
    # As it comes: without logprobs, so that the upstream's answers are a third as long.
    "peer_defaults": _Variant(frozenset({Kind.WHOLE}), {}),
}


class Proxy:
    """One LLMProxy of the peer."""

    def __init__(self, child: Child, port: int, kinds: frozenset[Kind], store: agent_lightning.AgentLightning) -> None:
        self.children: Sequence[Child] = [child]
        self.kinds = kinds
        (self._name,) = store.start_rollouts(1)
        self.url = f"http://127.0.0.1:{port}/rollout/{self._name.rollout}/attempt/{self._name.attempt}"
        self._store = store

    def recorded(self) -> int:
        """Return the number of answers that the peer's readers find."""
        return self._store.count_spans(self._name, ANSWER_SPAN)

    def check(self, ids: Sequence[str], bodies: Bodies) -> Mapping[str, int]:
        """Compare numbers only, because the peer's streams have ids of their own."""
        return {"lost": max(0, len(ids) - self.recorded())}


@contextmanager
def running(directory: Path, upstream: str) -> Generator[Mapping[str, Setup]]:
    """Run the peer's store and all variants of its proxy."""
    with ExitStack() as stack:
        store = stack.enter_context(agent_lightning.running(directory))
        ports = dict(zip(_VARIANTS, free_ports(len(_VARIANTS)), strict=True))
        children: dict[str, Child] = {}
        for name, variant in _VARIANTS.items():
            children[name] = _start(directory / f"{name}.log", ports[name], upstream, store.url, variant)
            stack.callback(children[name].stop)
        for name, port in ports.items():
            wait_until(lambda port=port: answers(f"http://127.0.0.1:{port}/health/liveliness"), START_SECONDS, name, [children[name]])
        yield {name: Proxy(children[name], ports[name], variant.kinds, store) for name, variant in _VARIANTS.items()}


def _start(log: Path, port: int, upstream: str, store: str, variant: _Variant) -> Child:
    python = peer_environment("agent_lightning") / "python"
    parameters = {"model": f"hosted_vllm/{POLICY}", "api_base": f"{upstream}/v1", "api_key": "none"}
    models = [{"model_name": POLICY, "litellm_params": parameters}]
    command = [str(python), "-c", _SERVE, str(port), store, json.dumps(models), json.dumps(variant.options)]
    return Child("LLMProxy", command, log, agent_lightning.OFFLINE, inherit_settings=False)
