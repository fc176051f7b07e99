"""Actions of the page over a real store, ledger and queue; the gateway is a server that keeps what it is asked."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spangrad.client.queue_http import QueueHttp
from spangrad.http.queue_messages import new_rollout
from spangrad.settings import GatewaySettings, PageSettings, Settings, StoreSettings
from tests.support.built_rollouts import post, rows, settings_of
from tests.support.pages import queue_beside, running_page
from tests.support.scripted_servers import AdminGateway
from tests.support.spans import SpanFactory
from tests.support.trainers import FakeSource, group, settings, wired, write_base
from trainer.ledger.skips import Skip, SkipReason
from trainer.loop import Trainer, newest_version
from transition_builder.loop import build_once

RUN = "acts"
REPLY = "sunny\u2028and\u2029very\x85warm"
"""Reply with characters that end a line of a text, and none of JSON lines."""
OF_VERSION = {"author": "Ada", "policy": "policy", "branch": "main"}


@dataclass
class ActingPage:
    """A page with everything that its actions change."""

    url: str
    store: StoreSettings
    trainer: Trainer
    gateway: AdminGateway
    queue: QueueHttp
    builder: Settings
    rollout: tuple[str, str, str]
    """Trace, root span and span of the call of rollout acts-1."""
    examples: Path

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as answer:
            return json.load(answer)

    @property
    def token(self) -> str:
        """Token for actions, as the page's own documents have it."""
        with urllib.request.urlopen(f"{self.url}/training", timeout=30) as answer:
            return _token(answer.read().decode())

    def act(self, action: Mapping[str, object], headers: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Status and sentence of the answer to an action."""
        sent = {"Content-Type": "application/json", "X-Spangrad-Action": self.token, **(headers or {})}
        return _posted(self.url, action, sent)


def _token(document: str) -> str:
    match = re.search('data-action-token="([^"]*)"', document)
    assert match
    return match[1]


def _posted(url: str, action: Mapping[str, object], headers: Mapping[str, str]) -> tuple[int, str]:
    request = urllib.request.Request(f"{url}/api/actions", json.dumps(action).encode(), dict(headers))
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)["done"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


@pytest.fixture(scope="module")
def page(store: StoreSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ActingPage]:
    directory = tmp_path_factory.mktemp("acting")
    trainer = wired(
        settings(write_base(directory / "base"), directory / "policies", groups_per_batch=1, checkpoint__keep=9), FakeSource(["a", "b"])
    )
    trainer.run(follow=False)
    spans = SpanFactory(run=RUN)
    root = spans.root("acts-1", calls=1, GroupId="acting")
    spans.evaluation(root, 1.0)
    call = spans.call(spans.client(root, rollout="acts-1"), rollout="acts-1")
    messages, reply = [{"role": "user", "content": "rome?"}], {"role": "assistant", "content": REPLY}
    spans.spans[-1]["Attributes"] = {
        "spangrad.request.json": json.dumps({"model": "policy", "messages": messages}),
        "spangrad.response.json": json.dumps({"choices": [{"index": 0, "message": reply, "finish_reason": "stop"}]}),
    }
    post(store, spans.otlp())
    builder = settings_of(store, RUN)
    build_once(builder)
    with AdminGateway() as gateway, queue_beside(directory) as queue:
        chosen = builder.model_copy(
            update={
                "trainer": trainer.settings.trainer,
                "gateway": GatewaySettings(url=gateway.url),
                "queue": queue,
                "page": PageSettings(examples=directory / "examples"),
            }
        )
        with running_page(chosen) as url:
            place = spans.trace(f"{RUN}.acts-1.0"), root, call
            yield ActingPage(url, store, trainer, gateway, QueueHttp(queue.url or "", None, RUN), builder, place, directory / "examples")
    trainer.ledger.close()


@pytest.mark.parametrize(
    ("headers", "sentence"),
    [
        ({"X-Spangrad-Action": ""}, "a program sends page.token as a bearer"),
        ({"X-Spangrad-Action": "guess"}, "lacks the token for actions"),
        ({"Origin": "http://evil.example"}, "comes from another site"),
        ({"Origin": "null"}, "comes from another site"),
        ({"Sec-Fetch-Site": "cross-site"}, "comes from another site"),
        ({"Sec-Fetch-Site": "same-site"}, "comes from another site"),
        ({"Content-Type": "text/plain"}, "with Content-Type: application/json"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, "with Content-Type: application/json"),
    ],
)
def test_action_from_elsewhere_changes_nothing(page: ActingPage, headers: dict[str, str], sentence: str) -> None:
    before = page.get("/api/actions")
    status, answer = page.act({**OF_VERSION, "action": "pin", "version": 1}, headers)
    assert (status, sentence in answer) == (403, True)
    assert page.get("/api/actions") == before
    assert page.trainer.ledger.pinned() == set()


@pytest.mark.parametrize(
    "action",
    [
        {"action": "erase"},
        {"action": "pin", "author": "Ada", "policy": "policy", "branch": "main"},
        {**OF_VERSION, "action": "pin", "version": 1, "more": 1},
        {**OF_VERSION, "action": "pin", "version": -1},
        {**OF_VERSION, "action": "pin", "version": 1, "author": " "},
        {"action": "label", "author": "Ada", "rollout": "acts-1", "trace": "t", "span": "s", "name": "n", "value": 1},
        {"action": "collect", "author": "Ada", "rollout": "acts-1", "set_name": "../evil"},
    ],
)
def test_action_of_other_form_is_refused(page: ActingPage, action: dict[str, object]) -> None:
    status, sentence = page.act(action)
    assert (status, sentence.startswith("the body is no action of the page: ")) == (400, True)


def test_version_actions_change_ledger_and_gateway_and_are_written_down(page: ActingPage) -> None:
    assert page.act({**OF_VERSION, "action": "publish", "version": 1}) == (200, "version 1 of policy is served (0.25 s).")
    assert [body["version"] for _, body in page.gateway.publications] == [1]
    status, sentence = page.act({**OF_VERSION, "action": "pin", "version": 1})
    assert (status, page.trainer.ledger.pinned()) == (200, {1}), sentence
    assert page.act({**OF_VERSION, "action": "unpin", "version": 1})[0] == 200
    assert page.trainer.ledger.pinned() == set()
    status, sentence = page.act({**OF_VERSION, "action": "roll_back", "version": 1})
    assert (status, sentence) == (
        200,
        "branch main of policy is at version 1: the next step trains it; version 1 of policy is served (0.25 s).",
    )
    assert newest_version(page.trainer.ledger).version == 1
    newest = page.get("/api/actions")["rows"][0]
    arguments = {"policy": "policy", "branch": "main", "version": 1}
    assert (newest["Action"], newest["Author"], newest["Address"], newest["Outcome"]) == ("roll_back", "Ada", "127.0.0.1", "done")
    assert (json.loads(newest["Arguments"]), newest["Sentence"]) == (arguments, sentence)


def test_action_that_fails_is_written_down_with_its_reason(page: ActingPage) -> None:
    status, sentence = page.act({**OF_VERSION, "action": "publish", "version": 77})
    assert (status, "the ledger knows no version policy@77 on branch main." in sentence) == (500, True)
    newest = page.get("/api/actions")["rows"][0]
    assert (newest["Action"], newest["Outcome"], newest["Sentence"]) == ("publish", "failed", sentence)


def test_restore_action_makes_a_skipped_group_trainable(page: ActingPage) -> None:
    page.trainer.ledger.skips.enter({group("x"): Skip(SkipReason.EQUAL), group("y"): Skip(SkipReason.STALE)}, 1)
    names = [row["group"] for row in page.get("/api/training/skipped?policy=policy&branch=main")["rows"]]
    assert sorted(names) == ["x", "y"]
    restore = {"action": "restore", "author": "Ada", "policy": "policy", "branch": "main"}
    assert page.act({**restore, "groups": ["x"]}) == (200, "x of run run is ready again; it was skipped as equal.")
    assert [row.group.group_id for row in page.trainer.ledger.skips.read()] == ["y"]
    status, sentence = page.act({**restore, "groups": ["x", "y"]})
    assert (status, sentence) == (500, "policy/main has not skipped x. `spangrad train skipped` lists groups.")
    assert [row.group.group_id for row in page.trainer.ledger.skips.read()] == ["y"], "none is restored where one is unknown"


def test_queue_actions_cancel_open_rollouts_and_retry_dead_rollouts(page: ActingPage) -> None:
    page.queue.enqueue([new_rollout("t", 1, "g", rollout_id=name, max_attempts=1) for name in ("dies", "waits")])
    (lease,) = page.queue.ask("POST", "/v1/leases", {"run_id": RUN, "worker": "w"})["leases"]
    failure = {"rollout_id": lease["rollout_id"], "attempt": lease["attempt"], "reason": "exception"}
    page.queue.ask("POST", "/v1/leases/fail", {"failures": [failure]})
    (dead,) = page.get("/api/queue?state=dead")["rows"]
    assert (dead["rollout_id"], page.get("/api/queue/rollout?id=dies")["state"]) == ("dies", "dead")
    assert page.act({"action": "retry", "author": "Ada", "rollout_ids": ["dies"]}) == (200, "queued again: 1.")
    done = page.act({"action": "cancel", "author": "Ada", "rollout_ids": ["dies", "waits"]})
    assert done == (200, "cancelled: 2 that were queued, 0 that were running.")
    view = page.get(f"/api/queue?run={RUN}&state=cancelled")
    assert [row["rollout_id"] for row in view["rows"]] == ["waits", "dies"]
    oldest = page.get(f"/api/queue?run={RUN}&state=cancelled&order=oldest")
    assert [row["rollout_id"] for row in oldest["rows"]] == ["dies", "waits"]
    assert view["runs"][0]["states"] == {"cancelled": 2}
    assert page.get("/api/queue/rollout?id=absent") == {"state": None}


def test_queue_action_on_all_shown_rollouts_with_long_ids_fits(page: ActingPage) -> None:
    ids = [f"{number}".rjust(512, "é") for number in range(200)]
    answer = page.act({"action": "cancel", "author": "Ada", "rollout_ids": ids})
    assert answer == (200, "cancelled: 0 that were queued, 0 that were running.")


def test_action_beyond_the_limit_of_a_body_is_refused_with_the_limit(page: ActingPage) -> None:
    status, sentence = page.act({"action": "cancel", "author": "Ada", "rollout_ids": ["x" * 2**21]})
    assert (status, sentence) == (413, "the body has more than 1,048,576 bytes: ask for less at once.")


def test_label_action_is_a_reward_of_the_next_build(page: ActingPage) -> None:
    trace, root, call = page.rollout
    label = {"action": "label", "author": "Ada", "rollout": "acts-1", "trace": trace, "name": "label"}
    assert page.act({**label, "span": root, "value": 0.5, "comment": "half right"})[0] == 200
    assert page.act({**label, "span": call, "value": -1, "name": "tone"})[0] == 200
    build_once(page.builder)
    given = rows(page.store, f"SELECT Name, Value, Source, CallId != '' FROM spangrad.rewards WHERE RunId = '{RUN}' ORDER BY Name")
    assert given == [
        ("label", 0.5, "evaluation_log", False),
        ("reward", 1.0, "runner", False),
        ("tone", -1.0, "evaluation_log", True),
    ]
    author = "SELECT LogAttributes['user.name'] FROM otel.otel_logs WHERE EventName = 'gen_ai.evaluation.result' AND SpanId = '{}'"
    assert rows(page.store, author.format(root)) == [("Ada",)]
    status, sentence = page.act({**label, "span": "0" * 16, "value": 1})
    assert (status, "holds no span" in sentence) == (404, True)


def test_collect_action_adds_conversations_of_a_rollout_once(page: ActingPage) -> None:
    collect = {"action": "collect", "author": "Ada", "rollout": "acts-1", "set_name": "good"}
    for _ in range(2):
        status, sentence = page.act(collect)
        assert (status, sentence.startswith("1 conversation of acts-1 in ")) == (200, True), sentence
    (line,) = (page.examples / "good.jsonl").read_bytes().splitlines()
    assert [message["content"] for message in json.loads(line)["messages"]] == ["rome?", REPLY]
    status, sentence = page.act({**collect, "rollout": "absent"})
    assert (status, "'absent' has no conversation" in sentence) == (500, True)
    assert len((page.examples / "good.jsonl").read_bytes().splitlines()) == 1
    written = (page.examples / "good.jsonl").read_text()
    for foreign in ("no JSON", '{"meta": {}}', "[" * 100_000):
        (page.examples / "good.jsonl").write_text(f"{written}{foreign}\n")
        status, sentence = page.act(collect)
        assert (status, "good.jsonl, line 2, is no conversation of a rollout" in sentence) == (500, True)
    assert sorted(file.name for file in page.examples.iterdir()) == [".good.lock", "good.jsonl"]


def test_action_that_cannot_be_written_down_is_not_begun(page: ActingPage, store: StoreSettings) -> None:
    silent = store.model_copy(update={"otlp_endpoint": "http://127.0.0.1:9"})
    chosen = Settings(store=silent, trainer=page.trainer.settings.trainer, gateway=GatewaySettings(url=page.gateway.url))
    published = len(page.gateway.publications)
    with running_page(chosen) as url:
        acting = ActingPage(url, silent, page.trainer, page.gateway, page.queue, page.builder, page.rollout, page.examples)
        status, sentence = acting.act({**OF_VERSION, "action": "publish", "version": 1})
    assert (status, "the span store's receiver at http://127.0.0.1:9 does not answer" in sentence) == (503, True)
    assert len(page.gateway.publications) == published


def test_page_without_actions_offers_none(page: ActingPage, store: StoreSettings) -> None:
    with running_page(Settings(store=store, page=PageSettings(actions=False))) as url:
        with urllib.request.urlopen(url, timeout=30) as answer:
            assert _token(answer.read().decode()) == ""
        action = {**OF_VERSION, "action": "pin", "version": 1}
        headers = {"Content-Type": "application/json", "X-Spangrad-Action": ""}
        assert _posted(url, action, headers) == (403, "this page offers no actions. Set page.actions to true.")


def test_page_login_document_holds_no_action_token(page: ActingPage) -> None:
    with urllib.request.urlopen(f"{page.url}/login", timeout=30) as answer:
        assert _token(answer.read().decode()) == ""
