// A person's reward for a rollout or a call: an evaluation in the store, which the next build has.
import { actionButton } from "/static/actions.js";

export function labelButton(label, { rollout, trace, span }) {
  return actionButton(label, {
    question: "Give it a reward? It is stored with your name, and counts once the builder has made a new revision with it.",
    fields: [
      { name: "name", label: "Name of the reward", value: "label", required: true },
      { name: "value", label: "Value", type: "number", step: "any", required: true },
      { name: "comment", label: "Why", maxlength: 2000 },
    ],
    request: (values) => ({ action: "label", rollout, trace, span, name: values.name, value: Number(values.value), comment: values.comment }),
  });
}
