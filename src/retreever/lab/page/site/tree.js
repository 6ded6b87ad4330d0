// Draws the part of the tree that a search touched: nodes it explored, and below them the nodes it read.
import { inkOn, svg } from "./colours.js";

const GAP = 44; // between nodes read, in pixels
const LEVEL = 58;
const MARGIN = 26;

// Where every node lies: nodes read side by side, explored ones above the middle of their children.
function layout(search) {
  const place = new Map();
  search.reads.forEach((read, i) => place.set(read.node, MARGIN + i * GAP));
  const levels = new Map();
  for (const step of search.steps) {
    const own = levels.get(step.node) ?? 0;
    levels.set(step.node, own);
    for (const child of step.children) levels.set(child, own + 1);
  }
  for (const step of [...search.steps].reverse()) {
    const below = step.children.map((child) => place.get(child));
    place.set(step.node, below.reduce((a, b) => a + b) / below.length);
  }
  return { place, levels };
}

export function drawTree(target, search, step, lit) {
  const { place, levels } = layout(search);
  const deepest = Math.max(0, ...levels.values());
  const width = Math.max(320, 2 * MARGIN + GAP * (search.reads.length - 1));
  const height = 2 * MARGIN + LEVEL * deepest + 20;
  const shift = (width - (2 * MARGIN + GAP * (search.reads.length - 1))) / 2;
  target.setAttribute("viewBox", `0 0 ${width} ${height}`);
  target.replaceChildren();
  const at = (node) => ({ x: place.get(node) + shift, y: MARGIN + LEVEL * (levels.get(node) ?? 0) });
  const seen = new Set([search.steps[0].node]);
  search.steps.forEach((one, i) => i < step && one.children.forEach((child) => seen.add(child)));
  search.steps.forEach((one, i) => {
    for (const child of one.children) target.append(...arrow(search, one, child, at, i < step));
  });
  const current = search.steps[step]?.node;
  search.steps.forEach((one) => target.append(inner(one.node, at(one.node), seen.has(one.node), one.node === current)));
  for (const read of search.reads) target.append(leaf(read, at(read.node), seen.has(read.node), lit === read.node));
}

function arrow(search, step, child, at, done) {
  const from = at(step.node);
  const to = at(child);
  const taken = step.taken.includes(child);
  const colour = done ? (taken ? "#4a4f55" : "#12a074") : "#d4d4d4";
  const thick = done && taken ? 3 : 1.5;
  const line = svg("line", { x1: from.x, y1: from.y, x2: to.x, y2: to.y, stroke: colour, "stroke-width": thick });
  if (!done || step.leaves) return [line];
  const middle = [0.45 * from.x + 0.55 * to.x, 0.45 * from.y + 0.55 * to.y];
  return [line, haloed(label(search.chance(child).toFixed(2), ...middle, "#333"), "#fff")];
}

function inner(node, { x, y }, seen, current) {
  const fill = current ? "#f6d55c" : seen ? "#a9aeb4" : "#fff";
  const group = svg("g", {}, svg("circle", { cx: x, cy: y, r: 11, fill, stroke: seen ? "#333" : "#d4d4d4" }));
  group.append(label(node, x, y + 3.5, seen ? "#333" : "#aaa"));
  return group;
}

function leaf(read, { x, y }, seen, lit) {
  const r = 9 + 9 * Math.sqrt(read.weight);
  const fill = seen ? read.colour : "#fff";
  const stroke = lit ? "#000" : seen ? "#333" : "#d4d4d4";
  const shape = read.points.length > 1
    ? svg("path", { d: `M${x} ${y - r}L${x + r} ${y + r * 0.8}L${x - r} ${y + r * 0.8}Z`, fill, stroke })
    : svg("circle", { cx: x, cy: y, r, fill, stroke });
  shape.setAttribute("stroke-width", lit ? 3 : 1);
  const number = haloed(label(read.node, x, y + 4, seen ? inkOn(read.colour) : "#aaa"), fill);
  const group = svg("g", { "data-node": read.node }, shape, number);
  const below = label(seen ? `${(100 * read.weight).toFixed(0)}%` : "", x, y + r + 13, "#333");
  group.append(below);
  return group;
}

// Letters with an edge, readable where they leave their shape or cross a line.
function haloed(text, colour) {
  for (const [name, value] of [["stroke", colour], ["stroke-width", 3], ["paint-order", "stroke"]]) {
    text.setAttribute(name, value);
  }
  return text;
}

function label(words, x, y, fill) {
  const text = svg("text", { x, y, fill, "font-size": 10, "text-anchor": "middle" });
  text.textContent = words;
  return text;
}
