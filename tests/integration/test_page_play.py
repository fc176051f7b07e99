"""Play by the page in a real Chromium: a person against a scripted policy, the policy alone, people who leave."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from spangrad.settings import PageSettings, Settings, StoreSettings
from spangrad.types import canary_bucket
from tests.support.built_rollouts import rows
from tests.support.pages import MARKUP, Visitor, browsers, running_page, violations
from tests.support.scripted_servers import WordPolicy

CANARY = {"backend": "b", "version": 13, "share": 0.1}
POLICIES = {"policies": [{"policy": "policy", "version": 12, "canary": CANARY}, {"policy": "past", "version": 3}]}

AGENTS = Path(__file__).resolve().parent.parent / "agents"
PATIENCE = 60_000
"""Time limit of an episode's process to begin, in milliseconds."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    yield from browsers()


class Gateway(WordPolicy):
    """A gateway of two policies, which say the same."""

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        if path == "/admin/policies":
            return 200, {"content-type": "application/json"}, json.dumps(POLICIES).encode()
        return super().answer(method, path, headers, body)


@pytest.fixture(scope="module")
def policy() -> Iterator[WordPolicy]:
    with Gateway(lambda messages: "1") as server:
        yield server


@pytest.fixture(scope="module")
def url(store: StoreSettings, policy: WordPolicy) -> Iterator[str]:
    nim: dict[str, Any] = {"environment": "nim:Nim", "directory": str(AGENTS)}
    settings = Settings.model_validate({"gateway": {"url": policy.url}, "runner": {"handlers": {"nim": nim}}})
    with running_page(settings.model_copy(update={"store": store})) as address:
        yield address


def begin(page: Page, task: object, role: str, *, watch: bool = False, policy: str = "as runner.episode names it") -> None:
    """Choose an episode, and confirm it."""
    page.locator("select[name='policy']").select_option(label=policy)
    page.get_by_label("Environment").select_option("nim")
    page.get_by_label("Task, as JSON").fill(json.dumps(task))
    page.get_by_label("My role").fill(role)
    if watch:
        page.get_by_label("Who plays").select_option(label="the policy: I watch")
    page.get_by_role("button", name="Begin").click()
    page.get_by_label("Your name").fill("Ada")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog").get_by_role("status")).to_contain_text("has begun.", timeout=PATIENCE)
    page.keyboard.press("Enter")  # the button that closes has the focus
    page.wait_for_url("**/play?id=play-*")


def reply(page: Page, number: int, text: str) -> None:
    expect(page.locator("#state")).to_have_text(f"It is your turn, number {number}.", timeout=PATIENCE)
    expect(page.get_by_label("Your reply")).to_be_focused()
    page.keyboard.type(text)
    page.keyboard.press("Enter")


def test_person_plays_an_environment_to_the_end(browser: Browser, url: str, store: StoreSettings, policy: WordPolicy) -> None:
    # Trusted types would keep axe-core, which is not ours, from working; the next test has them.
    visitor = Visitor(browser, url, viewport={"width": 390, "height": 800}, bypass_csp=True)
    page = visitor.open("/play")
    assert violations(page) == []
    begin(page, {"sticks": 5}, "first")
    reply(page, 1, "3")
    reply(page, 2, "1")
    expect(page.locator("#state")).to_contain_text(
        "It has ended: 3 turns, return of first +1, return of second -1, ended by: done.", timeout=PATIENCE
    )
    texts = page.locator("#log .text").all_inner_texts()
    assert texts == ["You are first.", "5 sticks", "3", "first left 2\nsecond left 1", "1", "over"]
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    rollout = page.url.rpartition("id=")[2]
    page.get_by_role("link", name="The rollout, as the store has it").click()
    expect(page.locator("#title")).to_contain_text(rollout)
    visitor.close()
    assert [message["content"] for message in policy.chats[-1]["messages"]] == ["You are second.", "5 sticks\nfirst left 2"]
    spans = "SELECT DISTINCT RunId, Mode FROM spangrad.rollout_spans WHERE RolloutId = '{}' AND RowKind = 'span'"
    assert rows(store, spans.format(rollout)) == [("play", "production")]
    written = "SELECT LogAttributes['spangrad.action.outcome'], LogAttributes['user.name'] FROM otel.otel_logs"
    where = f"EventName = 'spangrad.action' AND LogAttributes['spangrad.rollout.id'] = '{rollout}'"
    assert rows(store, f"{written} WHERE {where} ORDER BY Timestamp") == [("asked", "Ada"), ("done", "Ada")]


def test_person_watches_the_chosen_policy_and_reads_markup_as_text(browser: Browser, url: str, policy: WordPolicy) -> None:
    visitor = Visitor(browser, url)
    page = visitor.open("/play?policy=past")
    expect(page.locator("select[name='policy'] option:checked")).to_have_text("past, version 3")
    begin(page, {"sticks": 2, "more": MARKUP}, "", watch=True, policy="past, version 3")
    expect(page.locator("#state")).to_contain_text("return of first -1, return of second +1", timeout=PATIENCE)
    assert f"2 sticks{MARKUP}" in page.locator("#log .text").all_inner_texts()
    assert page.locator("#log h3").all_inner_texts().count("second: assistant") == 1
    assert not page.locator("#reply").is_visible()
    expect(page.locator("#facts")).to_contain_text("past")
    visitor.close()
    assert {chat["model"] for chat in policy.chats[-2:]} == {"past"}


def test_person_chooses_the_version_of_a_canary_by_a_rollout_that_it_answers(browser: Browser, url: str) -> None:
    visitor = Visitor(browser, url)
    page = visitor.open("/play?policy=policy&version=7")
    expect(page.locator("#state")).to_have_text("Version 7 of policy is not served: publish it first, or play with version 12.")
    for version, is_canary in ((13, True), (12, False)):
        page = visitor.open(f"/play?policy=policy&version={version}")
        expect(page.locator("select[name='policy'] option:checked")).to_have_text(f"policy, version {version}")
        begin(page, {"sticks": 2}, "first", policy=f"policy, version {version}")
        assert (canary_bucket(page.url.rpartition("id=")[2]) < 0.1) == is_canary
        page.get_by_role("button", name="Leave it").click()
        expect(page.locator("#state")).to_have_text("It was ended: It was left.", timeout=PATIENCE)
    visitor.close()


def test_person_leaves_or_has_no_role_and_the_episode_ends(browser: Browser, url: str) -> None:
    visitor = Visitor(browser, url)
    page = visitor.open("/play")
    begin(page, {"sticks": 2}, "first")
    expect(page.locator("#state")).to_contain_text("It is your turn", timeout=PATIENCE)
    page.get_by_role("button", name="Leave it").click()
    expect(page.locator("#state")).to_have_text("It was ended: It was left.", timeout=PATIENCE)
    page.get_by_role("link", name="Play again").click()
    begin(page, {"sticks": 2}, "third")
    expect(page.locator("#state")).to_have_text("It failed: the environment has the roles first, second. Choose one.", timeout=PATIENCE)
    visitor.close()


@pytest.mark.parametrize("settings", [PageSettings(), PageSettings(actions=False)])
def test_reply_without_the_token_for_actions_is_refused(store: StoreSettings, settings: PageSettings) -> None:
    with running_page(Settings(store=store, page=settings)) as url:
        body = json.dumps({"rollout": f"play-{0:032x}", "turn": 1, "text": "3"}).encode()
        request = urllib.request.Request(f"{url}/api/play", body, {"Content-Type": "application/json"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(request, timeout=30)
