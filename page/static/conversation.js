// The conversation of a rollout: of each call the messages that are new, and the reply; asked for as they come into view.
import { address, ask, counted, cut, h, number, visible } from "/static/dom.js";

const TURNS = 15; // calls of one request
const KNOWN = 5; // calls before them that they are compared with

export function callAddress(rollout, span, choice) {
  return address("/call", { rollout, trace: span.trace, span: span.span, choice });
}

// The choices of a call: those that the gateway recorded and those that a build concluded on.
export function choicesOf(span) {
  const choices = new Set([...span.calls.map((call) => call.choice), ...span.conclusions.map((conclusion) => conclusion.choice)]);
  return [...choices].sort((left, right) => left - right);
}

export function outcome(conclusion) {
  const rewards = conclusion.rewards.map((reward) => h("span", { class: "tag reward" }, `${reward.title} ${number(reward.value)} (${reward.source})`));
  return conclusion.reason
    ? [h("span", { class: "tag drop", title: `${conclusion.detail} ${conclusion.remedy}` }, `dropped: ${conclusion.reason}`)]
    : [h("span", { class: "tag kept" }, `transition, turn ${conclusion.turn}`), ...rewards];
}

export class Conversation {
  constructor(element, rollout) {
    this.rollout = rollout;
    this.calls = rollout.spans
      .flatMap((span) => choicesOf(span).map((choice) => ({ span, choice, name: `${span.trace}.${span.span}.${choice}.${span.startedNs}` })))
      .sort((left, right) => left.span.attempt - right.span.attempt || left.span.start - right.span.start);
    this.next = 0;
    this.asking = false;
    this.list = h("ol", { class: "turns" });
    this.button = h("button", { type: "button", onclick: () => this.more() }, "Show more calls");
    element.replaceChildren(this.calls.length ? this.list : h("p", {}, "No call of it was recorded."), ...(this.calls.length ? [this.button] : []));
  }

  async begin() {
    if (this.next > 0 || !this.calls.length) return;
    await this.more();
    new IntersectionObserver((entries) => entries.some((entry) => entry.isIntersecting) && this.more()).observe(this.button);
  }

  async more() {
    if (this.asking || this.next >= this.calls.length) return;
    this.asking = true;
    const first = Math.max(0, this.next - KNOWN);
    const shown = this.calls.slice(this.next, this.next + TURNS);
    const query = new URLSearchParams({ known: this.next - first });
    for (const call of this.calls.slice(first, this.next + TURNS)) query.append("call", call.name);
    try {
      const turns = await ask(`/api/rollout/turns?${query}`);
      this.list.append(...turns.map((turn, at) => this.turn(turn, shown[at], this.next + at)));
      this.next += shown.length;
    } finally {
      this.asking = false;
    }
    this.button.hidden = this.next >= this.calls.length;
    this.button.textContent = `Show more calls (${this.calls.length - this.next} left)`;
  }

  turn(turn, { span, choice }, index) {
    const notes = [
      span.agent,
      turn.repeated ? `after ${counted(turn.repeated, "message")} of an earlier call` : "",
      turn.tools ? `${counted(turn.tools, "tool")} offered` : "",
    ];
    return h("li", { class: "turn" },
      h("p", { class: "line" }, h("a", { href: callAddress(this.rollout.rollout, span, choice) }, `Call ${index + 1}`),
        h("span", { class: "small" }, notes.filter(Boolean).join(" · ")),
        span.conclusions.filter((conclusion) => conclusion.choice === choice).flatMap(outcome)),
      turn.problem ? h("p", { class: "small" }, `Its messages are not shown: ${turn.problem}.`) : null,
      turn.messages.map((content) => message(content, "")), turn.reply ? message(turn.reply, "reply") : null);
  }
}

function message(content, kind) {
  return h("article", { class: `message ${kind}` },
    h("h3", {}, content.role, content.name ? ` ${content.name}` : ""),
    content.reasoning.text ? h("details", {}, h("summary", {}, "Reasoning"), h("div", { class: "text" }, cut(content.reasoning))) : null,
    content.text.text ? h("div", { class: "text" }, cut(content.text)) : null,
    content.toolCalls.map((call) => h("div", { class: "text tool-call" }, h("strong", {}, `${visible(call.name)} `), cut(call.arguments))));
}
