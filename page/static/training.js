// Training: curves of all steps of a branch, and the steps as a table.
import { actionButton } from "/static/actions.js";
import { address, ask, h, number, put, ready, time } from "/static/dom.js";
import { chart, curves, IDLE } from "/static/charts.js";
import { lanesPicture } from "/static/lanes.js";

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
  const charts = put("charts");
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
  history.replaceState(null, "", address("/training", { ...query, metrics: pattern.value }));
  draw();
});
draw();

put("steps", h("table", {}, h("caption", { class: "hidden" }, "Steps, newest first"),
  h("thead", {}, h("tr", {}, ["Version", "Committed (UTC)", ...TABLE].map((name, at) => h("th", { scope: "col", class: at > 1 ? "number" : null }, name)))),
  h("tbody", {}, found.steps.toReversed().slice(0, 300).map((step) => h("tr", {},
    h("td", {}, h("a", { href: address("/version", { ...place, version: step.Version }) }, String(step.Version))),
    h("td", {}, time(step.CommittedMs)),
    TABLE.map((name) => h("td", { class: "number" }, number(step.Metrics[name] ?? null))))))));

// Groups that the branch skipped, each with its reason; the ledger has them, which not every page reaches.
async function drawSkipped() {
  const skipped = await ask(address("/api/training/skipped", place));
  const reasons = Object.entries(skipped.reasons).map(([reason, count]) => `${reason} ${number(count)}`).join(", ");
  put("skipped-reasons", skipped.problem ?? (reasons || "No group was skipped."));
  if (!skipped.groups.length) return;
  put("skipped", h("table", {}, h("caption", { class: "hidden" }, "Skipped groups, newest first"),
    h("thead", {}, h("tr", {}, ["Group", "Run", "Reason", "Detail", "Skipped (UTC)", ""].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, skipped.groups.map((row) => h("tr", {},
      h("td", {}, h("a", { href: address("/beside", { run: row.run, group: row.group }) }, row.group)),
      h("td", {}, row.run),
      h("td", {}, h("span", { class: "tag drop", title: row.remedy }, row.reason)),
      h("td", {}, row.detail, " ", h("span", { class: "small" }, row.remedy)),
      h("td", {}, time(row.skipped_ms)),
      h("td", {}, actionButton("Restore", { question: `Make group ${row.group} trainable again? The trainer checks it again, and skips it where the reason still holds.`,
        request: () => ({ action: "restore", ...place, groups: [row.group] }) })))))));
}

// Lanes need the trainer's own spans (trainer.traces).
async function drawLanes() {
  const newest = found.steps.at(-1)?.Version;
  if (newest === undefined) return;
  const lanes = await ask(address("/api/lanes", { ...place, newest: query.newest ?? newest, steps: query.steps ?? 8 }));
  put("lanes", lanes.steps.length ? lanesPicture(lanes, place) : h("p", { class: "small" }, "The store holds no spans of these steps: the trainer sends them with trainer.traces."));
}

if (found.chosen) await Promise.all([drawSkipped(), drawLanes()]);
ready();
