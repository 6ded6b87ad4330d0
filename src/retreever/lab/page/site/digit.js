// The digit: pixels given as context, the completed picture, its spread, and the query as one pixel.
import { strokes } from "./strokes.js";

const SIDE = 28;
const SCALE = 16; // canvas pixels for one of the picture
const place = (row, column) => [(2 * row) / (SIDE - 1) - 1, (2 * column) / (SIDE - 1) - 1];
const PLACES = Array.from({ length: SIDE * SIDE }, (_, i) => place(Math.floor(i / SIDE), i % SIDE));
const clamp = (value) => Math.min(SIDE - 1, Math.max(0, value));
const grey = (value) => Math.round(255 * Math.min(1, Math.max(0, value)));

export class Digit {
  tools = { ink: "Ink", paper: "Paper", erase: "Erase", query: "Move the query" };
  hint = "Draw with ink (white) and paper (black); every pixel you set is a context point. With the keyboard: focus the " +
    "picture, arrows move the cursor, Enter uses the tool, and q puts the query there.";
  places = PLACES;
  query = place(9, 17);

  constructor(stage, act) {
    this.cursor = { row: 9, column: 17 };
    this.examples = 0;
    this.nodes = new Map(); // of the pixels given: the node through which each is read
    const figures = [["plot", "Mean, with the pixels given"], ["spread", "Standard deviation: white is unsure"]];
    stage.replaceChildren(Object.assign(document.createElement("div"), { className: "digits" }));
    this.canvas = {};
    for (const [id, caption] of figures) {
      const figure = document.createElement("figure");
      const canvas = Object.assign(document.createElement("canvas"), { id, width: SIDE * SCALE, height: SIDE * SCALE });
      figure.append(canvas, Object.assign(document.createElement("figcaption"), { textContent: caption }));
      stage.firstChild.append(figure);
      this.canvas[id] = canvas;
    }
    this.listen(this.canvas.plot, act);
  }

  listen(canvas, act) {
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "application");
    canvas.setAttribute("aria-label", "Picture of 28 by 28 pixels to draw on");
    const use = (event) => act.use(this.locate(event), true);
    const light = (at) => {
      const node = this.nodes.get(at.row * SIDE + at.column);
      if (node !== undefined) act.light(node);
    };
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      use(event);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (event.buttons) use(event);
      else light(this.pixel(event));
    });
    canvas.addEventListener("keydown", (event) => {
      this.key(event, act);
      light(this.cursor);
    });
  }

  pixel(event) {
    const box = this.canvas.plot.getBoundingClientRect();
    const index = (offset, length) => clamp(Math.floor((offset / length) * SIDE));
    return { row: index(event.clientY - box.top, box.height), column: index(event.clientX - box.left, box.width) };
  }

  locate(event) {
    this.cursor = this.pixel(event);
    return { x: place(this.cursor.row, this.cursor.column) };
  }

  key(event, act) {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (event.key in moves) {
      const [down, right] = moves[event.key];
      this.cursor = { row: clamp(this.cursor.row + down), column: clamp(this.cursor.column + right) };
    }
    const at = { x: place(this.cursor.row, this.cursor.column) };
    if (event.key === "Enter" || event.key === " " || (event.key in moves && act.tool() === "query")) act.use(at, true);
    else if (event.key === "q") act.ask(at.x);
    else if (event.key in moves) act.redraw();
    else return;
    event.preventDefault();
  }

  apply(tool, points, at) {
    const others = points.filter((point) => point.x[0] !== at.x[0] || point.x[1] !== at.x[1]);
    return tool === "erase" ? others : [...others, { x: at.x, y: tool === "ink" ? 0.5 : -0.5 }];
  }

  // A digit drawn by strokes, of which some pixels are given, the same ones every time.
  example() {
    const picture = strokes([3, 7, 2, 0, 5][this.examples % 5]);
    this.examples += 1;
    let state = 12345 + this.examples;
    const random = () => (state = (1103515245 * state + 12345) % 2147483648) / 2147483648;
    const order = PLACES.map((x, i) => [random(), i]).sort((a, b) => a[0] - b[0]);
    return order.slice(0, 90).map(([, i]) => ({ x: PLACES[i], y: picture[i] - 0.5 }));
  }

  describe(mean, std) {
    const [row, column] = this.query.map((x) => Math.round(((x + 1) * (SIDE - 1)) / 2));
    return `Pixel in row ${row}, column ${column}: ${(mean + 0.5).toFixed(3)} ± ${std.toFixed(3)} (0 black, 1 white)`;
  }

  draw(points, grid, coverOf, lit) {
    paint(this.canvas.plot, grid.mean.map((mean) => grey(mean + 0.5)));
    paint(this.canvas.spread, grid.std.map((std) => grey(2 * (std - 0.05))));
    const context = this.canvas.plot.getContext("2d");
    this.nodes.clear();
    points.forEach((point, i) => {
      const read = coverOf(i);
      const [row, column] = point.x.map((x) => Math.round(((x + 1) * (SIDE - 1)) / 2));
      context.fillStyle = `rgb(${Array(3).fill(grey(point.y + 0.5)).join()})`;
      context.fillRect(column * SCALE, row * SCALE, SCALE, SCALE);
      if (read) this.nodes.set(row * SIDE + column, read.node);
      context.strokeStyle = read ? read.colour : "#888";
      context.lineWidth = read && read.node === lit ? 6 : 3;
      context.strokeRect(column * SCALE + 2, row * SCALE + 2, SCALE - 4, SCALE - 4);
    });
    const [row, column] = this.query.map((x) => Math.round(((x + 1) * (SIDE - 1)) / 2));
    for (const canvas of Object.values(this.canvas)) box(canvas, row, column, "#ff2d55", 3);
    if (document.activeElement === this.canvas.plot) box(this.canvas.plot, this.cursor.row, this.cursor.column, "#1f4e9c", 2);
  }
}

function paint(canvas, values) {
  const context = canvas.getContext("2d");
  context.fillStyle = "#000";
  context.fillRect(0, 0, canvas.width, canvas.height);
  values.forEach((value, i) => {
    context.fillStyle = `rgb(${value},${value},${value})`;
    context.fillRect((i % SIDE) * SCALE, Math.floor(i / SIDE) * SCALE, SCALE, SCALE);
  });
}

function box(canvas, row, column, colour, width) {
  const context = canvas.getContext("2d");
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.strokeRect(column * SCALE - 1, row * SCALE - 1, SCALE + 2, SCALE + 2);
}
