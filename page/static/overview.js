// The overview, live: services, rollouts of the last hour, and curves of the newest steps.
import { address, ask, clearProblem, duration, fact, h, number, percent, put, ready, returned, visible } from "/static/dom.js";
import { chart, curves, emptied, IDLE } from "/static/charts.js";

const CHARTS = {
  Return: { return: "mean_return" },
  Success: { success: "success" },
  Staleness: { mean: "staleness_mean" },
  "Logprob gap": { mean: "logprob_gap_mean", p99: "logprob_gap_p99" },
  "Idle shares": IDLE,
  Drops: { drops: "drops" },
};
const steps = new Map(); // by version: the server sends each step once, and again where it changed
const SILENT = 12000; // milliseconds without news from which on they are late: they come every three seconds
const AGAIN = 3000; // milliseconds until another stream of events is asked for
let drawn = "";

function show(found) {
  renew("services", h("ul", { class: "plain" }, found.services.map((service) =>
    h("li", {}, h("span", { class: service.answers ? "good" : "failed" }, service.answers ? "● answers" : "○ no answer"), ` ${service.name}`,
      service.detail ? h("span", { class: "small" }, ` ${service.detail}`) : null))));
  if (found.error) {
    document.getElementById("problem").textContent = visible(found.error);
    document.getElementById("problem").hidden = false;
    return;
  }
  clearProblem();
  for (const step of found.steps) steps.set(step.Version, step);
  const shown = found.versions.map((version) => steps.get(version));
  for (const version of [...steps.keys()]) if (!found.versions.includes(version)) steps.delete(version);
  const { rollouts, newest } = found;
  const age = (milliseconds) => (milliseconds > 0 ? `${duration(rollouts.NowMs - milliseconds)} ago` : "–");
  renew("rollouts", h("dl", {},
    fact("Built in the last hour", h("a", { href: "/rollouts" }, number(rollouts.Built))),
    fact("Succeeded", rollouts.Built ? percent(rollouts.Succeeded, rollouts.Built) : "–"),
    fact("Mean return", rollouts.Built ? returned(rollouts.Mean, rollouts.MeanByRole) : "–"),
    fact("Last build", age(rollouts.LastMs)),
    fact("Ended, not built yet", number(rollouts.Waiting), rollouts.Waiting ? `, the oldest for ${duration(rollouts.NowMs - rollouts.OldestMs)}` : ""),
    newest ? fact("Newest version", h("a", { href: address("/version", { policy: newest.Policy, branch: newest.Branch, version: newest.Newest }) },
      `${newest.Policy}@${newest.Newest}`), ` ${age(newest.NewestMs)}`) : fact("Newest version", "none")));
  put("drops", found.drops.length ? h("ul", { class: "plain" }, found.drops.map((drop) => h("li", {}, `${drop.Reason} ${number(drop.Count)}`))) : "none");
  const last = shown.at(-1);
  const key = `${newest?.Policy} ${newest?.Branch} ${last?.Version}`;
  if (last && key !== drawn) {
    drawn = key;
    const charts = emptied();
    const pick = (version) => location.assign(address("/version", { policy: newest.Policy, branch: newest.Branch, version }));
    for (const [label, names] of Object.entries(CHARTS)) {
      const series = curves(shown, names);
      if (series.length) chart(charts, label, found.versions, series, pick);
    }
  }
}

// Replaces what an element holds; a link that has the focus is found again by its place: the newest version's address changes.
function renew(id, content) {
  const place = [...document.getElementById(id).querySelectorAll("a")].indexOf(document.activeElement);
  put(id, content).querySelectorAll("a")[place]?.focus({ preventScroll: true });
}

// A screen reader reads the state out again whenever it is written, changed or not.
function say(state) {
  const live = document.getElementById("live");
  if (live.textContent !== state) live.textContent = state;
}

// A browser has few connections to a server, and a stream holds one: tabs out of sight have none, so that others load.
let events = null;
let late = 0; // timer

// News that do not come in time are late, the first ones of a stream as any other.
function expectNews() {
  clearTimeout(late);
  late = setTimeout(say, SILENT, "no news: the store is slow, or does not answer");
}

function listen() {
  if (document.hidden) return; // it listens once it is seen
  events = new EventSource("/events/overview");
  expectNews();
  events.addEventListener("message", (event) => {
    show(JSON.parse(event.data));
    say("live");
    expectNews();
    ready();
  });
  events.addEventListener("error", async ({ target }) => {
    clearTimeout(late);
    say("not connected: trying again");
    if (target.readyState !== EventSource.CLOSED) return; // it connects again by itself
    await ask("/api/overview").catch(() => null); // without a login it leads there
    setTimeout(() => events === target && listen(), AGAIN);
  });
}

document.addEventListener("visibilitychange", () => {
  events?.close();
  clearTimeout(late);
  listen();
});

listen();
