// Groups that a branch skipped, each with its reason; the ledger has them, which not every page reaches.
import { actionButton } from "/static/actions.js";
import { address, ask, h, number, put, time } from "/static/dom.js";

// place: {policy, branch}, and {since, until}: newest versions of the policy when the first and the last of them were skipped.
export async function drawSkipped(place) {
  const skipped = await ask(address("/api/training/skipped", place));
  const reasons = Object.entries(skipped.reasons).map(([reason, count]) => `${reason} ${number(count)}`).join(", ");
  put("skipped-reasons", skipped.problem ?? (reasons || "No group was skipped."));
  if (!skipped.groups.length) return;
  const { policy, branch } = place;
  put("skipped", h("table", {}, h("caption", { class: "hidden" }, "Skipped groups, newest first"),
    h("thead", {}, h("tr", {}, ["Group", "Run", "Reason", "Detail", "Skipped (UTC)", ""].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, skipped.groups.map((row) => h("tr", {},
      h("td", {}, h("a", { href: address("/beside", { run: row.run, group: row.group }) }, row.group)),
      h("td", {}, row.run),
      h("td", {}, h("span", { class: "tag drop", title: row.remedy }, row.reason)),
      h("td", {}, row.detail, " ", h("span", { class: "small" }, row.remedy)),
      h("td", {}, time(row.skipped_ms)),
      h("td", {}, actionButton("Restore", { question: `Make group ${row.group} trainable again? The trainer checks it again, and skips it where the reason still holds.`,
        request: () => ({ action: "restore", policy, branch, groups: [row.group] }) })))))));
}
