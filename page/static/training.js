// Training: curves of all steps of a branch, and the steps as a table.
import { address, ask, h, number, put, ready, time } from "/static/dom.js";
import { chart, curves, emptied, IDLE } from "/static/charts.js";
import { lanesPicture } from "/static/lanes.js";
import { drawSkipped } from "/static/skipped.js";
import { VirtualTable } from "/static/virtual_table.js";

const CHARTS = {
  Return: { return: "mean_return" },
  Success: { success: "success" },
  "Gradient norm": { norm: "grad_norm" },
  "Policy change (KL)": { kl: "ppo_kl" },
  "Clip shares": { low: "clip_low", high: "clip_high" },
  Entropy: { entropy: "entropy" },
  "Logprob gap": { mean: "logprob_gap_mean", p99: "logprob_gap_p99", largest: "logprob_gap_max" },
  Staleness: { mean: "staleness_mean" },
  "Seconds by part": { train: "seconds_train", publish: "seconds_publish", idle: "seconds_idle", step: "seconds_step" },
  "Seconds before the update": { build: "seconds_build", load: "seconds_load", credit: "seconds_credit", lease: "seconds_lease" },
  "Seconds of passes and copies": { forward: "seconds_forward", backward: "seconds_backward", collect: "seconds_collect" },
  "Seconds after the update": { settle: "seconds_settle", checkpoint: "seconds_checkpoint", publish: "seconds_publish" },
  "Idle shares": IDLE,
};
const TABLE = ["mean_return", "success", "groups", "rollouts", "grad_norm", "ppo_kl", "staleness_mean", "logprob_gap_p99", "seconds_step"];
const query = Object.fromEntries(new URLSearchParams(location.search));
const found = await ask(address("/api/training", { policy: query.policy, branch: query.branch }));
const pattern = document.getElementById("pattern");
pattern.value = query.metrics ?? "";

put("branch", found.branches.map((branch) => h("option", {
  value: JSON.stringify([branch.Policy, branch.Branch]),
  selected: branch.Policy === found.chosen?.Policy && branch.Branch === found.chosen?.Branch,
}, `${branch.Policy}, ${branch.Branch}: ${branch.Newest}`)));
document.getElementById("branch").addEventListener("change", (event) => {
  const [policy, branch] = JSON.parse(event.target.value);
  location.assign(address("/training", { policy, branch }));
});

const place = { policy: found.chosen?.Policy, branch: found.chosen?.Branch };
const versions = found.steps.map((step) => step.Version);
const open = (version) => location.assign(address("/version", { ...place, version }));

// Returns of held-out rollouts by version; of each role where their rewards name several.
function heldOutReturns(rows) {
  const series = [{ label: "return", values: rows.map((row) => row.Return) },
    ...[...new Set(rows.flatMap((row) => Object.keys(row.ReturnsByRole)))].sort().map((role) => ({ label: role, values: rows.map((row) => row.ReturnsByRole[role] ?? null) }))];
  return series.filter(({ values }) => values.some((value) => value !== null));
}

// Metrics whose names hold a text, each as a curve of its own; without a text those that matter first.
function draw() {
  const charts = emptied();
  if (!found.steps.length) return put("charts", h("p", {}, "No step has been committed yet."));
  const text = pattern.value.trim().toLowerCase();
  if (text) {
    const names = [...new Set(found.steps.flatMap((step) => Object.keys(step.Metrics)))].filter((name) => name.toLowerCase().includes(text)).sort();
    for (const name of names.slice(0, 60)) chart(charts, name, versions, curves(found.steps, { [name]: name }), open);
    if (!names.length) put("charts", h("p", {}, "No metric has that text in its name."));
    return;
  }
  for (const [label, names] of Object.entries(CHARTS)) {
    const series = curves(found.steps, names);
    if (series.length) chart(charts, label, versions, series, open);
    if (label === "Success" && found.heldOut.length) {
      chart(charts, "Held-out return, by the version that sampled", found.heldOut.map((row) => row.Version),
        heldOutReturns(found.heldOut), open);
    }
  }
}

pattern.addEventListener("change", () => {
  history.replaceState(null, "", address("/training", { ...Object.fromEntries(new URLSearchParams(location.search)), metrics: pattern.value }));
  draw();
});
draw();

// The steps as a table of any length, sorted by any of its metrics.
const columns = [
  { title: "Version", sort: "version", cell: (step) => h("a", { href: address("/version", { ...place, version: step.Version }) }, String(step.Version)) },
  { title: "Committed (UTC)", cell: (step) => time(step.CommittedMs) },
  ...TABLE.map((name) => ({ title: name, sort: name, number: true, cell: (step) => number(step.Metrics[name] ?? null) })),
];
let steps = null;

function drawSteps(sort) {
  steps?.close();
  const metric = sort.sort === "version" ? "" : sort.sort;
  steps = new VirtualTable(document.getElementById("steps"), { columns, label: "Steps", sort,
    more: (after, signal) => ask(address("/api/training/steps", { ...place, metrics: TABLE.join(","), sort: metric, order: sort.order, after }), { signal }),
    onSort: (name) => {
      const next = { sort: name, order: sort.sort === name && sort.order === "desc" ? "asc" : "desc" };
      history.replaceState(null, "", address("/training", { ...Object.fromEntries(new URLSearchParams(location.search)), ...next }));
      return drawSteps(next);
    } });
  document.getElementById("export-steps").href = address("/steps.csv", { ...place, metrics: TABLE.join(","), sort: metric, order: sort.order });
  return steps.fill();
}

// Lanes need the trainer's own spans (trainer.traces).
async function drawLanes() {
  const newest = found.steps.at(-1)?.Version;
  if (newest === undefined) return;
  const lanes = await ask(address("/api/lanes", { ...place, newest: query.newest ?? newest, steps: query.steps ?? 8 }));
  put("lanes", lanes.steps.length ? lanesPicture(lanes, place) : h("p", { class: "small" }, "The store holds no spans of these steps: the trainer sends them with trainer.traces."));
}

if (found.chosen) await Promise.all([drawSteps({ sort: query.sort ?? "version", order: query.order ?? "desc" }), drawSkipped(place), drawLanes()]);
ready();
