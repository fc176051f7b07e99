// A rollout: sentences on its fate, its spans as a tree beside a waterfall, its conversation as messages.
import { Conversation, callAddress, choicesOf, outcome } from "/static/conversation.js";
import { actionButton, queueButtons } from "/static/actions.js";
import { labelButton } from "/static/labels.js";
import { address, ask, clearProblem, counted, cut, duration, fact, facts, h, number, put, ready, tabs, title } from "/static/dom.js";

const id = new URLSearchParams(location.search).get("id") ?? "";
title(`Rollout ${id}`);
const rollout = await ask(address("/api/rollout", { id }));
const ends = rollout.spans.map((span) => span.start + span.duration);
const total = Math.max(...ends, 1e-6);
const shift = Math.min(0, ...rollout.spans.map((span) => span.start));

const group = rollout.group ? h("a", { href: address("/beside", { run: rollout.runs[0], group: rollout.group }) }, rollout.group) : "–";
const trace = rollout.spans[0]?.trace;
const template = document.body.dataset.traceUrl;
facts("facts", [
  fact("Run", rollout.runs.join(", ") || "–"),
  fact("Mode", rollout.modes.join(", ") || "production"),
  fact("Task", rollout.task || "–"),
  fact("Group", group),
  fact("Rewards", rollout.rewards.map((reward) => `${reward.title} = ${reward.value} (${reward.source})`).join(", ") || "none arrived"),
  fact("Trained", rollout.trained.length ? rollout.trained.map((batch) => h("span", {},
    h("a", { href: address("/version", { policy: batch.policy, branch: batch.branch, version: batch.version }) }, `${batch.policy}@${batch.version}`), batch.status === "orphaned" ? " (orphaned)" : "", " ")) : "no version"),
  template && trace ? fact("Trace", h("a", { href: template.replace("{trace}", encodeURIComponent(trace)), rel: "noreferrer" }, "in another tool")) : null,
]);

const root = rollout.spans.filter((span) => span.kind === "attempt").at(-1) ?? rollout.spans[0];
put("actions", root ? labelButton("Label this rollout", { rollout: id, trace: root.trace, span: root.span }) : null, " ",
  rollout.builds.length ? actionButton("Add to examples", {
    question: "Add its conversations to a set of examples, a file that `spangrad finetune` trains on? What the set has of this rollout is replaced.",
    fields: [{ name: "set_name", label: "Name of the set", required: true, pattern: "[A-Za-z0-9][A-Za-z0-9_\\-]{0,99}", title: "letters, digits, - and _" }],
    request: (values) => ({ action: "collect", rollout: id, set_name: values.set_name }),
    done: () => {},
  }) : null, h("span", { id: "queue" }));
ask(address("/api/queue/rollout", { id }))
  .then((queued) => put("queue", " ", queued.state ? queueButtons({ ...queued, rollout_id: id }) : null))
  .catch(() => clearProblem()); // a queue that does not answer takes nothing from the rest

put("why", rollout.sentences.map((sentence) => h("p", {}, sentence)),
  rollout.builds.map((build) => h("p", { class: "line" }, h("strong", {}, build.title), ` ${counted(build.transitions, "transition")}`,
    build.drops.map((drop) => h("span", { class: "tag drop", title: drop.detail }, `${drop.count} dropped: ${drop.reason}`)))));

function row(span, index) {
  const facts = [span.kind, span.agent, span.tool].filter((text, at, all) => text && text !== span.name && all.indexOf(text) === at).join(" · ");
  const choices = choicesOf(span);
  const failed = span.status === "Error" || span.failure || span.calls.some((call) => call.error || call.httpStatus >= 400 || call.aborted);
  return h("tr", { class: failed ? "failed-row" : null, "data-index": index },
    h("td", { class: "name", style: { paddingLeft: `${0.5 + Math.min(span.depth, 24) * 0.9}rem` } },
      h("button", { type: "button", class: "span-name", onclick: () => showSpan(span) }, span.name || "(no name)"),
      facts ? h("span", { class: "small" }, ` ${facts}`) : null,
      failed ? h("span", { class: "tag failed", title: span.message }, `error${span.failure ? `: ${span.failure}` : ""}`) : null),
    h("td", { class: "outcome" },
      choices.map((choice) => {
        const call = span.calls.find((known) => known.choice === choice);
        const text = call ? `${number(call.promptTokens)} → ${number(call.responseTokens)} tokens${call.versions.length ? `, v${call.versions.join(" v")}` : ""}` : "tokens";
        return [h("a", { class: "call-link", href: callAddress(id, span, choice) }, choices.length > 1 ? `choice ${choice}: ${text}` : text),
          span.conclusions.filter((conclusion) => conclusion.choice === choice).flatMap(outcome)];
      }),
      (span.conclusions.length ? [] : span.rewards).map((reward) => h("span", { class: "tag reward" }, `${reward.title} = ${reward.value} (${reward.source})`))),
    h("td", { class: "number" }, duration(span.duration)),
    h("td", { class: "waterfall" }, h("div", { class: `bar ${failed ? "bad" : kindClass(span)}`, title: `${duration(span.start - shift)} after the first span`,
      style: { marginLeft: `${(100 * (span.start - shift)) / (total - shift)}%`, width: `max(2px, ${(100 * span.duration) / (total - shift)}%)` } })));
}

function kindClass(span) {
  return { gateway: "model", llm: "model", engine: "model", tool: "tool", attempt: "attempt" }[span.kind] ?? "other";
}

put("spans", h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Spans, scrollable" }, h("table", { class: "spans" },
  h("caption", { class: "hidden" }, "Spans in the order of the tree"),
  h("thead", {}, h("tr", {}, ["Span", "What became of it", "Time", "When, by its host's clock"].map((text) => h("th", { scope: "col" }, text)))),
  h("tbody", {}, rollout.spans.map(row)))));

async function showSpan(span) {
  const dialog = document.getElementById("span");
  const found = await ask(address("/api/span", { trace: span.trace, span: span.span }));
  const pairs = (values) => h("dl", { class: "pairs" }, values.map(([name, text, characters]) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, cut({ text, characters })))));
  dialog.replaceChildren(
    h("h2", { id: "span-title" }, found.SpanName || "(no name)"),
    h("p", { class: "small" }, `${found.ServiceName} · ${found.ScopeName} ${found.ScopeVersion} · ${found.SpanKind} · ${found.StatusCode} `,
      `${span.trace}/${span.span}`),
    found.StatusMessage ? h("p", { class: "failed" }, found.StatusMessage) : h("span"),
    h("h3", {}, "Attributes"), pairs(found.Attributes),
    h("h3", {}, "Resource"), pairs(found.Resource),
    h("h3", {}, "Events"), pairs(found.Events),
    h("form", { method: "dialog" }, h("button", { autofocus: true }, "Close")));
  dialog.showModal();
}

const conversation = new Conversation(document.getElementById("conversation"), rollout);
tabs(async (name) => {
  if (name === "conversation") await conversation.begin();
  ready();
});
