// Play: the choice of an episode, or one that is under way: its messages as they come, and the person's replies.
import { actionButton, post } from "/static/actions.js";
import { address, ask, clearProblem, fact, facts, h, put, ready, visible } from "/static/dom.js";

const query = new URLSearchParams(location.search);
const rollout = query.get("id");
const reply = document.getElementById("reply");
const log = document.getElementById("log");
const state = document.getElementById("state");
let turn = null; // the turn that waits for a reply, by the events

if (rollout) follow();
else await choose();
ready();

async function choose() {
  const form = document.getElementById("choice");
  const { environments, policies } = await ask("/api/play/environments");
  const unnamed = `play-${[...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
  const served = policies.filter(({ rollout }) => rollout);
  const chosen = () => served[form.elements.policy.value] ?? { name: "", rollout: unnamed };
  form.elements.environment.append(...environments.map((name) => h("option", { value: name }, name)));
  form.elements.policy.append(...served.map(({ name, version }, at) => h("option", { value: at }, version === null ? name : `${name}, version ${version}`)));
  const asked = served.filter(({ name }) => name === query.get("policy"));
  const first = asked.find(({ version }) => String(version) === query.get("version")) ?? asked[0];
  if (first) form.elements.policy.value = served.indexOf(first);
  document.getElementById("policies").hidden = !served.length;
  if (query.get("version") && first && String(first.version) !== query.get("version")) {
    state.textContent = visible(`Version ${query.get("version")} of ${first.name} is not served: publish it first, or play with version ${first.version}.`);
  }
  form.addEventListener("submit", (event) => event.preventDefault());
  const button = actionButton("Begin", {
    question: "Begin the episode? It runs on the page's machine, with the policy of the gateway, and is recorded as a rollout of mode production.",
    request: () => ({ action: "play", rollout: chosen().rollout, environment: form.elements.environment.value, task: form.elements.task.value,
      person: form.elements.person.value === "yes", role: form.elements.role.value, policy: chosen().name }),
    done: () => location.assign(address("/play", { id: chosen().rollout })),
  });
  if (!environments.length) state.textContent = "No handler of runner.handlers has an environment to play.";
  else if (!button) state.textContent = "This page offers no actions.";
  else {
    put("begin", button);
    form.hidden = false;
  }
}

function follow() {
  const source = new EventSource(address("/events/play", { id: rollout }));
  source.addEventListener("error", () => {
    if (source.readyState !== EventSource.CLOSED) return; // it connects again by itself
    turn = null;
    wait("This episode is not played here any more.");
    after();
  });
  source.addEventListener("message", (event) => show(JSON.parse(event.data), source));
  put("after", h("button", { type: "button", onclick: () => tell({ rollout }) }, "Leave it"));
  reply.addEventListener("submit", async (event) => {
    event.preventDefault();
    const answer = { rollout, turn, text: reply.elements.text.value };
    wait("Waiting…");
    if (await tell(answer)) reply.elements.text.value = "";
    else if (turn === answer.turn) myTurn();
  });
}

function show(event, source) {
  if (event.kind === "begin") {
    facts("facts", [fact("Environment", event.environment), fact("Player", event.person ? `you${event.role ? `, as ${event.role}` : ""}` : "the policy"),
      ...(event.policy ? [fact("Policy", event.policy)] : []),
      fact("Rollout", event.rollout)]);
    wait("It begins…");
  } else if (event.kind === "message") {
    const own = event.by === "assistant";
    log.append(h("div", { class: own ? "message reply" : "message" }, h("h3", {}, event.role ? `${event.role}: ${event.by}` : event.by),
      h("div", { class: "text" }, event.text)));
    log.lastChild.scrollIntoView({ block: "nearest" });
  } else if (event.kind === "turn") {
    turn = event.turn;
    myTurn();
  } else if (event.kind === "replied") {
    turn = null;
    wait("Waiting…");
  } else {
    turn = null;
    source.close();
    wait(`${event.outcome === "done" ? "It has ended" : event.outcome === "left" ? "It was ended" : "It failed"}: ${event.text}`);
    after();
  }
}

function myTurn() {
  state.textContent = `It is your turn, number ${turn}.`;
  reply.hidden = false;
  reply.elements.text.focus();
}

function wait(sentence) {
  reply.hidden = true;
  state.textContent = visible(sentence);
}

function after() {
  put("after", h("a", { href: address("/rollout", { id: rollout }) }, "The rollout, as the store has it"), " ", h("a", { href: "/play" }, "Play again"));
}

async function tell(answer) {
  clearProblem();
  const { ok, sentence } = await post("/api/play", answer);
  if (!ok) {
    document.getElementById("problem").textContent = visible(sentence);
    document.getElementById("problem").hidden = false;
  }
  return ok;
}
