// The list of rollouts: filters, a table of any length, numbers and a histogram beside it. The address holds all of it.
import { address, ask, clearProblem, counted, duration, h, number, percent, put, ready, returned, time } from "/static/dom.js";
import { VirtualTable } from "/static/virtual_table.js";

const filters = document.getElementById("filters");
let table = null;
let asking = new AbortController(); // of the numbers beside the table

function parameters() {
  return Object.fromEntries(new URLSearchParams(location.search));
}

const columns = [
  { title: "Rollout", wide: true, cell: (row) => h("a", { href: address("/rollout", { id: row.RolloutId }) }, row.RolloutId || "(no id)") },
  { title: "Run", cell: (row) => row.RunId },
  { title: "Mode", cell: (row) => row.Mode },
  { title: "Task", cell: (row) => row.TaskId },
  { title: "Outcome", cell: (row) => h("span", { class: row.Outcome === "succeeded" ? "good" : "failed" }, row.Outcome) },
  { title: "Return", sort: "return", number: true, cell: (row) => returned(row.Return, row.ReturnsByRole) },
  { title: "Calls", sort: "calls", number: true, cell: (row) => number(row.Calls) },
  { title: "Drops", sort: "drops", number: true, cell: (row) => number(row.Drops) },
  { title: "Tools", sort: "failed_tools", number: true, cell: (row) => `${row.ToolCalls}${row.FailedToolCalls ? `, ${row.FailedToolCalls} failed` : ""}` },
  { title: "Tokens", sort: "tokens", number: true, cell: (row) => number(row.InputTokens + row.OutputTokens) },
  { title: "Agents", cell: (row) => row.AgentNames.join(", ") },
  { title: "Versions", cell: (row) => row.PolicyVersions.join(", ") },
  { title: "Trained", cell: (row) => row.Trained.map(([policy, branch, version]) =>
    [h("a", { href: address("/version", { policy, branch, version }) }, `${policy}@${version}`), " "]) },
  { title: "Group", cell: (row) => row.GroupId && h("a", { href: address("/beside", { run: row.RunId, group: row.GroupId }) }, row.GroupId) },
  { title: "Began (UTC)", sort: "started", cell: (row) => time(row.StartedMs) },
  { title: "Time", sort: "seconds", number: true, cell: (row) => duration(row.Seconds * 1000) },
];

function show() {
  clearProblem();
  const chosen = parameters();
  for (const field of filters.elements) if (field.name) field.value = chosen[field.name] ?? "";
  const sort = { sort: chosen.sort ?? "built", order: chosen.order ?? "desc" };
  document.getElementById("export-csv").href = address("/rollouts.csv", chosen);
  document.getElementById("export-jsonl").href = address("/rollouts.jsonl", chosen);
  put("searched");
  put("count", "Reading…");
  table?.close();
  asking.abort();
  asking = new AbortController();
  const searched = { rows: 0, found: 0 };
  table = new VirtualTable(document.getElementById("list"), {
    columns,
    label: "Rollouts",
    sort,
    more: async (after, signal) => {
      const page = await ask(address("/api/rollouts", { ...chosen, after }), { signal });
      if (chosen.contents) {
        searched.rows += page.searched;
        searched.found += page.rows.length;
        put("searched", `${counted(searched.found, "rollout")} with the text in ${number(searched.rows)} searched${page.after ? ", more follow." : "."}`);
      }
      return page;
    },
    onSort: (name) => go({ ...parameters(), sort: name, order: sort.sort === name && sort.order === "desc" ? "asc" : "desc" }),
  });
  document.getElementById("list").scrollTop = 0;
  return Promise.all([table.fill(), numbers(chosen, asking.signal)]);
}

async function numbers(chosen, signal) {
  const { sort, order, contents, ...condition } = chosen;
  let found;
  try {
    found = await ask(address("/api/rollouts/numbers", condition), { signal });
  } catch (error) {
    if (error.name === "AbortError") return; // of a filter that another has replaced
    for (const id of ["count", "histogram", "outcomes"]) put(id); // those are of the filter before
    throw error;
  }
  const succeeded = found.Count ? ` ${percent(found.Succeeded, found.Count)} succeeded, mean return ${returned(found.Mean, found.MeanByRole)}.` : "";
  put("count", `${counted(found.Count, "rollout")}.${succeeded}`);
  const largest = Math.max(1, ...found.Histogram.map((bin) => bin.count));
  put("histogram", found.Histogram.length ? h("ol", {}, found.Histogram.map((bin) => {
    const range = bin.from === bin.to ? number(bin.from) : `${number(bin.from)} to ${number(bin.to)}`;
    const href = address("/rollouts", { ...chosen, reward_from: bin.from, reward_to: bin.to });
    return h("li", {}, h("a", { href, "aria-label": `Return ${range}: ${counted(bin.count, "rollout")}`, title: `${range}: ${bin.count}` },
      h("span", { class: "bar", style: { height: `${bin.count ? Math.max(2, (100 * bin.count) / largest) : 0}%` } })));
  })) : h("p", {}, "No returns."));
  const bounds = found.Histogram.length ? h("p", { class: "line small" }, h("span", {}, number(found.Least)), h("span", {}, number(found.Largest))) : null;
  if (bounds) document.getElementById("histogram").append(bounds);
  put("outcomes", h("ul", { class: "plain" }, Object.entries(found.Outcomes).map(([outcome, count]) =>
    h("li", {}, h("a", { href: address("/rollouts", { ...chosen, outcome }) }, outcome), ` ${count.toLocaleString("en")}`))));
}

function go(chosen) {
  history.pushState(null, "", address("/rollouts", chosen));
  show();
}

filters.addEventListener("submit", (event) => {
  event.preventDefault();
  const { sort, order } = parameters();
  go({ ...Object.fromEntries(new FormData(filters)), sort, order });
});
addEventListener("popstate", show);
await show();
ready();

for (const [name, values] of Object.entries(await ask("/api/rollouts/choices"))) {
  put(`choices-${name}`, values.map((value) => h("option", { value })));
}
