// The queue: runs by state, and the rollouts of a state, in order of arrival; those that have not ended can be cancelled, dead ones queued again.
import { actionButton, OPEN, queueButtons } from "/static/actions.js";
import { address, ask, h, number, put, ready, time } from "/static/dom.js";
import { VirtualTable } from "/static/virtual_table.js";

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

function lastAttempt({ attempts }) {
  const last = attempts.at(-1);
  return last ? `${last.attempt}: ${last.ended_at ? [last.reason ?? "succeeded", last.detail].filter(Boolean).join(" ") : "under way"}, began ${time(last.began_at * 1000)} UTC` : "none";
}

const columns = [
  { title: "Rollout", wide: true, sort: "arrival", cell: (rollout) => h("a", { href: address("/rollout", { id: rollout.rollout_id }) }, rollout.rollout_id) },
  { title: "Run", cell: (rollout) => rollout.run_id },
  { title: "Group", cell: (rollout) => rollout.group_id },
  { title: "Mode", cell: (rollout) => rollout.mode },
  { title: "State", cell: (rollout) => rollout.state },
  { title: "Worker", cell: (rollout) => rollout.worker ?? "–" },
  { title: "Attempts left", number: true, cell: (rollout) => String(rollout.attempts_left) },
  { title: "Last attempt", wide: true, cell: lastAttempt },
  { title: "", cell: (rollout) => queueButtons(rollout) ?? "" },
];
const order = query.order ?? "newest";
const table = new VirtualTable(document.getElementById("rollouts"), {
  columns,
  label: `Rollouts, the ${order} first`,
  sort: { sort: "arrival", order: order === "newest" ? "desc" : "asc" },
  first: found,
  more: (after, signal) => ask(address("/api/queue", { ...query, after }), { signal }),
  onSort: () => location.assign(address("/queue", { ...query, order: order === "newest" ? "oldest" : "newest" })),
});
await table.fill();
put("many", many("Cancel", found.rows.filter((rollout) => OPEN.includes(rollout.state)), "cancel", "Cancel the first rollouts of this list that have not ended?"), " ",
  many("Retry", found.rows.filter((rollout) => rollout.state === "dead"), "retry", "Queue the first dead rollouts of this list again?"));
put("none", found.rows.length || found.problem ? "" : "No rollout is in this state.");
ready();
