// A version: its lineage both ways, its batch by groups, the time of its step, all of its metrics.
import { actionButton, playLink } from "/static/actions.js";
import { lineagePicture } from "/static/lineage.js";
import { drawSkipped } from "/static/skipped.js";
import { address, ask, counted, fact, facts, h, number, put, ready, time, title } from "/static/dom.js";

const query = Object.fromEntries(new URLSearchParams(location.search));
const version = await ask(address("/api/version", query));
const PARTS = Object.entries(version.Metrics).filter(([name]) => name.startsWith("seconds_") && name !== "seconds_step");
title(`${version.Policy}@${version.Version}`);

// A version of this policy; without a branch the store knows none of that number.
function link(number_, branch) {
  const name = `${version.Policy}@${number_}${branch && branch !== version.Branch ? ` on ${branch}` : ""}`;
  return branch ? h("a", { href: address("/version", { policy: version.Policy, branch, version: number_ }) }, name) : name;
}

const rollouts = version.groups.reduce((sum, group) => sum + group.rollouts.length, 0);
facts("facts", [
  fact("Branch", version.Branch),
  fact("Status", version.Status),
  fact("Parent", version.Parent === null ? "training began with it" : link(version.Parent, version.ParentBranch)),
  fact("Committed (UTC)", time(version.CommittedMs)),
  fact("Batch", version.BatchId || "none"),
  fact("Return", number(version.Metrics.mean_return ?? null)),
  fact("Success", number(version.Metrics.success ?? null)),
  fact("Gradient norm", number(version.Metrics.grad_norm ?? null)),
  fact("Checksum", version.Checksum || "–"),
  fact("Path", version.Path || "–"),
]);

const name = `${version.Policy}@${version.Version}`;
const act = (action) => () => ({ action, policy: version.Policy, branch: version.Branch, version: version.Version });
put("actions", version.Status === "committed" ? [
  actionButton("Publish", { request: act("publish"), question: `Have the gateway serve ${name}? What is trained next stays; a trainer that publishes serves its newest version again.` }), " ",
  actionButton("Roll back to it", { request: act("roll_back"), question: `Return branch ${version.Branch} to ${name}? The next step trains it, a step under way is cancelled, and the gateway serves it where the trainer publishes.` }), " ",
  actionButton("Pin", { request: act("pin"), question: `Keep the checkpoint of ${name} whatever trainer.checkpoint.keep says?` }), " ",
  actionButton("Unpin", { request: act("unpin"), question: `Keep the checkpoint of ${name} no longer than trainer.checkpoint.keep says?` }), " ",
  playLink(version.Policy, version.Version),
] : null);

// The picture reads from left to right: who sampled, what was trained, what it made, what came of it.
function step(name, ...content) {
  return h("li", {}, h("h3", {}, name), content);
}

put("lineage", lineagePicture(version), h("ol", { class: "lineage" },
  step("Sampled by", version.sampledBy.length ? version.sampledBy.map((row) => h("p", {}, link(row.Sampled, row.Branch), ` ${counted(row.Calls, "call")}`)) : h("p", {}, "unknown")),
  step("Batch", h("p", {}, h("a", { href: "#groups" }, `${counted(version.groups.length, "group")}, ${counted(rollouts, "rollout")}`))),
  step("This version", h("p", {}, h("strong", {}, `${version.Policy}@${version.Version}`)), version.Parent === null ? null : h("p", { class: "small" }, "from ", link(version.Parent, version.ParentBranch))),
  step("Children", version.children.length ? version.children.map((row) => h("p", {}, link(row.Version, row.Branch), row.Status === "committed" ? "" : ` ${row.Status}`)) : h("p", {}, "none yet")),
  step("Trained on its rollouts", version.samples.length ? version.samples.map((row) => h("p", {}, link(row.Version, row.Branch), ` ${counted(row.Calls, "call")}`)) : h("p", {}, "none yet"))));

const picture = document.querySelector(".lineage-picture");
picture.scrollLeft = (picture.scrollWidth - picture.clientWidth) / 2; // the version stands in the middle

const total = PARTS.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
put("time", PARTS.length ? h("table", { class: "parts" }, h("caption", { class: "hidden" }, "Seconds of the step by part"), h("tbody", {}, PARTS
  .sort((left, right) => right[1] - left[1])
  .map(([name, seconds]) => h("tr", {}, h("th", { scope: "row" }, name.replace("seconds_", "")), h("td", { class: "number" }, `${number(seconds)} s`),
    h("td", { class: "waterfall" }, h("div", { class: "bar model", style: { width: `${(100 * seconds) / total}%` } })))))) : "No times were recorded.");

put("groups", version.groups.length ? version.groups.map((group) => h("details", {},
  h("summary", {}, `${group.task || group.group}: mean return ${number(group.baseline)}, ${counted(group.rollouts.length, "rollout")}`),
  h("p", {}, h("a", { href: address("/beside", { run: group.run, group: group.group }) }, "Side by side")),
  h("table", {}, h("thead", {}, h("tr", {}, ["Rollout", "Return", "Advantage", "Calls", "Tokens", "Staleness"].map((name, at) =>
    h("th", { scope: "col", class: at ? "number" : null }, name)))),
    h("tbody", {}, group.rollouts.map((row) => h("tr", {},
      h("td", {}, h("a", { href: address("/rollout", { id: row.RolloutId }) }, row.RolloutId)),
      [row.Return, row.Advantage, row.Calls, row.Tokens, row.Staleness].map((value) => h("td", { class: "number" }, row.Calls ? number(value) : "–")))))))) : "No rollouts: training began with it, or it was trained on files.");

put("rewards", version.rewards.length ? h("table", {}, h("caption", { class: "hidden" }, "Rewards of the batch"),
  h("thead", {}, h("tr", {}, ["Reward", "Role", "Rollouts", "Mean", "Least", "Largest"].map((name, at) => h("th", { scope: "col", class: at > 1 ? "number" : null }, name)))),
  h("tbody", {}, version.rewards.map((row) => h("tr", {}, h("td", {}, row.Name), h("td", {}, row.Role || "every role"),
    [row.Rollouts, row.Mean, row.Least, row.Largest].map((value) => h("td", { class: "number" }, number(value))))))) : "No rewards.");

put("metrics", h("dl", { class: "metrics" }, Object.entries(version.Metrics).sort().map(([name, value]) => fact(name, number(value, 4)))));
if (version.Parent !== null) await drawSkipped({ policy: version.Policy, branch: version.Branch, since: version.Parent, until: version.Version });
ready();
