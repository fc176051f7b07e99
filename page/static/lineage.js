// Versions around one as a picture: a row for each branch, a column for each number, a line from each parent to its children.
import { address, h, svg, visible } from "/static/dom.js";

const COLUMN = 62;
const ROW = 46;
const LEFT = 90; // pixels for the names of branches
const RADIUS = 15;

export function lineagePicture(version) {
  const branches = [...new Set([version.Branch, ...version.near.map((row) => row.Branch)])];
  const first = Math.min(...version.near.map((row) => row.Version));
  const last = Math.max(...version.near.map((row) => row.Version));
  const x = (number) => LEFT + (number - first) * COLUMN + RADIUS + 4;
  const y = (branch) => branches.indexOf(branch) * ROW + RADIUS + 4;
  const known = new Set(version.near.map((row) => `${row.Branch} ${row.Version}`));
  const lines = version.near.filter((row) => row.Parent !== null && known.has(`${row.ParentBranch} ${row.Parent}`)).map((row) =>
    svg("path", { class: "edge", d: curve(x(row.Parent), y(row.ParentBranch), x(row.Version), y(row.Branch)) }));
  const nodes = version.near.map((row) => {
    const own = row.Branch === version.Branch && row.Version === version.Version;
    const name = `${version.Policy}@${row.Version} on ${row.Branch}${row.Status === "committed" ? "" : `, ${row.Status}`}`;
    return svg("a", { href: address("/version", { policy: version.Policy, branch: row.Branch, version: row.Version }), "aria-label": name },
      svg("title", {}, name),
      svg("circle", { class: `node ${own ? "own" : row.Status}`, cx: x(row.Version), cy: y(row.Branch), r: RADIUS }),
      svg("text", { class: own ? "own" : null, x: x(row.Version), y: y(row.Branch) + 4, "text-anchor": "middle" }, String(row.Version)));
  });
  const names = branches.map((branch) => svg("text", { x: 0, y: y(branch) + 4 }, visible(branch).slice(0, 12)));
  const width = x(last) + RADIUS + 4;
  const height = branches.length * ROW;
  return h("div", { class: "scroll lineage-picture", tabindex: 0, role: "region", "aria-label": "Versions around this one" },
    svg("svg", { width, height, viewBox: `0 0 ${width} ${height}` }, lines, names, nodes));
}

function curve(fromX, fromY, toX, toY) {
  const middle = (fromX + toX) / 2;
  return `M ${fromX} ${fromY} C ${middle} ${fromY}, ${middle} ${toY}, ${toX} ${toY}`;
}
