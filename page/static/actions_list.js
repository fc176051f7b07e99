// What was asked of the page, by whom, and what came of it.
import { address, ask, h, put, ready, time } from "/static/dom.js";
import { VirtualTable } from "/static/virtual_table.js";

function described(text) {
  try {
    return Object.entries(JSON.parse(text)).map(([name, value]) => `${name} ${Array.isArray(value) ? value.join(", ") : value}`).join(", ");
  } catch {
    return text;
  }
}

const columns = [
  { title: "When (UTC)", cell: (row) => time(row.AskedMs) },
  { title: "Who", cell: (row) => row.Author },
  { title: "From", cell: (row) => row.Address },
  { title: "Action", cell: (row) => row.Action },
  { title: "On", wide: true, cell: (row) => described(row.Arguments) },
  { title: "Outcome", cell: (row) => h("span", { class: `tag ${row.Outcome === "done" ? "kept" : "drop"}` }, row.Outcome) },
  { title: "Sentence", wide: true, cell: (row) => row.Sentence },
];
const table = new VirtualTable(document.getElementById("list"), { columns, label: "Actions, newest first",
  more: (after, signal) => ask(address("/api/actions", { after }), { signal }) });
await table.fill();
put("none", table.rows.length ? "" : "Nothing was asked of this page yet.");
ready();
