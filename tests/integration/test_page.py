"""The page over a real store in a real Chromium: lists, rollouts and calls; hostile spans; keyboard, themes, phone, accessibility."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect
from pydantic import SecretStr

from page.cursors import encode_cursor
from spangrad.client.queue_http import QueueHttp
from spangrad.http.queue_messages import new_rollout
from spangrad.processes import Child, answers, free_ports, own_command, wait_until
from spangrad.settings import (
    BuilderSettings,
    EngineSettings,
    PageSettings,
    QueueSettings,
    Settings,
    StoreSettings,
    TrainerSettings,
    UpSettings,
)
from spangrad.store.clickhouse import connect
from spangrad.supervisor.run_directory import RunDirectory
from tests.support.pages import BIDI, LONG, MANY, MARKUP, TEXTS, PageRollouts, Visitor, browsers, queue_beside, running_page, violations
from trainer.data.source import Group
from trainer.ledger.recovery import open_ledger
from trainer.ledger.skips import Skip, SkipReason
from transition_builder.metrics import serve_metrics

HOSTILE = f"{MARKUP} & {BIDI}"
LINKS = "#list tbody a[href^='/rollout?']"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    yield from browsers()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def rollouts(store: StoreSettings, model: Path) -> PageRollouts:
    return PageRollouts(store, model)


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> TrainerSettings:
    """Trainer whose branch skipped two groups."""
    settings = TrainerSettings(directory=tmp_path_factory.mktemp("trainer"))
    with closing(open_ledger(Settings(trainer=settings))) as opened:
        opened.skips.enter({Group("page", "train", "s", "weather"): Skip(SkipReason.NOT_FINITE, "the reward is NaN")}, 4)
        opened.skips.enter({Group("page", "train", "s", MARKUP): Skip(SkipReason.EQUAL)}, 4)
    return settings


@pytest.fixture(scope="module")
def queue(model: Path) -> Iterator[QueueSettings]:
    with queue_beside(model) as settings:
        yield settings


@pytest.fixture(scope="module")
def url(rollouts: PageRollouts, model: Path, ledger: TrainerSettings, queue: QueueSettings) -> Iterator[str]:
    page = PageSettings(trace_url="https://traces.example/t/{trace}")
    builder = BuilderSettings(metrics_address=f"127.0.0.1:{free_ports(1)[0]}")
    serve_metrics(str(builder.metrics_address), lambda: {"train": (5.2, 3), "validate": (0.0, 0)}, [])
    up = UpSettings(directory=model / "up")
    services = Settings(store=rollouts.store, page=page, trainer=ledger, builder=builder, up=up, queue=queue)
    settings = services.model_copy(update={"engine": EngineSettings(model=model)})
    with RunDirectory(up.directory) as supervised, running_page(settings) as address:
        failed = {"name": "train", "state": "restarting", "restarts": 2, "cause": f"exit code 1: {MARKUP}"}
        supervised.publish({"services": [{"name": "store", "state": "ready"}, {"name": "build", "state": "ready"}, failed]})
        yield address


@pytest.fixture(scope="module")
def tab(browser: Browser, url: str) -> Iterator[Visitor]:
    """One tab for all views; fails where any of them had an error, asked another server, or opened a dialog."""
    visitor = Visitor(browser, url, viewport={"width": 1280, "height": 900})
    yield visitor
    visitor.close()


def call_address(rollouts: PageRollouts, rollout: str, span: str, **more: str) -> str:
    trace = rollouts.spans.trace(f"page.{rollout}.0")
    return f"/call?{urlencode({'rollout': rollout, 'trace': trace, 'span': span, 'choice': 0, **more})}"


def get(url: str, headers: dict[str, str] | None = None) -> tuple[int, dict[str, str], bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers or {}), timeout=30) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def links(page: Page) -> list[str]:
    return page.locator(LINKS).all_inner_texts()


def test_rollouts_page_lists_sorts_and_filters_by_address(tab: Visitor) -> None:
    page = tab.open("/rollouts?run=many&sort=return&order=asc")
    expect(page.locator("#count")).to_contain_text(f"{MANY} rollouts. 90 % succeeded")
    assert links(page)[:3] == ["many-0000", "many-0001", "many-0002"]
    page.get_by_role("button", name="Return ↑").click()
    expect(page.locator("#list tbody a").first).to_have_text("many-0399")
    page.get_by_label("Outcome").fill("timeout")
    page.get_by_label("Failed tool").select_option("yes")
    page.get_by_label("Return to").fill("0.3")
    page.get_by_role("button", name="Filter").click()
    expect(page.locator("#count")).to_contain_text("13 rollouts.")
    assert page.url.endswith("/rollouts?run=many&outcome=timeout&reward_to=0.3&failed_tool=yes&sort=return&order=desc")
    expect(page.locator(LINKS)).to_have_text([f"many-{number:04d}" for number in range(120, -1, -10)])
    page.go_back()
    expect(page.locator("#count")).to_contain_text(f"{MANY} rollouts.")


def test_rollouts_page_finds_rollouts_by_text_in_messages(tab: Visitor) -> None:
    page = tab.open("/rollouts")
    page.get_by_label("Text in messages").fill("IS THE WEATHER in rome")
    page.get_by_role("button", name="Filter").click()
    expect(page.locator("#searched")).to_contain_text(f"2 rollouts with the text in {MANY + 7} searched.")
    expect(page.locator(LINKS)).to_have_text(["seen-2", "seen-1"])
    arguments = urlencode({"contents": '{"city": "rome"}', "text": "seen-1"})
    page = tab.open(f"/rollouts?{arguments}")
    expect(page.locator(LINKS)).to_have_text(["seen-1"])


def test_rollouts_page_long_list_keeps_few_rows_in_the_document(tab: Visitor) -> None:
    page = tab.open("/rollouts?run=many&sort=return&order=asc")
    shown, end = set(links(page)), time.monotonic() + 60
    while len(shown) < MANY and time.monotonic() < end:  # at the last row that is here, the next ones may be on their way
        top = page.evaluate("() => { const list = document.getElementById('list'); list.scrollTop += 600; return list.scrollTop; }")
        page.locator(f"#list tr[aria-rowindex='{int(top // 34) + 2}']").wait_for(state="attached")
        assert page.locator("#list tbody tr").count() < 80
        shown |= set(links(page))
    assert shown == {f"many-{number:04d}" for number in range(MANY)}


def test_rollouts_page_arrow_keys_open_a_rollout(tab: Visitor) -> None:
    page = tab.open("/rollouts?run=page&text=SEEN")
    page.locator("#list").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("j")
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.wait_for_url("**/rollout?id=seen-*")
    expect(page.locator("h1")).to_contain_text("Rollout seen-")


def test_rollouts_histogram_bar_filters_the_list(tab: Visitor) -> None:
    page = tab.open("/rollouts?run=many")
    page.locator("#histogram a").first.click()
    expect(page.locator("#count")).to_contain_text("17 rollouts.")


def test_rollout_page_shows_spans_with_conclusions(tab: Visitor) -> None:
    page = tab.open("/rollout?id=seen-1")
    assert page.locator("#facts").inner_text().split("\n")[-4:] == ["Trained", "policy@5", "Trace", "in another tool"]
    expect(page.locator("#why")).to_contain_text("It is trained: batch b5 made version 5 of policy policy (branch main).")
    rows = [" ".join(text.split()) for text in page.locator("#spans tbody tr").all_inner_texts()]
    assert [row.split(" ")[0] for row in rows] == ["rollout", "ChatCompletion", "chat", "weather", "ChatCompletion", "chat"]
    assert "3 → 2 tokens, v3 v4" in rows[2]
    assert "transition, turn 0" in rows[2]
    page.get_by_role("button", name="weather").click()
    expect(page.get_by_role("dialog")).to_contain_text('input.value {"city": "rome"}', use_inner_text=True)
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_rollout_page_label_is_asked_first_and_written_down(tab: Visitor) -> None:
    page = tab.open("/rollout?id=seen-2")
    page.get_by_role("button", name="Label this rollout").focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("It is stored with your name")
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    page.keyboard.press("Enter")  # the button has the focus again
    expect(page.get_by_label("Value")).to_be_focused()
    page.keyboard.type("0.5")
    page.get_by_label("Your name").fill(MARKUP)
    page.keyboard.press("Enter")
    expect(dialog.get_by_role("status")).to_contain_text("label = 0.5 is in the store")
    with page.expect_event("load"):  # the page loads again, with the label
        page.keyboard.press("Enter")  # closes: the button to leave has the focus
    expect(dialog).to_have_count(0)
    page = tab.open("/actions")
    cells = page.locator("#list tbody tr:not(.space)").first.locator("td").all_inner_texts()
    assert cells[1:4] == [MARKUP, "127.0.0.1", "label"]
    assert cells[4].startswith("rollout seen-2, trace ")


def test_rollout_page_conversation_leaves_out_repeated_messages(tab: Visitor) -> None:
    page = tab.open("/rollout?id=seen-1")
    page.get_by_role("tab", name="Spans").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".turn")).to_have_count(2)
    first, second = page.locator(".turn").all()
    assert page.url.endswith("#conversation")
    assert [text.split("\n")[0] for text in first.locator(".message").all_inner_texts()] == ["system", "user", "assistant"]
    expect(first).to_contain_text(TEXTS[0])
    assert [text.split("\n")[0] for text in second.locator(".message").all_inner_texts()] == ["tool", "assistant"]
    expect(second).to_contain_text("after 3 messages of an earlier call")
    second.get_by_role("link", name="Call 2").click()
    page.wait_for_url("**/call?*")


def test_call_page_shows_tokens_with_logprobs_versions_and_mask(tab: Visitor, rollouts: PageRollouts) -> None:
    page = tab.open(call_address(rollouts, "seen-1", rollouts.calls[1]))
    tokens = page.locator("#response .token")
    assert [token.get_attribute("class") for token in tokens.all()] == ["token surprise-0", "token surprise-1", "token surprise-3"]
    expect(page.locator("#prompt")).to_contain_text("Show 5 tokens repeated from the call before")
    page.locator("#response .strip").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#token")).to_contain_text(
        'token 2 of the response · id 12 · text " rome" · logprob -1.1 · probability 0.333 · version 4'
    )
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#token")).to_contain_text(f'likeliest: " paris" 0.607, "{MARKUP}" 0.368')
    page.get_by_label("Colour by").select_option("version")
    assert [token.get_attribute("class") for token in tokens.all()] == ["token version-0", "token version-1", "token version-1"]
    page.get_by_label("Colour by").select_option("advantage")
    assert {token.get_attribute("class") for token in tokens.all()} == {"token better"}
    page.get_by_label("Show as").select_option("ids")
    page.get_by_role("button", name="Show 5 tokens").click()
    expect(page.locator("#prompt .token")).to_have_text(["5", "6", "7", "8", "9", "10"])
    assert page.url.endswith("&overlay=advantage&form=ids")


def test_call_page_shows_importance_ratio_and_entropy_of_chosen_step(tab: Visitor, rollouts: PageRollouts) -> None:
    page = tab.open(call_address(rollouts, "seen-1", rollouts.calls[1], overlay="ratio", step='["policy","main",5]'))
    tokens = page.locator("#response .token")
    assert [token.get_attribute("class") for token in tokens.all()] == ["token ratio-0", "token ratio-1", "token ratio--3"]
    assert set(page.locator("#prompt .token").evaluate_all("all => all.map(token => token.className)")) == {"token "}
    expect(page.locator("#legend")).to_contain_text("1.28 and more")
    tokens.nth(2).hover()
    expect(page.locator("#token")).to_contain_text("importance ratio 0.6065 · entropy 2.5 nats · advantage 0.75")
    page.get_by_label("Colour by").select_option("entropy")
    assert [token.get_attribute("class") for token in tokens.all()] == ["token surprise-0", "token surprise-2", "token surprise-6"]
    page.get_by_label("Trained by").select_option("policy@5 of fork")
    expect(page.locator("#legend")).to_contain_text("The step recorded none.")
    expect(page.locator("#token")).to_contain_text("importance ratio 1 · advantage -0.5")
    page = tab.open(call_address(rollouts, "seen-2", rollouts.untrained_calls[0], overlay="ratio"))
    expect(page.locator("#legend")).to_contain_text("No step has trained this call.")
    expect(page.get_by_label("Trained by")).to_be_hidden()


def test_call_page_shows_request_and_response_as_json(tab: Visitor, rollouts: PageRollouts) -> None:
    page = tab.open(call_address(rollouts, "seen-1", rollouts.calls[0], form="json"))
    assert json.loads(page.locator("#prompt pre").inner_text())["messages"][1]["content"] == TEXTS[0]
    with page.expect_download() as download:
        page.get_by_role("link", name="Download the response").click()
    assert json.loads(Path(download.value.path()).read_text())["choices"][0]["finish_reason"] == "stop"


def test_overview_page_shows_services_and_is_live(tab: Visitor, rollouts: PageRollouts) -> None:
    page = tab.open("/")
    services = [
        "● answers store",
        "○ no answer gateway",
        "● answers queue",
        "● answers builder train: 3 wait, the oldest for 5.2 s",
        f"○ no answer trainer restarting, restarted 2 times, exit code 1: {MARKUP}",
    ]
    # On a busy machine a service may answer a first look too late; the next one shows it.
    expect(page.locator("#services li")).to_have_text(services, use_inner_text=True)
    facts = page.locator("#rollouts dd")
    expect(facts.nth(0)).to_have_text("3")
    expect(facts.nth(5)).to_contain_text("policy@5")
    expect(page.get_by_role("img", name="Return over versions 1 to 5; last: return 0.5")).to_be_visible()
    with connect(rollouts.store) as client:
        client.insert("spangrad_internal.builds", [["late", "late", "s"]], column_names=["RunId", "RolloutId", "BuildSpec"])
    expect(facts.nth(0)).to_have_text("4")


def test_training_page_draws_chosen_metrics_and_leads_to_versions(tab: Visitor) -> None:
    page = tab.open("/training")
    assert page.locator("figcaption").all_inner_texts() == [
        *("Return", "Success", "Held-out return, by the version that sampled", "Gradient norm", "Seconds by part")
    ]
    page.get_by_label("Metrics with this text").fill("GRAD")
    page.keyboard.press("Enter")
    expect(page.locator("figcaption")).to_have_text(["grad_norm"])
    assert page.url.endswith("/training?metrics=GRAD")
    page.locator("#steps").get_by_role("button", name="mean_return").click()
    page.get_by_role("button", name="mean_return ↓").click()
    expect(page.locator("#steps tbody a").first).to_have_text("1")
    assert page.url.endswith("/training?metrics=GRAD&sort=mean_return&order=asc")
    page.locator("#steps").get_by_role("link", name="5").click()
    expect(page.locator("h1")).to_have_text("policy@5")


def test_training_page_long_table_of_steps_continues_after_its_last_row(store: StoreSettings, url: str) -> None:
    versions = "number AS Version, if(number = 0, NULL, number - 1) AS Parent, if(number = 0, '', concat('b', toString(number))) AS BatchId"
    metrics = "map('mean_return', toFloat64(number % 7), 'unasked', 1) AS Metrics, toDateTime64('2020-01-01', 6)"
    with connect(store) as client:
        client.command(
            "INSERT INTO spangrad_internal.policy_versions (Policy, Branch, Status, Version, Parent, BatchId, Metrics, IngestedAt)"
            f" SELECT 'long', 'main', 'committed', {versions}, {metrics} FROM numbers(451)"
        )
    order, rows = {"sort": "mean_return", "order": "asc"}, list[dict[str, Any]]()
    after: str | None = ""
    while after is not None:
        query = urlencode({"policy": "long", "branch": "main", "metrics": "mean_return,other", "after": after, **order})
        answer = json.loads(get(f"{url}/api/training/steps?{query}")[2])
        rows, after = rows + answer["rows"], answer["after"]
    assert [row["Version"] for row in rows] == sorted(range(1, 451), key=lambda version: (version % 7, version))
    assert rows[0]["Metrics"] == {"mean_return": 0.0}
    query = urlencode({"policy": "long", "branch": "main", "metrics": "mean_return,=other", **order})
    lines = get(f"{url}/steps.csv?{query}")[2].decode().splitlines()
    assert (lines[0], lines[1], len(lines)) == ("Version,Committed,mean_return,'=other", "7,2020-01-01T00:00:00.000+00:00,0.0,", 451)


def test_training_page_lists_skipped_groups_with_reasons(tab: Visitor, url: str) -> None:
    page = tab.open("/training")
    expect(page.locator("#skipped-reasons")).to_contain_text("not_finite 1")
    expect(page.locator("#skipped tbody tr:not(.space)")).to_have_count(2)
    row = page.locator("#skipped tbody tr:not(.space)").filter(has_text="weather")
    expect(row).to_contain_text("the reward is NaN Fix what gives rewards")
    row.get_by_role("link", name="weather").click()
    page.wait_for_url("**/beside?run=page&group=weather")
    first = json.loads(get(f"{url}/api/training/skipped?policy=policy&branch=main")[2])
    after = encode_cursor([first["rows"][0][name] for name in ("newest_version", "skipped_us", "run", "mode", "spec", "group")])
    rest = json.loads(get(f"{url}/api/training/skipped?{urlencode({'policy': 'policy', 'branch': 'main', 'after': after})}")[2])
    assert (len(first["rows"]), rest["rows"], rest["after"]) == (2, first["rows"][1:], None)
    assert get(f"{url}/api/training/skipped?policy=policy&branch=main&after=guess")[0] == 400
    # The ledger has no version yet: the step from version 0 skipped them.
    page = tab.open("/version?policy=policy&branch=main&version=1")
    expect(page.locator("#skipped tbody tr:not(.space)")).to_have_count(2)
    page = tab.open("/version?policy=policy&branch=main&version=5")
    expect(page.locator("#skipped-reasons")).to_have_text("No group was skipped.")


def test_version_page_shows_its_lineage_both_ways(tab: Visitor) -> None:
    page = tab.open("/version?policy=policy&branch=main&version=4")
    steps = [" ".join(text.split()) for text in page.locator(".lineage li").all_inner_texts()]
    assert steps[3:] == ["Children policy@5", "Trained on its rollouts policy@5 on fork 1 call policy@5 2 calls"]
    page.get_by_role("link", name="policy@5").first.click()
    expect(page.locator("h1")).to_have_text("policy@5")
    expect(page.get_by_role("link", name="Play with it")).to_have_attribute("href", "/play?policy=policy&version=5")
    steps = [" ".join(text.split()) for text in page.locator(".lineage li").all_inner_texts()]
    assert steps[:2] == ["Sampled by policy@4 2 calls policy@3 2 calls", "Batch 1 group, 1 rollout"]
    rewards = [row.split("\t") for row in page.locator("#rewards tbody tr").all_inner_texts()]
    assert rewards == [["reward", "every role", "1", "1", "1", "1"], ["step", "every role", "1", "0.25", "0.25", "0.25"]]
    page.get_by_text("rome: mean return 1.25, 1 rollout").click()
    assert page.locator("#groups tbody tr").inner_text().split() == ["seen-1", "1.25", "0.75", "2", "0", "1"]
    page.get_by_role("link", name="seen-1").click()
    expect(page.locator("h1")).to_have_text("Rollout seen-1")


def test_beside_page_shows_a_group_with_returns_against_the_mean(tab: Visitor) -> None:
    page = tab.open("/rollout?id=seen-2")
    page.get_by_role("link", name="weather", exact=True).click()
    expect(page.locator(".column .turn")).to_have_count(4)
    assert page.locator(".column h2").all_inner_texts() == ["seen-1", "seen-2"]
    facts = page.locator(".column > dl dd").all_inner_texts()
    assert [text.strip() for text in facts] == ["1.25", "0.5", "-0.5 in policy@5 0.75 in policy@5", "0.25", "-0.5", "not trained"]


def test_compare_page_pairs_versions_on_held_out_tasks(tab: Visitor) -> None:
    tasks = [task for task in range(MANY // 4) if {1, 2} <= {number % 7 for number in range(4 * task, 4 * task + 4)}]
    page = tab.open("/compare")
    page.get_by_label("Version", exact=True).fill("1")
    page.get_by_label("And version").fill("2")
    page.get_by_role("button", name="Compare").click()
    better = f"{len(tasks)} held-out tasks played by both: version 2 did better in {len(tasks)}, worse in 0."
    expect(page.locator("#summary")).to_contain_text(better)
    assert page.url.endswith("/compare?policy=policy&left=1&right=2")
    assert page.locator("#tasks tbody tr").count() == len(tasks)
    assert page.locator("#tasks tbody td").nth(1).inner_text() == "+0.0025"


def test_page_shows_the_returns_of_several_roles_and_never_their_sum(tab: Visitor) -> None:
    page = tab.open("/rollouts?run=page&group=duel&sort=return")
    cells = page.locator("#list tbody tr:not(.space)").first.locator("td").all_inner_texts()
    assert (cells[0], cells[5]) == ("duel-4", "black -1, white 1")
    expect(page.locator("#count")).to_contain_text("mean return black -0.5, white 0.5.")
    page = tab.open("/compare?policy=policy&left=3&right=4")
    rows = [row.split("\t")[:2] for row in page.locator("#tasks tbody tr").all_inner_texts()[:2]]
    assert rows == [["opening, black", "-1"], ["opening, white", "+1"]]


def test_page_hostile_spans_are_shown_as_text(tab: Visitor, rollouts: PageRollouts) -> None:
    page = tab.open(f"/rollout?{urlencode({'id': HOSTILE})}")
    expect(page.locator("h1")).to_have_text(f"Rollout {MARKUP} & abc⟨U+202E⟩cod.exe⟨U+2066⟩")
    page.get_by_role("button", name="<script>").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(f"… {LONG - 20_000:,} more characters")
    expect(dialog).to_contain_text("javascript:window.hacked=true")
    expect(dialog).to_contain_text("abc⟨U+202E⟩cod.exe")
    page.get_by_role("button", name="Close").click()
    page.get_by_role("tab", name="Conversation").click()
    expect(page.locator(".turn")).to_contain_text("more characters")
    expect(page.locator(".turn")).to_contain_text(MARKUP)
    page.get_by_role("link", name="Call 1").click()
    page.get_by_label("Show as").select_option("json")
    expect(page.locator("#prompt pre")).to_contain_text(MARKUP)
    page = tab.open(f"/rollouts?{urlencode({'group': MARKUP, 'text': 'window.hacked'})}")
    expect(page.locator(LINKS)).to_have_text([f"{MARKUP} & abc⟨U+202E⟩cod.exe⟨U+2066⟩"])
    assert page.locator("main script, main img, main iframe").count() == 0
    assert page.evaluate("window.hacked") is None


def test_page_every_view_shows_hostile_names_as_text(tab: Visitor, rollouts: PageRollouts, queue: QueueSettings) -> None:
    client = QueueHttp(queue.url or "", None, MARKUP)
    client.enqueue([new_rollout(MARKUP, 1, MARKUP, rollout_id=f"{MARKUP}-{number}", max_attempts=1) for number in range(2)])
    (lease,) = client.ask("POST", "/v1/leases", {"run_id": MARKUP, "worker": MARKUP})["leases"]
    failure = {"rollout_id": lease["rollout_id"], "attempt": lease["attempt"], "reason": "exception", "detail": MARKUP}
    client.ask("POST", "/v1/leases/fail", {"failures": [failure]})
    client.ask("POST", "/v1/leases", {"run_id": MARKUP, "worker": MARKUP})
    hostile = {"policy": MARKUP, "branch": MARKUP}
    paths = {
        "/": "#services",
        f"/rollouts?{urlencode({'task': MARKUP})}": "#list",
        f"/rollout?{urlencode({'id': HOSTILE})}": "#facts",
        f"/beside?{urlencode({'run': 'page', 'group': MARKUP})}": "#columns",
        f"/training?{urlencode({**hostile, 'metrics': 'script'})}": "#charts",
        "/training": "#skipped",
        f"/version?{urlencode({**hostile, 'version': 1})}": "#metrics",
        "/compare?policy=policy&left=8&right=9": "#tasks",
        "/queue": "#rollouts",
        f"/actions?{urlencode(hostile)}": "main",
        f"/play?{urlencode({**hostile, 'version': MARKUP})}": "main",
    }
    for path, region in paths.items():
        page = tab.open(path)
        if region != "main":
            expect(page.locator(region)).to_contain_text(MARKUP)
        assert page.locator("main script, main img, main iframe, main object").count() == 0, path
        assert page.evaluate("window.hacked") is None, path


def test_page_broken_utf8_is_shown_as_text(tab: Visitor, rollouts: PageRollouts) -> None:
    with_broken = (
        "INSERT INTO otel.otel_traces (Timestamp, TraceId, SpanId, SpanName, SpanAttributes, StatusMessage) SELECT now64(9), 'broken',"
    )
    name = "concat('a', unhex('FF'), 'b', unhex('C3'))"
    sql = f"{with_broken} 's', {name}, map('spangrad.rollout.id', 'broken', 'spangrad.run.id', 'page', 'key', {name}), {name}"
    with connect(rollouts.store) as client:
        client.command(sql)
    page = tab.open("/rollout?id=broken")
    page.locator("#spans button").first.click()
    expect(page.get_by_role("dialog")).to_contain_text("key")


def test_page_views_have_no_serious_accessibility_findings(browser: Browser, url: str, rollouts: PageRollouts) -> None:
    paths = [
        "/rollouts?run=page",
        "/rollout?id=seen-2",
        "/rollout?id=seen-1#conversation",
        call_address(rollouts, "seen-1", rollouts.calls[1]),
    ]
    paths += ["/", "/training", "/version?policy=policy&branch=main&version=5", "/beside?run=page&group=weather"]
    paths += ["/compare?policy=policy&left=1&right=2", "/queue", "/actions"]
    for scheme, width, rules, chosen in (("light", 1280, None, paths), ("dark", 390, ["color-contrast"], paths[:5])):
        # Trusted types would keep axe-core, which is not ours, from working; the other tests have them.
        visitor = Visitor(browser, url, color_scheme=scheme, viewport={"width": width, "height": 800}, bypass_csp=True)
        for path in chosen:
            page = visitor.open(path)
            assert violations(page, rules) == [], f"{path}, {scheme}, {width} px"
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path} is wider than {width} px"
        visitor.close()


def test_rollouts_export_holds_the_filtered_list(url: str) -> None:
    _, headers, lines = get(f"{url}/rollouts.jsonl?run=many&outcome=timeout")
    assert len([json.loads(line) for line in lines.splitlines()]) == MANY // 10
    assert headers["Content-Disposition"] == 'attachment; filename="rollouts.jsonl"'
    _, _, lines = get(f"{url}/rollouts.jsonl?{urlencode({'contents': TEXTS[0]})}")
    assert sorted(json.loads(line)["RolloutId"] for line in lines.splitlines()) == ["seen-1", "seen-2"]
    _, _, table = get(f"{url}/rollouts.csv?{urlencode({'group': MARKUP})}")
    assert f"'=cmd|{MARKUP}".encode() in table, "a text that begins like a formula is marked as a text"


@pytest.mark.parametrize(
    ("path", "status", "sentence"),
    [
        ("/api/rollouts?sort=color", 400, "sort = 'color', order = 'desc': sort is one of built,"),
        ("/api/rollouts?reward_from=much", 400, "reward_from = 'much' is no number."),
        ("/api/rollouts?after=e30", 400, "after is no cursor of this list."),
        ("/api/rollout?id=absent", 404, "holds no span of rollout 'absent'."),
        ("/api/call?rollout=seen-1&trace=t&span=s", 404, "the store holds nothing that this address names"),
        ("/api/span?trace=t&span=s", 404, "the store holds nothing that this address names"),
        ("/call.txt?rollout=seen-1&trace=t&span=s", 404, "the store holds nothing that this address names"),
        ("/api/calls", 404, "GET /api/calls is not answered here. The page begins at /."),
        ("/api/call?rollout=seen-1&trace=t", 400, "the address lacks span."),
        ("/api/version?policy=policy&branch=side&version=3", 404, "the store knows no version policy@3 on branch side."),
        ("/api/rollout/turns?call=a.b.0.x", 400, "call = 'a.b.0.x' is not TRACE.SPAN.CHOICE.NANOSECONDS."),
        (f"/api/rollout/turns?call=a.b.0.{'9' * 400}", 400, "is not TRACE.SPAN.CHOICE.NANOSECONDS."),
        (f"/api/rollout/turns?call=a.b.{'9' * 400}.0", 400, "is not TRACE.SPAN.CHOICE.NANOSECONDS."),
        ("/static/../server.py", 404, "is not answered here."),
        ("/static/%2e%2e/server.py", 404, "is not answered here."),
    ],
)
def test_page_wrong_address_is_refused_with_a_sentence(url: str, path: str, status: int, sentence: str) -> None:
    code, _, content = get(f"{url}{path}")
    assert (code, sentence in json.loads(content)["error"]) == (status, True), content


def test_training_answer_counts_a_rollout_by_its_newest_build(url: str) -> None:
    _, _, content = get(f"{url}/api/training")
    rollouts = {row["Version"]: row["Rollouts"] for row in json.loads(content)["heldOut"] if row["Version"] < 8}
    assert rollouts == {version: sum(number % 7 == version for number in range(MANY)) + (version in {3, 4}) for version in range(7)}


def test_page_answers_carry_a_strict_content_security_policy(url: str) -> None:
    for path in ("/", "/static/dom.js", "/api/rollouts/choices", "/rollouts.csv?run=none", "/absent", "/api/rollout?id=absent"):
        _, headers, _ = get(f"{url}{path}")
        assert "default-src 'none'; script-src 'self'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_page_foreign_host_name_is_refused(url: str) -> None:
    code, _, content = get(f"{url}/api/rollouts", {"Host": "rebound.example"})
    assert (code, b"'rebound.example'" in content) == (421, True)


def test_page_malformed_host_name_is_refused(url: str) -> None:
    assert get(f"{url}/api/rollouts", {"Host": "[::1"})[0] == 400


def test_page_store_refuses_statements_that_write(rollouts: PageRollouts) -> None:
    from page.reading import PageStore
    from spangrad.errors import StoreError

    store = PageStore(rollouts.store)
    with pytest.raises(StoreError, match="readonly"):
        store.read(lambda client: client.command("TRUNCATE TABLE spangrad_internal.builds"))
    store.close()


def test_page_with_token_asks_browsers_to_log_in(browser: Browser, rollouts: PageRollouts) -> None:
    settings = Settings(store=rollouts.store, page=PageSettings(token=SecretStr("sesame")))
    with running_page(settings) as address:
        assert get(f"{address}/api/rollouts")[0] == 401
        assert get(f"{address}/api/rollouts", {"Authorization": "Bearer sesame"})[0] == 200
        visitor = Visitor(browser, address)
        page = visitor.open("/rollouts?run=many")
        page.get_by_label("Token").fill("wrong")
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("alert").filter(has_text="That is not the token.")).to_be_visible()
        visitor.faults.clear()  # the browser reports the status of the refusal
        page.get_by_label("Token").fill("sesame")
        page.get_by_role("button", name="Log in").click()
        page.wait_for_url("**/rollouts?run=many")
        expect(page.locator("#count")).to_contain_text(f"{MANY} rollouts.")
        visitor.close()
        away = http.client.HTTPConnection(urlsplit(address).netloc)
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        away.request("POST", f"/login?next={quote('//evil.example')}", b"token=sesame", form)
        assert away.getresponse().headers["Location"] == "/"
        away.close()


def test_page_without_store_shows_the_remedy(browser: Browser, store: StoreSettings) -> None:
    with running_page(Settings(store=store.model_copy(update={"url": "http://127.0.0.1:9"}))) as address:
        visitor = Visitor(browser, address)
        page = visitor.open("/rollouts")
        expect(page.get_by_role("alert")).to_contain_text("Start it with `spangrad store`")
        visitor.faults.clear()
        visitor.close()


def test_page_command_opens_the_data_of_a_stopped_store(tmp_path: Path) -> None:
    port, absent = free_ports(2)
    (tmp_path / "data").mkdir()
    overrides = [f"--set=store.url=http://127.0.0.1:{absent}", f"--set=store.path={tmp_path / 'data'}"]
    child = Child("spangrad page", own_command("page", "--port", str(port), *overrides), tmp_path / "log", inherit_settings=False)
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/healthz"), 60, "the page", [child])
        assert json.loads(get(f"http://127.0.0.1:{port}/api/rollouts")[2]) == {"rows": [], "after": None}
    finally:
        child.stop()
