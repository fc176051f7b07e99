// Two versions on the same held-out tasks: where they differ most comes first.
import { address, ask, counted, h, number, put, ready } from "/static/dom.js";

const query = Object.fromEntries(new URLSearchParams(location.search));
const form = document.getElementById("versions");
const { branches, chosen } = await ask(address("/api/training", {}));
put("choices-policy", [...new Set(branches.map((branch) => branch.Policy))].map((value) => h("option", { value })));
form.elements.policy.value = query.policy ?? chosen?.Policy ?? "";
form.elements.left.value = query.left ?? "";
form.elements.right.value = query.right ?? "";

function side(task, name) {
  return h("td", {}, `${number(task[name].mean)}: `, task[name].rollouts.map(([id, value, outcome]) =>
    [h("a", { href: address("/rollout", { id }), title: `${outcome}, return ${number(value)}` }, id), " "]));
}

function beside(task) {
  const parameters = new URLSearchParams();
  for (const name of ["left", "right"]) for (const [id] of task[name].rollouts.slice(0, 2)) parameters.append("rollout", id);
  return `/beside?${parameters}`;
}

if (query.policy && query.left && query.right) {
  const found = await ask(address("/api/compare", query));
  put("summary", `${counted(found.both, "held-out task")} played by both: version ${found.right} did better in ${found.better}, worse in ${found.worse}. `
    + `Others played by version ${found.left} alone: ${found.leftOnly}, by version ${found.right} alone: ${found.rightOnly}.`);
  put("tasks", found.tasks.length ? h("table", {}, h("caption", { class: "hidden" }, "Tasks, the largest difference first"),
    h("thead", {}, h("tr", {}, ["Task", "Difference", `Version ${found.left}`, `Version ${found.right}`, "Rollouts"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, found.tasks.map((task) => {
      const difference = task.right.mean - task.left.mean;
      return h("tr", {}, h("td", {}, task.role ? `${task.task}, ${task.role}` : task.task), h("td", { class: difference > 0 ? "good" : difference < 0 ? "failed" : null }, `${difference > 0 ? "+" : ""}${number(difference)}`),
        side(task, "left"), side(task, "right"), h("td", {}, h("a", { href: beside(task) }, "Side by side")));
    }))) : h("p", {}, "No task in mode validate was played by both."));
}
ready();
