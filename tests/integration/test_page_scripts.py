"""Scripts of the page in a real Chromium, where answers are late or wrong: each test decides what some requests are answered."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import playwright
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from spangrad.settings import Settings, StoreSettings
from spangrad.store.clickhouse import connect
from tests.support.pages import CHROMIUM_OPTIONS, Visitor, browsers, running_page

POLICY = "scripts"
PLOTS = "async () => (await import('/static/vendor/uPlot-1.6.32.esm.js')).default.sync('steps').plots.length"
"""Function that returns the number of plots that uPlot holds."""
CALL = {
    "rollout": "r", "promptTokens": 6, "repeated": 4, "prompt": {"ids": [15, 16], "pieces": None},
    "response": {"ids": [17], "pieces": None, "logprobs": [-1.0]}, "versions": [[0, 3]], "conclusion": {"kind": "unbuilt"}, "rewards": [],
    "trained": [], "textProblem": "", "Policy": POLICY, "Temperature": 1.0,
}  # fmt: skip
"""A call whose prompt is folded, as /api/call answers."""
CALL_PATH = "/call?rollout=r&trace=t&span=s&choice=0&form=ids"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    yield from browsers()


@pytest.fixture(scope="module")
def url(store: StoreSettings) -> Iterator[str]:
    with connect(store) as client:
        names = ["RunId", "RolloutId", "BuildSpec", "Failure", "IngestedAt"]
        old = datetime(2020, 1, 1, tzinfo=UTC)
        client.insert("spangrad_internal.builds", [["r", name, "s", name[:1], old] for name in ("a1", "a2", "b1")], column_names=names)
    with running_page(Settings(store=store)) as address:
        yield address


@pytest.fixture
def visitor(browser: Browser, url: str) -> Iterator[Visitor]:
    visitor = Visitor(browser, url, viewport={"width": 1000, "height": 700})
    yield visitor
    visitor.close()


def commit(store: StoreSettings, *versions: int) -> None:
    rows = [[POLICY, "main", version, version - 1, f"b{version}", "committed", {"mean_return": 0.5}] for version in versions]
    names = ["Policy", "Branch", "Version", "Parent", "BatchId", "Status", "Metrics"]
    with connect(store) as client:
        client.insert("spangrad_internal.policy_versions", rows, column_names=names)


def answer_call(page: Page) -> None:
    """Answer what the view of a call asks for, but for its texts."""
    page.route("**/api/call?*", lambda route: route.fulfill(json=CALL))
    page.route("**/api/call/alternatives?*", lambda route: route.fulfill(json=[]))


def choose(page: Page, outcome: str) -> None:
    page.get_by_label("Outcome").fill(outcome)
    page.get_by_role("button", name="Filter").click()


def test_chromium_options_disable_the_features_of_playwright() -> None:
    """Chromium takes the last of two such options, which is ours: another release of Playwright may disable more."""
    bundle = Path(playwright.__file__).parent / "driver/package/lib/coreBundle.js"
    listed = re.search(r"disabledFeatures = \[(.*?)\]", bundle.read_text(), re.S)
    assert listed, f"{bundle} has no list of disabled features"
    features = re.findall(r'^ *"(\w+)"', listed[1], re.M)
    assert len(features) > 10
    assert set(features) <= set(CHROMIUM_OPTIONS[-1].partition("=")[2].split(","))


def test_overview_new_versions_end_the_charts_before_them(visitor: Visitor, store: StoreSettings) -> None:
    commit(store, 1, 2)
    page = visitor.open("/")
    for version in (3, 4):
        commit(store, version)
        expect(page.get_by_role("img", name=f"Return over versions 1 to {version};")).to_be_visible()
    assert page.evaluate(PLOTS) == page.locator(".chart").count() == 1


def test_overview_stream_that_was_refused_is_asked_for_again(visitor: Visitor) -> None:
    visitor.page.route("**/events/overview", lambda route: route.fulfill(status=502, body="Bad Gateway"), times=1)
    page = visitor.open("/")
    expect(page.locator("#live")).to_have_text("live")
    visitor.faults.clear()  # the browser reports the status


def test_overview_without_a_store_shows_services_and_the_problem(visitor: Visitor) -> None:
    event = {"error": "no store answers", "services": [{"name": "store", "answers": False, "detail": ""}]}
    body = f"data: {json.dumps(event)}\n\n"
    visitor.page.route("**/events/overview", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page = visitor.open("/")
    expect(page.locator("#services")).to_have_text("○ no answer store")
    expect(page.locator("#problem")).to_have_text("no store answers")


def test_overview_news_leave_the_focus_and_the_state_as_they_are(visitor: Visitor) -> None:
    page = visitor.open("/")
    page.get_by_role("definition").get_by_role("link").first.focus()
    page.evaluate("""() => {
        window.writes = 0;
        new MutationObserver(() => window.writes++).observe(document.getElementById("live"), { childList: true });
        document.activeElement.dataset.old = "yes";
    }""")
    expect(page.locator("a[data-old]")).to_have_count(0)
    assert page.evaluate("[document.activeElement.getAttribute('href'), window.writes]") == ["/rollouts", 0]


def test_overview_newer_version_leaves_the_focus_on_its_link(visitor: Visitor) -> None:
    newest = {"Policy": POLICY, "Branch": "main", "Newest": 1, "NewestMs": 0}
    counts = {"Built": 0, "Waiting": 0, "LastMs": 0, "NowMs": 0}

    def answer(route: Route) -> None:
        event = {"services": [], "rollouts": counts, "newest": newest, "drops": [], "versions": [], "steps": []}
        route.fulfill(content_type="text/event-stream", body=f"retry: 100\ndata: {json.dumps(event)}\n\n")

    visitor.page.route("**/events/overview", answer)
    page = visitor.open("/")
    page.get_by_role("link", name=f"{POLICY}@1").focus()
    newest["Newest"] = 2
    expect(page.get_by_role("link", name=f"{POLICY}@2")).to_be_focused()


def test_overview_stream_without_a_login_leads_to_it(visitor: Visitor) -> None:
    for path in ("events", "api"):
        visitor.page.route(f"**/{path}/overview", lambda route: route.fulfill(status=401, body="this page asks for its token"))
    visitor.page.goto(visitor.url)
    visitor.page.wait_for_url("**/login?next=%2F")
    visitor.faults.clear()


def test_rollouts_numbers_of_an_older_filter_do_not_replace_the_newer(visitor: Visitor) -> None:
    held: list[Route] = []
    page = visitor.open("/rollouts")
    page.route("**/api/rollouts/numbers?outcome=a", lambda route: held.append(route))
    choose(page, "a")
    choose(page, "b")
    expect(page.locator("#count")).to_contain_text("1 rollout.")
    held[0].continue_()
    page.wait_for_timeout(500)
    expect(page.locator("#count")).to_contain_text("1 rollout.")


def test_rollouts_numbers_of_the_filter_before_are_not_shown_beside_a_refusal(visitor: Visitor) -> None:
    page = visitor.open("/rollouts")
    expect(page.locator("#outcomes a")).not_to_have_count(0)
    page.get_by_label("Version").fill("newest")
    page.get_by_role("button", name="Filter").click()
    expect(page.get_by_role("alert")).to_contain_text("version = 'newest' is no version")
    expect(page.locator("#count")).to_have_text("")
    expect(page.locator("#outcomes a")).to_have_count(0)
    visitor.faults.clear()  # the browser reports the status


def test_call_page_late_texts_do_not_replace_the_tokens(visitor: Visitor) -> None:
    held: list[Route] = []
    answer_call(visitor.page)
    page = visitor.open(CALL_PATH)
    page.route("**/api/call/texts?*", lambda route: held.append(route))
    with page.expect_request("**/api/call/texts?*"):
        page.get_by_label("Show as").select_option("json")
    page.get_by_label("Show as").select_option("ids")
    held[0].fulfill(json={part: {"text": "late", "characters": 4} for part in ("request", "response")})
    page.wait_for_timeout(500)
    expect(page.locator("#response .token")).to_have_text(["17"])


def test_call_page_tokens_of_a_folded_prompt_have_their_own_numbers(visitor: Visitor) -> None:
    answer_call(visitor.page)
    page = visitor.open(CALL_PATH)
    page.locator("#prompt .token").last.hover()
    expect(page.locator("#token")).to_have_text("token 6 of the prompt · id 16")
    page.locator("#response .token").hover()
    expect(page.locator("#token")).to_contain_text("token 1 of the response")


def test_call_page_logprob_that_is_no_number_counts_nowhere(visitor: Visitor) -> None:
    response = {"ids": [17, 18], "pieces": None, "logprobs": [-1.0, None]}
    training = {"Policy": POLICY, "Branch": "main", "Version": 1, "logprobs": [None, -1.0], "entropies": []}
    answer_call(visitor.page)
    call = {**CALL, "response": response, "trained": [training]}
    visitor.page.route("**/api/call?*", lambda route: route.fulfill(json=call))
    page = visitor.open(f"{CALL_PATH}&overlay=ratio")
    expect(page.locator(".fact", has_text="Mean logprob").locator("dd")).to_have_text("\u2013")
    for index in (0, 1):
        page.locator("#response .token").nth(index).hover()
        expect(page.locator("#token")).to_contain_text(f"token {index + 1} of the response")
        expect(page.locator("#token")).not_to_contain_text("importance ratio")


def test_number_keeps_all_digits_before_the_point(visitor: Visitor) -> None:
    page = visitor.open("/queue")
    shown = "async (values) => { const { number } = await import('/static/dom.js'); return values.map((value) => number(value)); }"
    values = [1234.5, 1234, 999.6, -45678.9, 0.12345, 99.96, 0.00001234]
    assert page.evaluate(shown, values) == ["1,235", "1,234", "1,000", "-45,679", "0.123", "100", "1.23e-5"]


def test_duration_beyond_two_days_is_in_days(visitor: Visitor) -> None:
    shown = "async (hours) => { const { duration } = await import('/static/dom.js'); return hours.map((hour) => duration(hour * 3600e3)); }"
    assert visitor.open("/").evaluate(shown, [0.5, 47, 48, 8010]) == ["30 min", "47 h", "2 days", "334 days"]


def test_percent_of_almost_none_or_all_is_neither_0_nor_100(visitor: Visitor) -> None:
    page = visitor.open("/actions")
    shown = "async (parts) => { const { percent } = await import('/static/dom.js'); return parts.map((part) => percent(part, 1000)); }"
    assert page.evaluate(shown, [0, 1, 500, 999, 1000]) == ["0 %", "< 1 %", "50 %", "> 99 %", "100 %"]


@pytest.mark.parametrize("values", [[0.9975, 0.9985], [1234.1, 1234.4], [0.0, 1.0]])
def test_chart_ticks_differ_from_each_other(visitor: Visitor, values: list[float]) -> None:
    page = visitor.open("/queue")
    draw = """async (values) => {
        const { chart } = await import('/static/charts.js');
        const plot = chart(document.querySelector('main'), 'x', [1, 2], [{ label: 'a', values }]);
        await new Promise(requestAnimationFrame);
        return plot.axes[1]._values;
    }"""
    ticks = page.evaluate(draw, values)
    assert len(ticks) > 2
    assert len(set(ticks)) == len(ticks), ticks


def test_play_page_offers_no_turn_that_has_a_reply(visitor: Visitor) -> None:
    """Each stream of events ends after the events that are there; the answer to the reply comes after them, and is a refusal."""
    page, held = visitor.page, list[Route]()
    turn = [{"kind": "begin", "environment": "nim", "person": True, "rollout": "r"}, {"kind": "turn", "turn": 1}]
    replied = [{"kind": "replied", "turn": 1}, {"kind": "message", "by": "user", "text": "next"}]
    waiting = [replied, turn]

    def answer(route: Route) -> None:
        events = waiting.pop() if len(waiting) == 2 or (held and waiting) else []
        lines = ["retry: 200", *(f"data: {json.dumps(event)}" for event in events), ""]
        route.fulfill(content_type="text/event-stream", body="\n\n".join(lines))

    page.route("**/events/play?*", answer)
    page.route("**/api/play", lambda route: held.append(route))
    visitor.open("/play?id=r")
    page.get_by_label("Your reply").fill("3")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#log .text").first).to_have_text("next")
    held[0].fulfill(status=400, json={"error": "turn 1 does not wait for a reply"})
    expect(page.get_by_role("alert")).to_contain_text("turn 1 does not wait")
    expect(page.locator("#state")).to_have_text("Waiting…")
    expect(page.get_by_label("Your reply")).to_be_hidden()
    visitor.faults.clear()  # the browser reports the status


def test_virtual_table_without_links_scrolls_by_arrow_keys(visitor: Visitor) -> None:
    row = {"AskedMs": 1, "Author": "Ada", "Address": "::1", "Action": "pin", "Arguments": "{}", "Outcome": "done", "Sentence": "It stays."}
    visitor.page.route("**/api/actions", lambda route: route.fulfill(json={"rows": [row] * 200, "after": None}))
    page = visitor.open("/actions")
    page.locator("#list").focus()
    page.keyboard.press("ArrowDown")
    page.wait_for_function("() => document.getElementById('list').scrollTop > 0")


def test_virtual_table_sorted_by_keyboard_keeps_the_focus_on_its_heading(visitor: Visitor) -> None:
    page = visitor.open("/rollouts")
    page.get_by_role("button", name="Return").focus()
    for order in ("desc", "asc"):
        page.keyboard.press("Enter")
        page.wait_for_url(f"**/rollouts?sort=return&order={order}")
        expect(page.get_by_role("button", name="Return")).to_be_focused()


def test_virtual_table_drawn_again_leaves_the_focus_where_it_is(visitor: Visitor) -> None:
    """Two tables of one page: neither moves the focus within a row, nor out of the other table."""
    page = visitor.open("/actions")
    draw = """async () => {
        const { VirtualTable } = await import("/static/virtual_table.js");
        const { h } = await import("/static/dom.js");
        const columns = ["a", "b"].map((name) => ({ title: name, cell: (row) => h("a", { href: "/", id: name + row }, name) }));
        window.tables = ["left", "right"].map((side) => {
            const region = h("div", { class: "list", style: { height: "100px", minHeight: "0" } });
            document.getElementById("main").append(region);
            const rows = Array.from({ length: 60 }, (_, at) => side + at);
            return new VirtualTable(region, { columns, label: side, more: async () => ({ rows, after: null }) });
        });
        for (const table of tables) await table.fill();
        document.getElementById("bleft3").focus();
        for (const table of tables) { table.drawn = null; table.draw(); }
        return document.activeElement.id;
    }"""
    assert page.evaluate(draw) == "bleft3"


def test_queue_page_last_attempt_has_its_time_zone(visitor: Visitor) -> None:
    attempts = [{"attempt": 0, "began_at": 0.5, "ended_at": None}]
    names = {"rollout_id": "r", "run_id": "run", "group_id": "g", "mode": "train", "worker": "w"}
    rollout = {**names, "state": "running", "attempts_left": 0, "attempts": attempts}
    visitor.page.route("**/api/queue", lambda route: route.fulfill(json={"runs": [], "rows": [rollout], "after": None}))
    page = visitor.open("/queue")
    expect(page.locator("#rollouts tbody")).to_contain_text("0: under way, began 1970-01-01 00:00:00 UTC")


def test_action_without_a_login_shows_the_refusal(visitor: Visitor) -> None:
    refusal = "this page asks for its token: open /login."
    visitor.page.route("**/api/actions", lambda route: route.fulfill(status=401, content_type="text/plain", body=f"{refusal}\n"))
    post = "async () => (await import('/static/actions.js')).post('/api/actions', {})"
    assert visitor.open("/queue").evaluate(post) == {"ok": False, "sentence": refusal}
    visitor.faults.clear()


def test_number_is_on_one_line_with_its_unit(visitor: Visitor) -> None:
    page = visitor.open("/actions")
    lines = """() => {
        const cell = document.createElement("span");
        cell.className = "number";
        const box = document.createElement("div");
        box.style.width = "1px";
        box.append(cell);
        document.getElementById("main").append(box);
        cell.textContent = "1.5 s";
        return cell.getClientRects().length;
    }"""
    assert page.evaluate(lines) == 1


def test_beside_page_greedy_rollout_is_no_part_of_the_mean(visitor: Visitor) -> None:
    row = {"ReturnsByRole": {}, "RunId": "run", "GroupId": "g"}
    rows = [{**row, "RolloutId": mode, "Mode": mode, "Return": value} for mode, value in (("greedy", 3.0), ("train", 1.0))]
    rollout = {"rollout": "r", "spans": [], "rewards": [], "failure": ""}
    visitor.page.route("**/api/rollouts?*", lambda route: route.fulfill(json={"rows": rows, "after": None}))
    visitor.page.route("**/api/beside/advantages?*", lambda route: route.fulfill(json=[]))
    visitor.page.route("**/api/rollout?*", lambda route: route.fulfill(json=rollout))
    page = visitor.open("/beside?run=run&group=g")
    expect(page.locator("#facts dd")).to_have_text(["2", "1"])
    expect(page.locator(".column dt", has_text="Mode")).to_have_count(1)


def test_overview_out_of_sight_holds_no_stream_and_listens_when_seen(visitor: Visitor) -> None:
    """A browser has six connections to a server: as many overviews in sight would leave none for another view."""
    page = visitor.open("/")
    see = """hidden => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    with page.expect_event("requestfailed", lambda request: request.url.endswith("/events/overview")):
        page.evaluate(see, True)
    with page.expect_request("**/events/overview"):
        page.evaluate(see, False)


def test_overview_without_news_shows_that_the_store_is_slow(visitor: Visitor) -> None:
    visitor.page.clock.install()
    page = visitor.open("/")
    page.evaluate("""() => {
        window.states = [];
        const live = document.getElementById("live");
        new MutationObserver(() => states.push(live.textContent)).observe(live, { childList: true });
    }""")
    page.clock.fast_forward(13_000)
    page.wait_for_function("() => states.at(-1) === 'live'")
    assert page.evaluate("states[0]") == "no news: the store is slow, or does not answer"


def test_overview_without_first_news_shows_that_the_store_is_slow(visitor: Visitor) -> None:
    visitor.page.route("**/events/overview", lambda route: None)  # no answer comes
    visitor.page.clock.install()
    visitor.page.goto(visitor.url)
    visitor.page.clock.fast_forward(13_000)
    expect(visitor.page.locator("#live")).to_have_text("no news: the store is slow, or does not answer")


def test_rollouts_count_of_the_filter_before_is_not_shown_while_the_store_is_slow(visitor: Visitor) -> None:
    held: list[Route] = []
    page = visitor.open("/rollouts")
    page.route("**/api/rollouts/numbers?outcome=a", lambda route: held.append(route))
    choose(page, "a")
    expect(page.locator("#count")).to_have_text("Reading\u2026")
    held[0].continue_()
    expect(page.locator("#count")).to_contain_text("2 rollouts.")
