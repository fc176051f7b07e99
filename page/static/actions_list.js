// What was asked of the page, by whom, and what came of it.
import { ask, h, put, ready, time } from "/static/dom.js";

const rows = await ask("/api/actions");
put("list", rows.length ? h("table", {}, h("caption", { class: "hidden" }, "Actions, newest first"),
  h("thead", {}, h("tr", {}, ["When (UTC)", "Who", "From", "Action", "On", "Outcome", ""].map((name) => h("th", { scope: "col" }, name)))),
  h("tbody", {}, rows.map((row) => h("tr", {},
    [time(row.AskedMs), row.Author, row.Address, row.Action].map((text) => h("td", {}, text)),
    h("td", { class: "arguments" }, described(row.Arguments)),
    h("td", {}, h("span", { class: `tag ${row.Outcome === "done" ? "kept" : "drop"}` }, row.Outcome)),
    h("td", { class: "arguments" }, row.Sentence)))))
  : h("p", {}, "Nothing was asked of this page yet."));
ready();

function described(text) {
  try {
    return Object.entries(JSON.parse(text)).map(([name, value]) => `${name} ${Array.isArray(value) ? value.join(", ") : value}`).join(", ");
  } catch {
    return text;
  }
}
