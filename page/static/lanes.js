// Lanes over time: steps and their stages above calls of each backend and rollouts under way.
import { address, counted, duration, h, number } from "/static/dom.js";

const COLOURS = 8;

export function lanesPicture(found, place) {
  const total = found.seconds * 1000;
  const stages = [...new Set(found.stages.map((bar) => bar.stage))];
  const at = (bar) => ({ left: `${(100 * bar.start) / total}%`, width: `max(1px, ${(100 * bar.duration) / total}%)` });
  const share = (stage) => found.stages.filter((bar) => bar.stage === stage).reduce((sum, bar) => sum + bar.duration, 0) / total;
  const lane = (name, kind, children, described) => [h("span", { class: "small" }, name),
    h("div", { class: `lane ${kind}`, role: "img", "aria-label": described }, children)];
  const busiest = Math.max(...found.backends.flatMap(({ calls }) => calls), 1e-9);
  // A node is in one place: each lane has bands of its own.
  const publications = () => found.stages.filter((bar) => bar.stage === "publish").map((bar) => h("div", { class: "publication", style: at(bar),
    title: `publication of version ${bar.version}: ${duration(bar.duration)}` }));
  const described = stages.map((stage) => `${stage} ${Math.round(100 * share(stage))} %`).join(", ");
  return [
    h("p", { class: "legend small" }, `${duration(total)} of ${counted(found.steps.length, "step")}.`,
      stages.map((stage, index) => [h("span", { class: `stage stage-${index % COLOURS}` }), `${stage} ${Math.round(100 * share(stage))} %`])),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Lanes, scrollable" }, h("div", { class: "lanes" },
      h("span", { class: "small" }, "Steps"),
      h("div", { class: "lane" }, found.steps.map((bar) => h("a", { class: "step", style: at(bar), href: address("/version", { ...place, version: bar.version }),
        title: `version ${bar.version}, ${duration(bar.duration)}` }, `v${bar.version}`))),
      lane("Trainer", "", found.stages.map((bar) => h("div", { class: `stage stage-${stages.indexOf(bar.stage) % COLOURS}`, style: at(bar),
        title: `${bar.stage} of version ${bar.version}: ${duration(bar.duration)}` })), `Stages of the trainer: ${described}`),
      found.backends.map(({ backend, calls }) => counts(backend ? `Calls of ${backend}` : "Engine calls", calls, lane, busiest, publications())),
      counts("Rollouts", found.rollouts, lane)))];
}

// Bars of counts; lanes that are compared have one scale.
function counts(name, values, lane, most = Math.max(...values, 1e-9), bands = []) {
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  const largest = Math.max(...values);
  const bars = values.map((value) => h("div", { class: "bar", style: { height: `${(100 * value) / most}%` } }));
  return lane(`${name}, at most ${number(largest)}`, "counts", [...bars, ...bands],
    `${name} under way: ${number(mean)} on average, ${number(largest)} at most`);
}
