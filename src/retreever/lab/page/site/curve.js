// The curve: context points of a function, the prediction with its spread, and the query as a vertical line.
import { svg } from "./colours.js";

const [WIDTH, HEIGHT, PAD] = [560, 400, 28];
const [LEFT, RIGHT, LOW, HIGH] = [-2, 2, -2.5, 2.5];
const GRID = Array.from({ length: 101 }, (_, i) => [LEFT + ((RIGHT - LEFT) * i) / 100]);
const EXAMPLE = [[-1.8, -0.9], [-1.3, -1.1], [-1.05, -0.8], [-0.6, 0.1], [-0.35, 0.5], [0.2, 0.95], [0.45, 0.8],
  [0.7, 0.6], [0.85, 0.35], [1.2, -0.1], [1.4, -0.35], [1.75, -0.3]];

const toX = (x) => PAD + ((x - LEFT) / (RIGHT - LEFT)) * (WIDTH - 2 * PAD);
const toY = (y) => HEIGHT - PAD - ((y - LOW) / (HIGH - LOW)) * (HEIGHT - 2 * PAD);
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

export class Curve {
  tools = { add: "Add points", remove: "Remove points", query: "Move the query" };
  hint = "Click or tap to add points. With the keyboard: focus the plot, arrows move the cursor, Enter uses the tool, " +
    "and q puts the query there.";
  places = GRID;
  query = [0.1];

  constructor(stage, act) {
    this.cursor = { x: 0.1, y: 0 };
    this.shown = []; // places of the points in the plot, each with the node through which it is read
    this.plot = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, tabindex: 0, role: "application", id: "plot",
      "aria-label": "Curve: context points and prediction" });
    stage.replaceChildren(this.plot);
    const use = (event, start) => {
      const at = this.locate(event);
      if (start || act.tool() === "query") act.use(at, start);
    };
    this.plot.addEventListener("pointerdown", (event) => {
      this.plot.setPointerCapture(event.pointerId);
      use(event, true);
    });
    this.plot.addEventListener("pointermove", (event) => event.buttons && use(event, false));
    this.plot.addEventListener("keydown", (event) => this.key(event, act));
  }

  locate(event) {
    const box = this.plot.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH;
    const y = ((event.clientY - box.top) / box.height) * HEIGHT;
    const data = [LEFT + ((x - PAD) / (WIDTH - 2 * PAD)) * (RIGHT - LEFT), HIGH - ((y - PAD) / (HEIGHT - 2 * PAD)) * (HIGH - LOW)];
    return { x: [clamp(data[0], LEFT, RIGHT)], y: clamp(data[1], LOW, HIGH) };
  }

  key(event, act) {
    const moves = { ArrowLeft: [-0.05, 0], ArrowRight: [0.05, 0], ArrowUp: [0, 0.1], ArrowDown: [0, -0.1] };
    if (event.key in moves) {
      const [dx, dy] = moves[event.key];
      this.cursor = { x: clamp(this.cursor.x + dx, LEFT, RIGHT), y: clamp(this.cursor.y + dy, LOW, HIGH) };
      if (act.tool() === "query") act.use({ x: [this.cursor.x], y: this.cursor.y }, true);
      else act.redraw();
      const [x, y] = [toX(this.cursor.x), toY(this.cursor.y)];
      const near = this.shown.find((point) => Math.hypot(point.x - x, point.y - y) < 10);
      if (near) act.light(near.node);
    } else if (event.key === "Enter" || event.key === " ") act.use({ x: [this.cursor.x], y: this.cursor.y }, true);
    else if (event.key === "q") act.ask([this.cursor.x]);
    else return;
    event.preventDefault();
  }

  // The points after using a tool at a place.
  apply(tool, points, at) {
    if (tool === "add") return [...points, at];
    const far = (point) => Math.hypot(toX(point.x[0]) - toX(at.x[0]), toY(point.y) - toY(at.y));
    const nearest = points.reduce((best, point) => (best === null || far(point) < far(best) ? point : best), null);
    return nearest !== null && far(nearest) < 40 ? points.filter((point) => point !== nearest) : points;
  }

  example() {
    return EXAMPLE.map(([x, y]) => ({ x: [x], y }));
  }

  describe(mean, std) {
    return `At x = ${this.query[0].toFixed(2)}: ${mean.toFixed(3)} ± ${std.toFixed(3)}`;
  }

  draw(points, grid, coverOf, lit) {
    const mid = grid.mean.map((mean, i) => [toX(GRID[i][0]), toY(mean)]);
    const edge = (sign, scale) => grid.mean.map((mean, i) => [toX(GRID[i][0]), toY(mean + sign * scale * grid.std[i])]);
    const line = (places) => places.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ");
    const band = (scale, opacity) =>
      svg("polygon", { points: line([...edge(1, scale), ...edge(-1, scale).reverse()]), fill: "#1f4e9c", opacity });
    const clip = svg("clipPath", { id: "inside" }, svg("rect", { x: PAD, y: 0, width: WIDTH - 2 * PAD, height: HEIGHT }));
    const curves = svg("g", { "clip-path": "url(#inside)" }, band(2, 0.12), band(1, 0.18));
    if (mid.length) curves.append(svg("polyline", { points: line(mid), fill: "none", stroke: "#1f4e9c", "stroke-width": 2 }));
    this.plot.replaceChildren(clip, axes(), curves, vertical(this.query[0]));
    this.shown = [];
    points.forEach((point, i) => {
      const read = coverOf(i);
      if (read) this.shown.push({ x: toX(point.x[0]), y: toY(point.y), node: read.node });
      const look = { cx: toX(point.x[0]), cy: toY(point.y), r: read && read.node === lit ? 9 : 6, stroke: "#333" };
      const own = read ? { fill: read.colour, "data-node": read.node } : { fill: "#fff" };
      this.plot.append(svg("circle", { ...look, ...own }));
      if (read && read.node === lit) this.plot.append(number(read.node, look.cx, look.cy - 13));
    });
    const [x, y] = [toX(this.cursor.x), toY(this.cursor.y)];
    this.plot.append(svg("path", { d: `M${x - 6} ${y}H${x + 6}M${x} ${y - 6}V${y + 6}`, stroke: "#999", class: "cursor" }));
  }
}

function axes() {
  const group = svg("g", { "font-size": 11, fill: "#595959", stroke: "none" });
  for (let x = LEFT; x <= RIGHT; x += 1) {
    const text = svg("text", { x: toX(x), y: HEIGHT - 8, "text-anchor": "middle" });
    text.textContent = x;
    group.append(svg("line", { x1: toX(x), x2: toX(x), y1: PAD, y2: HEIGHT - PAD, stroke: "#ebebeb" }), text);
  }
  for (let y = -2; y <= 2; y += 1) {
    const text = svg("text", { x: 4, y: toY(y) + 4 });
    text.textContent = y;
    group.append(svg("line", { x1: PAD, x2: WIDTH - PAD, y1: toY(y), y2: toY(y), stroke: "#ebebeb" }), text);
  }
  return group;
}

function number(node, x, y) {
  const text = svg("text", { x, y, "font-size": 12, "text-anchor": "middle", stroke: "#fff", "stroke-width": 3,
    "paint-order": "stroke", fill: "#333", "pointer-events": "none" });
  text.textContent = node;
  return text;
}

function vertical(x) {
  const look = { stroke: "#d1495b", "stroke-width": 2, "stroke-dasharray": "6 4" };
  return svg("line", { x1: toX(x), x2: toX(x), y1: PAD / 2, y2: HEIGHT - PAD, ...look });
}
