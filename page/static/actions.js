// Actions: a button asks first, sends the request, and says what was done. The dialog is the browser's own: Enter confirms, Escape leaves.
import { address, h, visible } from "/static/dom.js";

const TOKEN = document.body.dataset.actionToken;
export const OPEN = ["queued", "running"]; // states of rollouts that have not ended
const AUTHOR = "spangrad-author";

// A button, or null where the page offers no actions.
// question: sentence; fields: [{name, label, type, value, required, pattern, step, title}]; request(values) -> the action; done(): afterwards.
export function actionButton(label, { question, fields = [], request, done = () => location.reload() }) {
  if (!TOKEN) return null;
  return h("button", { type: "button", class: "action", onclick: () => open(label, question, fields, request, done) }, label);
}

function open(label, question, fields, request, done) {
  const own = { name: "author", label: "Your name", value: localStorage.getItem(AUTHOR) ?? "", required: true, maxlength: 100 };
  const inputs = [...fields, own].map((field) => [field, h("input", {
    name: field.name, type: field.type ?? "text", value: field.value ?? "", required: field.required, pattern: field.pattern, step: field.step,
    maxlength: field.maxlength, title: field.title })]);
  const confirm = h("button", { type: "submit" }, label);
  const outcome = h("p", { role: "status" });
  const leave = h("button", { type: "button", onclick: () => dialog.close() }, "Leave it");
  const form = h("form", { class: "ask" }, h("h2", { id: "ask-title" }, label), h("p", {}, question),
    inputs.map(([field, input]) => h("label", {}, field.label, " ", input)), h("div", { class: "buttons" }, confirm, " ", leave), outcome);
  const dialog = h("dialog", { "aria-labelledby": "ask-title" }, form);
  let changed = false;
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const values = Object.fromEntries(new FormData(form));
    localStorage.setItem(AUTHOR, values.author);
    confirm.disabled = true;
    outcome.className = "";
    outcome.textContent = "Asking…";
    const { sentence, ok } = await post("/api/actions", { ...request(values), author: values.author });
    outcome.className = ok ? "good" : "failed";
    outcome.textContent = visible(sentence);
    changed ||= ok;
    confirm.disabled = ok;
    if (ok) {
      leave.textContent = "Close";
      leave.focus();
    }
  });
  dialog.addEventListener("close", () => {
    dialog.remove();
    if (changed) done();
  });
  document.body.append(dialog);
  dialog.showModal();
  (inputs.find(([, input]) => !input.value)?.[1] ?? confirm).focus();
}

// A link to play with a version of a policy, or with the one that it serves; null where the page offers no actions.
export function playLink(policy, version) {
  return TOKEN ? h("a", { href: address("/play", { policy, version }) }, "Play with it") : null;
}

// Cancel or Retry for a rollout as the queue has it; null where neither is possible.
export function queueButtons(rollout, done) {
  const request = (action) => () => ({ action, rollout_ids: [rollout.rollout_id] });
  if (OPEN.includes(rollout.state)) {
    return actionButton("Cancel", { done, question: `Cancel rollout ${rollout.rollout_id}, which is ${rollout.state}? Its group is then never whole.`, request: request("cancel") });
  }
  return rollout.state === "dead"
    ? actionButton("Retry", { done, question: `Queue rollout ${rollout.rollout_id} again, with as many attempts as a new one?`, request: request("retry") }) : null;
}

// Sends what changes something, with the token of this document.
export async function post(path, content) {
  try {
    const answer = await fetch(path, { method: "POST", body: JSON.stringify(content),
      headers: { "Content-Type": "application/json", "X-Spangrad-Action": TOKEN } });
    const text = await answer.text();
    if (answer.status === 401) return { ok: false, sentence: text.trim() }; // the login has expired: plain text
    const value = JSON.parse(text);
    return { ok: answer.ok, sentence: value.done ?? value.error };
  } catch {
    return { ok: false, sentence: "The page's server gave no answer: look at Actions before you ask again." };
  }
}
