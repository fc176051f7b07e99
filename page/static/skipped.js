// Groups that a branch skipped, each with its reason; the ledger has them, which not every page reaches.
import { actionButton } from "/static/actions.js";
import { address, ask, h, number, put, time } from "/static/dom.js";
import { VirtualTable } from "/static/virtual_table.js";

// place: {policy, branch}, and {since, until}: newest versions of the policy when the first and the last of them were skipped.
export async function drawSkipped(place) {
  const skipped = await ask(address("/api/training/skipped", place));
  const reasons = Object.entries(skipped.reasons).map(([reason, count]) => `${reason} ${number(count)}`).join(", ");
  put("skipped-reasons", skipped.problem ?? (reasons || "No group was skipped."));
  const region = document.getElementById("skipped");
  region.hidden = !skipped.rows.length;
  if (region.hidden) return;
  const { policy, branch } = place;
  const columns = [
    { title: "Group", cell: (row) => h("a", { href: address("/beside", { run: row.run, group: row.group }) }, row.group) },
    { title: "Run", cell: (row) => row.run },
    { title: "Reason", cell: (row) => h("span", { class: "tag drop", title: row.remedy }, row.reason) },
    { title: "Detail", wide: true, cell: (row) => [row.detail, row.remedy].filter(Boolean).join(" ") },
    { title: "Skipped (UTC)", cell: (row) => time(row.skipped_us / 1000) },
    { title: "", cell: (row) => actionButton("Restore", { request: () => ({ action: "restore", policy, branch, groups: [row.group] }),
      question: `Make group ${row.group} trainable again? The trainer checks it again, and skips it where the reason still holds.` }) ?? "" },
  ];
  const table = new VirtualTable(region, { columns, label: "Skipped groups, newest first", first: skipped,
    more: (after, signal) => ask(address("/api/training/skipped", { ...place, after }), { signal }) });
  await table.fill();
}
