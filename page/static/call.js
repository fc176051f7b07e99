// A call token by token: each token with its id, its logprob and the version that sampled it.
import { labelButton } from "/static/labels.js";
import { address, ask, counted, cut, duration, fact, facts, h, number, put, ready, title, visible } from "/static/dom.js";

const query = new URLSearchParams(location.search);
const place = Object.fromEntries(["rollout", "trace", "span", "choice"].map((name) => [name, query.get(name)]));
const overlay = document.getElementById("overlay");
const form = document.getElementById("form");
const step = document.getElementById("step");
const CHUNK = 4000; // tokens drawn at a time
const VERSION_COLOURS = 6;
const RATIO_STEP = 0.1; // difference of logprobs from one colour to the next
title(`Call of ${place.rollout}`);
let call = await ask(address("/api/call", place));
let alternatives = []; // of each response token, where the recorded response holds them
let described = null; // the token that is described: part, sequence, index

// Steps of several branches may have trained a call: the newest is shown, or the one that is chosen.
step.append(...call.trained.map((training) => h("option", { value: nameOf(training) }, `${training.Policy}@${training.Version} of ${training.Branch}`)));
step.selectedIndex = call.trained.length - 1;
document.getElementById("steps").hidden = call.trained.length < 2;
const conclusion = { transition: `transition, turn ${call.conclusion.turn}`, drop: `dropped: ${call.conclusion.reason} ${call.conclusion.detail ?? ""}`,
  unbuilt: "not built" }[call.conclusion.kind];
const logprobs = call.response.logprobs;
// A value that is no number is null in JSON, which would count as 0.
const finite = (value) => value !== undefined && value !== null;
const mean = logprobs.length && logprobs.every(finite) ? logprobs.reduce((sum, value) => sum + value, 0) / logprobs.length : null;
facts("facts", [
  fact("Rollout", h("a", { href: address("/rollout", { id: call.rollout }) }, call.rollout)),
  fact("Became", h("span", { class: `tag ${call.conclusion.kind === "drop" ? "drop" : "kept"}` }, conclusion)),
  fact("Policy", `${call.Policy || call.Model || "–"} ${call.versions.map(([, version]) => `v${version}`).join(" → ")}`),
  call.AgentName ? fact("Agent", call.AgentName) : null,
  fact("Tokens", `${number(call.promptTokens)} → ${number(call.response.ids.length)}`),
  fact("Mean logprob", number(mean)),
  fact("Temperature", number(call.Temperature)),
  fact("Finished by", call.FinishReason || call.ErrorType || "–"),
  call.Duration ? fact("Time", duration(call.Duration / 1e6)) : null,
  fact("Rewards", call.rewards.map((reward) => `${reward.title} = ${number(reward.value)} (${reward.source}${reward.own ? ", its own" : ""})`).join(", ") || "–"),
  fact("Trained", call.trained.length ? call.trained.map((training) => [
    h("a", { href: address("/version", { policy: training.Policy, branch: training.Branch, version: training.Version }) }, `${training.Policy}@${training.Version}`),
    ` with advantage ${number(training.Advantage)}, return ${number(training.Return)} `]) : "no version"),
]);

put("actions", labelButton("Label this call", place));

function versionAt(index) {
  let known = null;
  for (const [start, version] of call.versions) if (start <= index) known = version;
  return known;
}

function nameOf(training) {
  return JSON.stringify([training.Policy, training.Branch, training.Version]);
}

// What the chosen step has of a token of the response; null: no step trained it, or that step recorded none.
const chosen = () => call.trained[step.selectedIndex] ?? null;
const advantage = () => chosen()?.Advantage ?? null;
const entropy = (index) => chosen()?.entropies[index] ?? null;
function ratio(index) {
  const trainers = chosen()?.logprobs[index];
  return finite(trainers) && finite(logprobs[index]) ? Math.exp(trainers - logprobs[index]) : null;
}

const distinct = [...new Set(call.versions.map(([, version]) => version))];

// Colours are classes, so that the style sheet gives both themes their own.
function colour(part, index) {
  if (overlay.value === "mask") return part === "response" && call.conclusion.kind === "transition" ? "trained" : "masked";
  if (part === "prompt") return "";
  if (overlay.value === "logprob") {
    const value = logprobs[index];
    return !finite(value) ? "" : `surprise-${Math.max(0, Math.min(6, Math.floor(-value * 1.5)))}`;
  }
  if (overlay.value === "version") return `version-${distinct.indexOf(versionAt(index)) % VERSION_COLOURS}`;
  if (overlay.value === "ratio") return ratio(index) === null ? "" : `ratio-${Math.max(-3, Math.min(3, Math.round(Math.log(ratio(index)) / RATIO_STEP)))}`;
  if (overlay.value === "entropy") return entropy(index) === null ? "" : `surprise-${Math.min(6, Math.floor(entropy(index) * 3))}`;
  return advantage() > 0 ? "better" : advantage() < 0 ? "worse" : "";
}

const LEGENDS = {
  logprob: ["surprise-0", "likely", "surprise-3", "unlikely", "surprise-6", "logprob below -4"],
  ratio: ["ratio--3", "0.78 and less", "ratio--1", "0.9", "ratio-0", "1", "ratio-1", "1.1", "ratio-3", "1.28 and more"],
  entropy: ["surprise-0", "below 0.33 nats", "surprise-3", "1", "surprise-6", "2 and more"],
  advantage: ["better", "above the baseline", "worse", "below it"],
  mask: ["trained", "has a loss", "masked", "has none"],
};

function drawLegend() {
  const entries = overlay.value === "version" ? distinct.flatMap((version, at) => [`version-${at % VERSION_COLOURS}`, `version ${version}`]) : LEGENDS[overlay.value];
  const values = { advantage: () => [chosen().Advantage], ratio: () => chosen().logprobs, entropy: () => chosen().entropies }[overlay.value];
  const missing = !values ? "" : chosen() === null ? " No step has trained this call." : values().length ? "" : " The step recorded none.";
  const pairs = [];
  for (let at = 0; at < entries.length; at += 2) pairs.push(h("span", { class: `token ${entries[at]}` }, entries[at + 1]), " ");
  put("legend", pairs, missing);
}

function token(part, sequence, index) {
  const text = form.value === "ids" || !sequence.pieces ? String(sequence.ids[index]) : sequence.pieces[index];
  const shown = visible(text).replaceAll("\n", "⏎\n").replaceAll("\t", "⇥");
  return h("span", { class: `token ${colour(part, index)}`, "data-index": index, tabindex: -1 }, shown || "·");
}

function describe(part, sequence, index) {
  described = [part, sequence, index];
  const folded = part === "prompt" ? call.promptTokens - sequence.ids.length : 0;
  const words = [`token ${folded + index + 1} of the ${part}`, `id ${sequence.ids[index]}`];
  if (sequence.pieces) words.push(`text ${JSON.stringify(sequence.pieces[index])}`);
  if (part === "response") {
    const value = logprobs[index];
    if (finite(value)) words.push(`logprob ${number(value, 4)}`, `probability ${number(Math.exp(value), 3)}`);
    if (versionAt(index) !== null) words.push(`version ${versionAt(index)}`);
    const others = alternatives.length <= call.response.ids.length ? alternatives[index] ?? [] : [];
    if (others.length) words.push(`likeliest: ${others.map((other) => `${JSON.stringify(other.token)} ${number(Math.exp(other.logprob), 3)}`).join(", ")}`);
    if (ratio(index) !== null) words.push(`importance ratio ${number(ratio(index), 4)}`);
    if (entropy(index) !== null) words.push(`entropy ${number(entropy(index))} nats`);
    if (advantage() !== null) words.push(`advantage ${number(advantage())} (mean of the call)`);
  }
  put("token", words.join(" · "));
}

function drawTokens(part, sequence) {
  const box = h("div", { class: "strip", tabindex: 0, role: "group", "aria-label": `Tokens of the ${part}` });
  let drawn = 0;
  const more = h("button", { type: "button" });
  const step = () => {
    const last = Math.min(drawn + CHUNK, sequence.ids.length);
    const added = document.createDocumentFragment();
    for (; drawn < last; drawn++) added.append(token(part, sequence, drawn));
    box.append(added);
    more.hidden = drawn >= sequence.ids.length;
    more.textContent = `Show the next of ${(sequence.ids.length - drawn).toLocaleString("en")} more tokens`;
  };
  more.addEventListener("click", step);
  step();
  box.addEventListener("pointerover", (event) => event.target.dataset.index !== undefined && describe(part, sequence, Number(event.target.dataset.index)));
  box.addEventListener("focusin", (event) => event.target.dataset.index !== undefined && describe(part, sequence, Number(event.target.dataset.index)));
  box.addEventListener("click", (event) => event.target.dataset.index !== undefined && event.target.focus());
  box.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (!move) return;
    event.preventDefault();
    const at = Number(document.activeElement?.dataset?.index ?? -1);
    box.children[Math.max(0, Math.min(drawn - 1, at + move))]?.focus();
  });
  return [box, more];
}

async function draw() {
  drawLegend();
  if (form.value === "json") {
    const texts = await ask(address("/api/call/texts", place));
    if (form.value !== "json") return; // another form was chosen meanwhile
    for (const [part, name] of [["prompt", "request"], ["response", "response"]]) {
      put(part, h("pre", { class: "text", tabindex: 0 }, cut({ ...texts[name], text: pretty(texts[name].text) })),
        h("p", {}, h("a", { href: address("/call.txt", { ...place, part: name }) }, `Download the ${name}`)));
    }
    return;
  }
  const problem = call.textProblem && form.value !== "ids" ? h("p", { class: "small" }, call.textProblem) : null;
  if (form.value === "text") {
    for (const part of ["prompt", "response"]) put(part, problem, fold(part), call[part].pieces ? h("pre", { class: "text", tabindex: 0 }, call[part].pieces.join("")) : null);
    return;
  }
  for (const part of ["prompt", "response"]) put(part, problem, fold(part), ...drawTokens(part, call[part]));
}

// What a prompt repeats of the call before is folded, until somebody asks for it.
function fold(part) {
  if (part !== "prompt" || !call.repeated || call.prompt.ids.length === call.promptTokens) return null;
  return h("p", {}, h("button", { type: "button", onclick: unfold }, `Show ${counted(call.repeated, "token")} repeated from the call before`));
}

async function unfold() {
  call = await ask(address("/api/call", { ...place, whole: "yes" }));
  draw();
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

for (const control of [overlay, form, step]) {
  control.value = query.get(control.id) ?? control.value;
  if (!control.value) control.selectedIndex = 0;
  control.addEventListener("change", () => {
    query.set(control.id, control.value);
    history.replaceState(null, "", `${location.pathname}?${query}`);
    draw();
    if (described) describe(...described);
  });
}
await draw();
ready();
alternatives = await ask(address("/api/call/alternatives", place));
if (described) describe(...described);
