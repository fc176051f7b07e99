// Curves over steps by uPlot, in the colours of the theme; a table of the same numbers is beside every step.
import uPlot from "/static/vendor/uPlot-1.6.32.esm.js";
import { h, number, put } from "/static/dom.js";

const COLOURS = ["--model", "--curve-2", "--tool", "--curve-4"];
const HEIGHT = 170;
const synchronised = uPlot.sync("steps");
const drawn = []; // of each chart in the document the function that ends it

// The container of charts, without those that it had: uPlot's group and the window hold a plot until it is destroyed.
export function emptied() {
  for (const end of drawn.splice(0)) end();
  return put("charts");
}

function colour(name) {
  const probe = h("span", { style: { color: `var(${name})` } });
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

// Texts of ticks, each with the digits that tell it from the next; steps are 1, 2, 2.5 or 5 of a power of ten.
function tickTexts(plot, ticks, axis, space, step) {
  return ticks.map((tick) => number(tick, Math.max(3, Math.ceil(Math.log10(Math.abs(tick) / step)) + 2)));
}

// xs: versions; series: [{label, values}]; onPick(version) is called by a click.
export function chart(element, label, xs, series, onPick) {
  const figure = h("figure", { class: "chart" }, h("figcaption", {}, label));
  element.append(figure);
  const known = series.map(({ label: name, values }) => {
    const last = values.findLast((value) => value !== null && value !== undefined);
    return `${name} ${number(last ?? null)}`;
  });
  const box = h("div", { role: "img", "aria-label": `${label} over versions ${xs[0]} to ${xs.at(-1)}; last: ${known.join(", ")}` });
  figure.append(box);
  const grid = { stroke: colour("--line"), width: 1 };
  const axis = { stroke: colour("--quiet"), grid, ticks: grid, font: "11px system-ui" };
  const plot = new uPlot({
    width: Math.max(200, figure.clientWidth),
    height: HEIGHT,
    scales: { x: { time: false } },
    cursor: { sync: { key: synchronised.key }, drag: { x: true, y: false } },
    axes: [{ ...axis, size: 28 }, { ...axis, size: 56, values: tickTexts }],
    series: [{ label: "version", value: (_, value) => (value === null ? "–" : String(value)) }, ...series.map(({ label: name }, index) => ({
      label: name, stroke: colour(COLOURS[index % COLOURS.length]), width: 1.5, spanGaps: true, points: { show: xs.length < 3 },
      value: (_, value) => number(value) }))],
  }, [xs, ...series.map(({ values }) => values)], box);
  if (onPick) plot.over.addEventListener("click", () => plot.cursor.idx !== null && onPick(xs[plot.cursor.idx]));
  const resizes = new ResizeObserver(() => plot.setSize({ width: Math.max(200, figure.clientWidth), height: HEIGHT }));
  resizes.observe(figure);
  drawn.push(() => {
    resizes.disconnect();
    plot.destroy();
  });
  return plot;
}

// The values of metrics over steps; null where a step has none.
export function curves(steps, names) {
  return Object.entries(names)
    .map(([label, name]) => ({ label, values: steps.map((step) => (typeof name === "function" ? name(step.Metrics) : step.Metrics[name]) ?? null) }))
    .filter(({ values }) => values.some((value) => value !== null));
}

export const IDLE = {
  trainer: (metrics) => share(metrics.seconds_idle, metrics.seconds_step),
  engines: "engine_idle",
};

function share(part, rest) {
  return part === undefined || rest === undefined || part + rest === 0 ? null : part / (part + rest);
}
