// The queue: runs by state, and the rollouts of a state; those that have not ended can be cancelled, dead ones queued again.
import { actionButton, OPEN, queueButtons } from "/static/actions.js";
import { address, ask, h, number, put, ready, time } from "/static/dom.js";

const STATES = ["queued", "running", "succeeded", "failed", "dead", "cancelled"];
const query = Object.fromEntries(new URLSearchParams(location.search));
const form = document.getElementById("filters");
form.elements.state.append(h("option", { value: "" }, "any"), ...STATES.map((state) => h("option", { value: state }, state)));
for (const name of ["run", "state"]) form.elements[name].value = query[name] ?? "";
const found = await ask(address("/api/queue", query));

function cell(run, state) {
  const count = run.states[state] ?? 0;
  return h("td", { class: "number" }, count ? h("a", { href: address("/queue", { run: run.run_id, state }) }, number(count)) : "0");
}

put("problem-queue", found.problem ?? "");
put("runs", found.runs.length ? h("table", {}, h("caption", { class: "hidden" }, "Runs, with rollouts by state"),
  h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Run"), STATES.map((state) => h("th", { scope: "col", class: "number" }, state)))),
  h("tbody", {}, found.runs.map((run) => h("tr", {}, h("td", {}, h("a", { href: address("/queue", { run: run.run_id }) }, run.run_id)),
    STATES.map((state) => cell(run, state)))))) : null);

function many(label, rollouts, action, question) {
  return rollouts.length ? actionButton(`${label} ${number(rollouts.length)} shown`, { question,
    request: () => ({ action, rollout_ids: rollouts.map((rollout) => rollout.rollout_id) }) }) : null;
}

put("many", many("Cancel", found.rollouts.filter((rollout) => OPEN.includes(rollout.state)), "cancel", "Cancel all rollouts of this list that have not ended?"), " ",
  many("Retry", found.rollouts.filter((rollout) => rollout.state === "dead"), "retry", "Queue all dead rollouts of this list again?"));
put("rollouts", found.rollouts.length ? h("table", {}, h("caption", { class: "hidden" }, "Rollouts, in order of arrival"),
  h("thead", {}, h("tr", {}, ["Rollout", "Run", "Group", "Mode", "State", "Worker", "Attempts left", "Last attempt", ""].map((name) => h("th", { scope: "col" }, name)))),
  h("tbody", {}, found.rollouts.map((rollout) => {
    const last = rollout.attempts.at(-1);
    return h("tr", {},
      h("td", {}, h("a", { href: address("/rollout", { id: rollout.rollout_id }) }, rollout.rollout_id)),
      [rollout.run_id, rollout.group_id, rollout.mode, rollout.state, rollout.worker ?? "–", String(rollout.attempts_left)].map((text) => h("td", {}, text)),
      h("td", {}, last ? `${last.attempt}: ${last.ended_at ? `${last.reason ?? "succeeded"} ${last.detail ?? ""}` : "under way"}, began ${time(last.began_at * 1000)}` : "none"),
      h("td", {}, queueButtons(rollout)));
  }))) : found.problem ? null : h("p", {}, "No rollout is in this state."));
if (found.after) put("more", h("a", { href: address("/queue", { ...query, after: found.after }) }, "The next rollouts"));
ready();
