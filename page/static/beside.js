// Rollouts side by side: those of a group, or any that the address names; each with its conversation.
import { Conversation } from "/static/conversation.js";
import { address, ask, clearProblem, fact, h, number, put, ready, returned, title, visible } from "/static/dom.js";

const MOST = 8;
const parameters = new URLSearchParams(location.search);
const group = parameters.get("group");
const rows = group === null ? [] : (await ask(address("/api/rollouts", { run: parameters.get("run"), group, sort: "return" }))).rows;
// One that was built by several specifications is one rollout.
const known = new Map(rows.toReversed().map((row) => [row.RolloutId, row]));
const ids = [...new Set([...parameters.getAll("rollout"), ...rows.map((row) => row.RolloutId)])].slice(0, MOST);
// The greedy rollout of a group is what others are compared with, and no part of their mean.
const returns = [...known.values()].filter((row) => row.Mode !== "greedy").map((row) => row.Return).filter((value) => value !== null);
const baseline = returns.length ? returns.reduce((sum, value) => sum + value, 0) / returns.length : null;
title(group === null ? "Rollouts side by side" : `Group ${group}`);
put("facts", h("dl", {}, fact("Rollouts", known.size > MOST ? `${MOST} of ${known.size}, by return` : String(ids.length)),
  baseline === null ? null : fact("Mean return", number(baseline))));

const trained = ids.length ? await ask(`/api/beside/advantages?${new URLSearchParams(ids.map((id) => ["rollout", id]))}`) : [];
const columns = ids.map((id) => {
  const row = known.get(id);
  const advantages = trained.filter((step) => step.RolloutId === id).map((step) =>
    [h("a", { href: address("/version", { policy: step.Policy, branch: step.Branch, version: step.Version }) }, `${number(step.Advantage)} in ${step.Policy}@${step.Version}`), " "]);
  const head = h("dl", {}, row?.Mode === "greedy" ? fact("Mode", row.Mode) : null, fact("Return", row ? returned(row.Return, row.ReturnsByRole) : "–"),
    row && row.Return !== null && baseline !== null ? fact("Return less the mean", number(row.Return - baseline)) : null,
    fact("Mean advantage", advantages.length ? advantages : "not trained"));
  const conversation = h("div", {}, h("p", {}, "Reading…"));
  return { id, conversation, element: h("section", { class: "column", "aria-label": `Rollout ${visible(id)}`, tabindex: 0 },
    h("h2", {}, h("a", { href: address("/rollout", { id }) }, id)), head, conversation) };
});
put("columns", columns.length ? columns.map((column) => column.element) : h("p", {}, "The address names no rollout that was built."));
await Promise.all(columns.map(async ({ id, conversation }) => {
  try {
    const rollout = await ask(address("/api/rollout", { id }));
    const versions = [...new Set(rollout.spans.flatMap((span) => span.calls.flatMap((call) => call.versions)))].join(", ");
    const rewards = rollout.rewards.map((reward) => `${reward.title} = ${reward.value}`).join(", ");
    const failure = rollout.failure;
    conversation.before(h("p", { class: "small" }, [failure ? `failed: ${failure}` : "", rewards, versions ? `versions ${versions}` : ""].filter(Boolean).join(" · ")));
    await new Conversation(conversation, rollout).begin();
  } catch (error) {
    clearProblem(); // the other columns are as they should be
    conversation.replaceChildren(h("p", { class: "failed" }, error.message));
  }
}));
ready();
