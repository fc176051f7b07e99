"""The gateway, the plugin and the supervisor with a real vLLM."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from math import log
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from clickhouse_connect.driver.client import Client

from page.call_view import CallPlace, alternatives
from page.reading import PageStore
from spangrad.processes import wait_until
from spangrad.settings import Settings
from spangrad.store.clickhouse import connect
from spangrad.weights.checksums import checksum_directory, sums_of_directory, tokenizer_hash
from spangrad.weights.shards import ChecksumScope, EngineReports, combine
from tests.support.fake_engine import SAMPLING
from tests.support.gateways import held_checksum
from tests.support.processes import ROOT, VLLM_PYTHON, fetch, processes_of

pytestmark = pytest.mark.vllm

MESSAGES = [{"role": "user", "content": "say rome"}]
GREEDY: dict[str, Any] = {"model": "policy", "messages": MESSAGES, "temperature": 0, "max_tokens": 8}
CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def state(policy: str) -> dict[str, Any]:
    """Return the state of a policy, without the seconds of its engines."""
    return {name: value for name, value in fetch(policy).items() if not name.endswith("_seconds")}


@pytest.fixture(scope="module")
def rows(gateway: Settings) -> Callable[[str, int], list[dict[str, Any]]]:
    client: Client = connect(gateway.store)

    def of_rollout(rollout: str, expected: int) -> list[dict[str, Any]]:
        """The calls of a rollout, once as many spans have arrived."""
        query = f"SELECT * FROM spangrad.calls WHERE RolloutKey = '{rollout}' ORDER BY Seq, ChoiceIndex"
        wait_until(lambda: len({row["SpanId"] for row in client.query(query).named_results()}) >= expected, 60, "the calls' rows")
        return list(client.query(query).named_results())

    return of_rollout


def post(url: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read()


def chunks(stream: bytes) -> list[dict[str, Any]]:
    *events, done, end = stream.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


def same(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs between two runs of the same request."""
    return {name: value for name, value in answer.items() if name not in {"id", "created"}}


def test_vllm_plugin_in_direct_mode_answers_with_ids(engine: Settings, tiny_model: Path) -> None:
    answer = fetch(engine.gateway.engine_url + CHAT, GREEDY)
    version = fetch(f"{engine.gateway.engine_url}/spangrad/info")["version"]
    incomplete = {"policy": "policy", "tokenizer_hash": tokenizer_hash(tiny_model)}
    facts = {**incomplete, "versions": [[[0, version]]], "sampling": {**SAMPLING, "temperature": 0.0}}
    (choice,) = answer["choices"]
    assert answer["spangrad"] == facts
    assert answer["prompt_token_ids"] == [1, 4, 7, 12, 2, 1, 5]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == answer["usage"]["completion_tokens"]
    stream = chunks(post(engine.gateway.engine_url + CHAT, {**GREEDY, "stream": True, "stream_options": {"include_usage": True}}))
    assert stream[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert [token_id for chunk in stream for part in chunk["choices"] for token_id in part.get("token_ids") or []] == choice["token_ids"]
    assert [chunk.get("spangrad") for chunk in stream] == [incomplete, *[None] * (len(stream) - 2), facts]
    completion = fetch(f"{engine.gateway.engine_url}/v1/completions", {"model": "policy", "prompt": "say rome", "max_tokens": 2})
    (choice,) = completion["choices"]
    assert (choice["prompt_token_ids"], completion["spangrad"]) == ([7, 12], {**facts, "sampling": SAMPLING})
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"])


def merged(stream: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A stream with its tokens in one chunk: how many tokens vLLM puts into one depends on its haste."""
    first, *rest, usage = stream
    whole = rest[-1]
    for chunk in reversed(rest[:-1]):
        (part,), (total,) = chunk["choices"], whole["choices"]
        assert chunk.keys() == whole.keys()
        assert part.keys() | {"stop_reason"} == total.keys()
        total["delta"]["content"] = part["delta"]["content"] + total["delta"]["content"]
        for name in ("token_ids", "logprobs"):
            assert (part[name] is None) == (total[name] is None)
        if part["token_ids"]:
            total["token_ids"] = part["token_ids"] + total["token_ids"]
        if part["logprobs"]:
            total["logprobs"]["content"] = part["logprobs"]["content"] + total["logprobs"]["content"]
    return [first, whole, usage]


EXTRAS: list[dict[str, Any]] = [{}, {"logprobs": True, "top_logprobs": 2}, {"return_token_ids": True}, {"n": 1, "stop": ["lima"]}]


@pytest.mark.parametrize("extra", EXTRAS, ids=str)
def test_gateway_answer_equals_that_of_vllm(gateway: Settings, engine: Settings, extra: dict[str, Any]) -> None:
    """Its plugin makes vLLM answer with ids unasked; without what was not asked for, that is what the gateway's client gets."""
    asked = {**GREEDY, **extra}
    wants_ids, wants_logprobs = "return_token_ids" in extra, "logprobs" in extra

    def bare(answer: dict[str, Any]) -> dict[str, Any]:
        """Return the answer without the field `spangrad`, and with null where vLLM writes null for what was not requested."""
        answer.pop("spangrad", None)
        if not wants_ids and "prompt_token_ids" in answer:
            answer["prompt_token_ids"] = None
        for choice in answer["choices"]:
            for name, is_wanted in (("token_ids", wants_ids), ("logprobs", wants_logprobs)):
                if name in choice and not is_wanted:
                    choice[name] = None
        return same(answer)

    direct, through = engine.gateway.engine_url + CHAT, gateway.gateway.url + CHAT
    assert same(fetch(through, asked)) == bare(fetch(direct, asked))
    streamed = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    assert merged([same(chunk) for chunk in chunks(post(through, streamed))]) == merged(
        [bare(chunk) for chunk in chunks(post(direct, streamed))]
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_logprobs": 2},
        {"temperature": -1},
        {"model": "nobody"},
        {"messages": "x"},
        {"max_tokens": 4096},
        {"tools": [TOOL], "tool_choice": "auto"},
    ],
    ids=str,
)
def test_gateway_refusal_equals_that_of_vllm(gateway: Settings, engine: Settings, wrong: dict[str, Any]) -> None:
    def refusal(url: str) -> tuple[int, Any]:
        with pytest.raises(urllib.error.HTTPError) as caught:
            post(url + CHAT, {**GREEDY, **wrong})
        return caught.value.code, json.loads(caught.value.read())

    assert refusal(gateway.gateway.url) == refusal(engine.gateway.engine_url)


def test_gateway_calls_are_stored_with_tokens_of_engine(gateway: Settings, engine: Settings, rows: Callable[[str], list[Any]]) -> None:
    prefix = f"{gateway.gateway.url}/rollout/store-1/attempt/0"
    direct = fetch(engine.gateway.engine_url + CHAT, GREEDY)
    fetch(prefix + CHAT, GREEDY)
    post(prefix + CHAT, {**GREEDY, "stream": True})
    fetch(prefix + CHAT, {**GREEDY, "n": 2, "temperature": 1.0, "seed": 3, "top_k": 5})
    (choice,) = direct["choices"]
    expected = {
        "PromptIds": direct["prompt_token_ids"],
        "ResponseIds": choice["token_ids"],
        "IdsSource": "engine",
        "Policy": "policy",
        "Versions.Start": [0],
        "Versions.Version": [direct["spangrad"]["versions"][0][0][1]],
        "TokenizerHash": direct["spangrad"]["tokenizer_hash"],
        "Temperature": 0.0,
        "TopK": 0,
        "FinishReason": "stop",
        "HttpStatus": 200,
        "Constrained": False,
        "ErrorType": "",
    }
    whole, stream, first, second = rows("store-1", 3)
    for row in (whole, stream):
        assert {name: row[name] for name in expected} == expected
        assert row["Logprobs"] == pytest.approx([token["logprob"] for token in choice["logprobs"]["content"]], abs=1e-6)
    assert [(row["ChoiceIndex"], row["PromptIds"], row["TopK"]) for row in (first, second)] == [
        (0, direct["prompt_token_ids"], 5),
        (1, direct["prompt_token_ids"], 5),
    ]
    assert all(len(row["ResponseIds"]) == len(row["Logprobs"]) > 0 for row in (first, second))


def test_page_shows_alternatives_that_the_agent_asked_the_gateway_for(gateway: Settings, rows: Callable[[str], list[Any]]) -> None:
    prefix = f"{gateway.gateway.url}/rollout/alternatives/attempt/0"
    asked = {**GREEDY, "logprobs": True, "top_logprobs": 3}
    answer = fetch(prefix + CHAT, asked)
    post(prefix + CHAT, {**asked, "stream": True})
    fetch(prefix + CHAT, {**GREEDY, "logprobs": True})
    content = answer["choices"][0]["logprobs"]["content"]
    expected = [[(other["token"], pytest.approx(other["logprob"], abs=1e-5)) for other in token["top_logprobs"]] for token in content]
    assert {len(others) for others in expected} == {3}
    store = PageStore(gateway.store)
    shown = [alternatives(store, CallPlace("alternatives", row["TraceId"], row["SpanId"])) for row in rows("alternatives", 3)]
    store.close()
    assert [[[(other["token"], other["logprob"]) for other in others] for others in call] for call in shown] == [expected, expected, []]


def test_gateway_stream_cut_by_client_records_tokens_so_far(gateway: Settings, rows: Callable[[str], list[Any]]) -> None:
    url = f"{gateway.gateway.url}/rollout/cut-stream/attempt/0{CHAT}"
    body = {**GREEDY, "stream": True, "max_tokens": 110, "ignore_eos": True}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        for _ in range(8):
            answer.readline()
    (row,) = rows("cut-stream", 1)
    # Where the client's leaving overtakes the engine, the call is cut; else it was whole already. Either way nothing is invented.
    assert row["Aborted"] is (row["FinishReason"] == "")
    assert 3 <= len(row["ResponseIds"]) == len(row["Logprobs"]) <= 110


def test_logprobs_at_temperature_0_7_are_of_sampled_distribution(engine: Settings) -> None:
    """The logprobs of all tokens at temperature 0.7 are log_softmax(logprobs at temperature 1 / 0.7)."""
    everything = {**GREEDY, "max_tokens": 1, "logprobs": True, "top_logprobs": 15, "seed": 1}

    def distribution(temperature: float) -> dict[str, float]:
        answer = fetch(engine.gateway.engine_url + CHAT, {**everything, "temperature": temperature})
        top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        return {candidate["token"]: candidate["logprob"] for candidate in top}

    unscaled = distribution(1.0)
    assert len(unscaled) == 15
    scaled = {token: value / 0.7 for token, value in unscaled.items()}
    norm = log(sum(2.718281828459045**value for value in scaled.values()))
    assert distribution(0.7) == pytest.approx({token: value - norm for token, value in scaled.items()}, abs=1e-4)


def test_publication_serves_new_weights_and_refuses_wrong_checksum(
    gateway: Settings, engine: Settings, tiny_model: Path, tmp_path: Path, rows: Callable[[str], list[Any]]
) -> None:
    policy = f"{gateway.gateway.url}/admin/policies/policy"
    other = perturbed(tiny_model, tmp_path / "other")
    before = state(policy)
    version = before["version"]
    old = fetch(engine.gateway.engine_url + CHAT, GREEDY)

    refused = publish(policy, other, version + 1, checksum="float32:0000000000000000")
    assert "Write them anew" in refused["error"]["message"]
    assert state(policy) == before
    assert fetch(engine.gateway.engine_url + CHAT, GREEDY)["choices"] == old["choices"]

    published = publish(policy, other, version + 1)
    assert (published["version"], published["checksum"]) == (version + 1, checksum_directory(other))
    assert published["seconds"] > 0
    assert state(policy) == {**before, "version": version + 1, "before": version}
    assert held_checksum(engine.gateway.engine_url) == checksum_directory(other)
    new = fetch(f"{gateway.gateway.url}/rollout/reload-1/attempt/0{CHAT}", {**GREEDY, "logprobs": True, "return_token_ids": True})
    assert logprobs(new) != pytest.approx(logprobs(old), abs=1e-3)
    assert logprobs(new) == pytest.approx(reference_logprobs(other, new), abs=1e-4)
    (row,) = rows("reload-1", 1)
    assert (row["Versions.Start"], row["Versions.Version"]) == ([0], [version + 1])

    assert publish(policy, other, version + 1)["seconds"] == 0
    assert "not newer" in publish(policy, tiny_model, version + 1)["error"]["message"]
    # Leave the engine with the weights that other tests expect.
    assert publish(policy, tiny_model, version + 2)["version"] == version + 2
    assert logprobs(fetch(engine.gateway.engine_url + CHAT, GREEDY)) == pytest.approx(logprobs(old), abs=1e-5)


def test_publication_with_calls_in_flight_completes_them(gateway: Settings, tiny_model: Path, rows: Callable[[str], list[Any]]) -> None:
    policy = f"{gateway.gateway.url}/admin/policies/policy"
    version = state(policy)["version"]
    url = f"{gateway.gateway.url}/rollout/flight-1/attempt/0{CHAT}"
    long = {**GREEDY, "max_tokens": 110, "ignore_eos": True, "temperature": 1.0}
    answers: list[dict[str, Any]] = []
    callers = [threading.Thread(target=lambda: answers.extend(fetch(url, long) for _ in range(3))) for _ in range(4)]
    for caller in callers:
        caller.start()
    assert publish(policy, tiny_model, version + 1)["version"] == version + 1
    for caller in callers:
        caller.join()
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [110] * 12
    recorded = rows("flight-1", 12)
    assert {tuple(row["Versions.Version"]) for row in recorded} <= {(version,), (version, version + 1), (version + 1,)}
    assert all(len(row["ResponseIds"]) == len(row["Logprobs"]) == 110 for row in recorded)


def test_closed_attempts_leave_no_sequence_in_engine(gateway: Settings, engine: Settings) -> None:
    def counted(name: str) -> float:
        with urllib.request.urlopen(f"{engine.gateway.engine_url}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}{{"))

    long = {**GREEDY, "max_tokens": 110, "ignore_eos": True}
    answers: list[dict[str, Any]] = []

    def call_until_refused(rollout: str) -> None:
        answer = dict[str, Any]()
        while "error" not in answer:
            answer = fetch(f"{gateway.gateway.url}/rollout/{rollout}/attempt/0{CHAT}", long)
            answers.append(answer)

    before = counted("request_success_total")
    callers = [threading.Thread(target=call_until_refused, args=(f"closed-{number % 4}",)) for number in range(16)]
    for caller in callers:
        caller.start()
    wait_until(lambda: counted("num_requests_running") == len(callers), 60, "all calls in the engine")
    closed = [{"rollout_id": f"closed-{number}", "attempt": 0, "reason": "cancelled"} for number in range(4)]
    fetch(f"{gateway.gateway.url}/attempts/close", {"attempts": closed})
    for caller in callers:
        caller.join(60)
    refused = [answer["error"]["type"] for answer in answers if "error" in answer]
    assert refused == ["attempt_closed"] * len(callers)
    wait_until(lambda: counted("num_requests_running") + counted("num_requests_waiting") == 0, 60, "an engine without sequences")
    assert counted("request_success_total") - before < len(answers), "every call went on to its end"


def test_engine_after_a_call_leaves_its_cores_to_others(engine: Settings) -> None:
    processes = [psutil.Process(pid) for pid in processes_of(engine)]

    def cpu_seconds() -> float:
        return sum(times.user + times.system for times in (process.cpu_times() for process in processes))

    def used_after_a_call() -> float:
        post(engine.gateway.engine_url + CHAT, GREEDY)
        before = cpu_seconds()
        time.sleep(0.8)  # vLLM spins for a second after each message
        return cpu_seconds() - before

    # What else an engine has to do now and then falls into one of them.
    assert min(used_after_a_call() for _ in range(3)) < 0.4


def test_publication_of_incomplete_weights_takes_engine_out_until_next(
    gateway: Settings, tiny_model: Path, tmp_path: Path, rows: Callable[[str], list[Any]]
) -> None:
    policy = f"{gateway.gateway.url}/admin/policies/policy"
    version = state(policy)["version"]
    url = f"{gateway.gateway.url}/rollout/beheaded-1/attempt/0{CHAT}"
    answers: list[dict[str, Any]] = []
    endless = {**GREEDY, "max_tokens": 110, "ignore_eos": True}
    callers = [threading.Thread(target=lambda: answers.extend(fetch(url, endless) for _ in range(2))) for _ in range(4)]
    for caller in callers:
        caller.start()

    refused = publish(policy, beheaded(tiny_model, tmp_path / "beheaded"), version + 1)
    assert f"publication of version {version + 1} failed at checksum" in refused["error"]["message"]
    down = state(policy)
    assert (down["version"], down["status"]) == (version, "down")
    # Calls that were frozen in the engine have ended; those that came after were refused. None hangs, and each has its span.
    for caller in callers:
        caller.join(60)
    assert not any(caller.is_alive() for caller in callers)
    assert fetch(url, GREEDY)["error"]["type"] == "engine_down"
    ended = {(row["FinishReason"], row["Aborted"], row["ErrorType"]) for row in rows("beheaded-1", 9)}
    assert ended <= {("length", False, ""), ("abort", True, ""), ("", False, "503"), ("", False, "engine_down")}

    assert publish(policy, tiny_model, version + 1)["version"] == version + 1
    assert fetch(url, GREEDY)["choices"][0]["finish_reason"] == "stop"


SUMS = """
import json, sys, torch, msgspec
from safetensors.torch import save_file
from gateway.vllm_plugin import layout, worker
from spangrad.weights.shards import ChecksumScope
torch.manual_seed(0)
tensors = {"q": torch.randn(6, 5), "k": torch.randn(6, 5) * 1e30, "down": torch.randn(4, 8)}
tensors["norm"] = torch.tensor([0.0, -0.0, float("inf"), 1e-42])
save_file(tensors, f"{sys.argv[1]}/model.safetensors")
worker.CHUNK_WORDS["cpu"] = 4

def held(rank, dtype):
    # As vLLM's loaders copy: fused rows, columns, a transposed layer, padding, and a copy for each worker.
    qk, down, norm = torch.empty(8, 5, dtype=dtype).fill_(0), torch.empty(4, 4, dtype=dtype).t(), torch.empty(4, dtype=dtype)
    with layout.CopyRecorder() as recorder:
        for name, tensor in tensors.items():
            recorder.add(name, tensor)
        qk[:3].copy_(tensors["q"].narrow(0, 3 * rank, 3))
        qk[3:6].copy_(tensors["k"].narrow(0, 3 * rank, 3))
        down.t().copy_(tensors["down"][:, 4 * rank : 4 * rank + 4])
        norm.copy_(tensors["norm"])
    return {"qk": qk, "down": down, "norm": norm, "again": norm}, recorder.layout

for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for scope in (ChecksumScope.FULL, ChecksumScope.SAMPLED):
        reports = [worker.report(*held(rank, dtype), scope) for rank in (0, 1)]
        print(msgspec.json.encode({"replicas": [reports]}).decode())
parameters, placed = held(0, torch.float32)
parameters["qk"][7, 2] = 1
try:
    worker.report(parameters, placed, ChecksumScope.FULL)
except ValueError as error:
    print(error)
parameters, placed = held(0, torch.float32)
parameters["qk"] = parameters["qk"].to(torch.float8_e4m3fn)
print(sorted(worker.report(parameters, placed, ChecksumScope.FULL).unread.items()))

def load():
    parameters["norm"].zero_()
    parameters["norm"].copy_(tensors["norm"] * 1)
    parameters["down"].copy_(tensors["down"][:, :4].t())

placed = layout.recorded(tensors.items(), load)
print(parameters["norm"][2].item(), sorted(placed.names))
"""


def test_worker_report_equals_sums_of_files(tmp_path: Path) -> None:
    """Fused, split, transposed and padded, in each dtype, whole and as a sample; what is quantised is named."""
    if not VLLM_PYTHON.exists():
        pytest.skip(f"vLLM's environment {VLLM_PYTHON} is not there")
    command = [str(VLLM_PYTHON), "-c", SUMS, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    *reports, padding, unread, unchanged = done.stdout.splitlines()
    pairs = [(dtype, scope) for dtype in ("float32", "bfloat16", "float16") for scope in (ChecksumScope.FULL, ChecksumScope.SAMPLED)]
    for (dtype, scope), report in zip(pairs, reports, strict=True):
        held = combine(msgspec.json.decode(report, type=EngineReports))
        assert held.tensors == sums_of_directory(tmp_path, dtype, scope=scope)
        if scope is ChecksumScope.FULL:
            assert held.checksum == checksum_directory(tmp_path, dtype)
    assert padding == "qk has words beside the checkpoint's that are not zero"
    assert unread == "[('k', 'vLLM holds it as float8_e4m3fn'), ('q', 'vLLM holds it as float8_e4m3fn')]"
    assert unchanged == "inf ['down']", "a layout is recorded without a change, and what is computed is no tensor of the checkpoint"


def publish(policy: str, path: Path, version: int, checksum: str | None = None, **more: str) -> dict[str, Any]:
    return fetch(f"{policy}/versions", {"version": version, "path": str(path), "checksum": checksum or checksum_directory(path), **more})


def beheaded(model: Path, directory: Path) -> Path:
    """A copy of a model without its output layer: vLLM keeps the old one, and says that all is well."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(model, directory)
    weights = load_file(model / "model.safetensors")
    del weights["lm_head.weight"]
    save_file({name: value * 1.25 for name, value in weights.items()}, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def perturbed(model: Path, directory: Path) -> Path:
    """A copy of a model with other weights."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(model, directory)
    weights = load_file(model / "model.safetensors")
    save_file({name: value * 1.25 for name, value in weights.items()}, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def logprobs(answer: dict[str, Any]) -> list[float]:
    return [token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]]


def reference_logprobs(model: Path, answer: dict[str, Any]) -> list[float]:
    """Return the logprobs that transformers gives the tokens of an answer, unscaled, as vLLM's are at temperature 0."""
    import torch
    from transformers import AutoModelForCausalLM

    prompt, response = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor([prompt + response])).logits[0]
    at = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
    return at[torch.arange(len(response)), torch.tensor(response)].tolist()
