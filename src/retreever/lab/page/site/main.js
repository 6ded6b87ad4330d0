// The page: one model and its view at a time; every change runs the model again and draws what came out.
import { paint } from "./colours.js";
import { Curve } from "./curve.js";
import { Digit } from "./digit.js";
import { Model } from "./model.js";
import { explain } from "./search.js";
import { drawTree } from "./tree.js";

const VIEWS = { gp: Curve, emnist: Digit };
const $ = (id) => document.getElementById(id);
const EMPTY = { mean: [], std: [] };

const models = {}; // promises of loaded models, by name
const states = {}; // points, query and budget of every view
let state = null;
let wanted = { context: false, query: false }; // what has changed since the last run
let running = false;

function load(name) {
  models[name] ??= Model.load(`models/${name}`);
  return models[name];
}

const act = {
  tool: () => document.querySelector("#tools input:checked").value,
  use(at, fresh) {
    if (act.tool() === "query") return act.ask(at.x);
    if (!fresh) return;
    const after = state.view.apply(act.tool(), state.points, at);
    if (after.length <= state.model.about.n) change(after);
  },
  ask(x) {
    state.view.query = x;
    state.step = Infinity;
    refresh({ query: true });
  },
  redraw: () => draw(),
  light: (node) => light(node),
};

function change(points) {
  state.history.push(state.points);
  state.points = points;
  state.step = Infinity;
  refresh({ context: true, query: true });
}

async function show(name) {
  const stage = $("stage");
  const model = await load(name);
  if (document.querySelector("[name=view]:checked").value !== name) return; // another was chosen meanwhile
  const view = new VIEWS[name](stage, act);
  const before = states[name];
  state = before ?? { points: view.example(), history: [], budget: 1, step: Infinity, lit: null };
  view.query = before?.view.query ?? view.query;
  states[name] = Object.assign(state, { name, model, view });
  $("tools").replaceChildren(...Object.entries(view.tools).map(([value, words], i) => radio(value, words, i === 0)));
  $("hint").textContent = view.hint;
  Object.assign($("budget"), { min: 1, max: model.about.budget, value: state.budget });
  refresh({ context: true, query: true });
}

function radio(value, words, checked) {
  const label = document.createElement("label");
  label.append(Object.assign(document.createElement("input"), { type: "radio", name: "tool", value, checked }), words);
  return label;
}

// Run the model for what has changed; changes made meanwhile are run together afterwards.
async function refresh(changed) {
  wanted = { context: wanted.context || changed.context, query: wanted.query || changed.query };
  if (running) return;
  running = true;
  document.documentElement.dataset.busy = "yes";
  while (wanted.context || wanted.query) {
    const now = wanted;
    wanted = { context: false, query: false };
    await run(state, now.context);
    draw();
  }
  running = false;
  document.documentElement.dataset.busy = "no";
  if (!document.documentElement.dataset.first) document.documentElement.dataset.first = performance.now().toFixed(0);
}

async function run(own, contextChanged) {
  const { model, view, points } = own;
  if (points.length === 0) {
    Object.assign(own, { tree: null, search: null, grid: EMPTY, answer: null });
    return;
  }
  if (contextChanged || !own.tree) own.tree = await model.encode(points);
  if (contextChanged || own.gridBudget !== own.budget) {
    own.gridBudget = own.budget;
    own.grid = await model.query(own.tree, view.places, own.budget, ["mean", "std"]);
  }
  const outputs = ["mean", "std", "selected", "weights", "policy"];
  const answer = await model.query(own.tree, [view.query], own.budget, outputs);
  const search = explain(model.plan, own.tree, answer);
  const colours = paint(search.reads, contextChanged ? undefined : own.colours); // other points: other nodes
  Object.assign(own, { answer, search, colours });
}

function draw() {
  const { view, points, grid, search, answer, model } = state;
  const cover = [];
  search?.reads.forEach((read) => read.points.forEach((point) => (cover[point] = read)));
  view.draw(points, grid ?? EMPTY, (i) => cover[i], state.lit);
  $("count").textContent = `${points.length} of at most ${model.about.n} points`;
  $("tokens").textContent = state.budget === 1 ? "one path" : `one path, or up to ${state.budget} nodes`;
  const output = $("prediction");
  if (!search) {
    output.textContent = "Add a point to get a prediction.";
    output.removeAttribute("data-mean");
    $("tree").replaceChildren();
    $("step").textContent = $("story").textContent = "";
    $("read").tBodies[0].replaceChildren();
    return;
  }
  const [mean, std] = [answer.mean[0], answer.std[0]];
  output.textContent = `${view.describe(mean, std)}; ${search.reads.length} nodes read for ${points.length} points`;
  Object.assign(output.dataset, { mean, std, query: JSON.stringify(view.query), budget: state.budget });
  Object.assign(output.dataset, { points: JSON.stringify(points), read: JSON.stringify(search.reads) });
  drawSteps();
}

function drawSteps() {
  const { search } = state;
  const last = search.steps.length;
  const step = Math.min(state.step, last);
  drawTree($("tree"), search, step, state.lit);
  $("step").textContent = `step ${step} of ${last}`;
  $("story").textContent = step < last ? sentence(search, search.steps[step]) : summary(search);
  $("read").tBodies[0].replaceChildren(...search.reads.map(row));
}

const few = (points) => (points.length === 1 ? "1 point" : `${points.length} points`);

function sentence(search, step) {
  if (step.leaves) return `Next: node ${step.node} ends here; its ${few(step.read)} are read one by one.`;
  const parts = step.children.map((child) => {
    const does = step.taken.includes(child) ? "is taken" : "is read as a summary";
    return `node ${child} (probability ${search.chance(child).toFixed(2)}) ${does}`;
  });
  return `Next: node ${step.node} is explored: ${parts.join(", ")}.`;
}

function summary(search) {
  const most = search.reads.reduce((a, b) => (b.weight > a.weight ? b : a));
  return `Done: ${search.reads.length} nodes are read and cover every point once. Most attention goes to node ` +
    `${most.node} (${(100 * most.weight).toFixed(0)}%), ${few(most.points)}.`;
}

function row(read) {
  const line = document.createElement("tr");
  const [swatch, bar] = [1, 8 * read.weight].map((size) => {
    const box = Object.assign(document.createElement("span"), { className: "bar" });
    Object.assign(box.style, { background: read.colour, width: `${size.toFixed(2)}rem` });
    return box;
  });
  const cells = [String(read.node), few(read.points), `${(100 * read.weight).toFixed(1)}%`];
  line.append(...cells.map((words) => Object.assign(document.createElement("td"), { textContent: words })));
  line.firstChild.prepend(swatch);
  line.lastChild.prepend(bar);
  line.className = state.lit === read.node ? "lit" : "";
  line.addEventListener("pointerenter", () => light(read.node));
  line.addEventListener("click", () => light(read.node));
  return line;
}

// Shows what belongs to a node: its row, its place in the tree and its points.
function light(node) {
  if (state.lit === node) return;
  state.lit = node;
  draw();
}

function goTo(step) {
  if (!state?.search) return;
  state.step = Math.min(state.search.steps.length, Math.max(0, step));
  drawSteps();
}

for (const id of ["stage", "tree"]) {
  $(id).addEventListener("pointerover", (event) => {
    const part = event.target.closest("[data-node]");
    if (part) light(Number(part.dataset.node));
  });
}
for (const input of document.querySelectorAll("[name=view]")) input.addEventListener("change", () => show(input.value));
$("budget").addEventListener("input", () => {
  state.budget = Number($("budget").value);
  state.step = Infinity;
  refresh({ query: true });
});
$("example").addEventListener("click", () => change(state.view.example()));
$("clear").addEventListener("click", () => change([]));
$("undo").addEventListener("click", () => {
  if (!state.history.length) return;
  state.points = state.history.pop();
  refresh({ context: true, query: true });
});
const current = () => Math.min(state?.step ?? 0, state?.search?.steps.length ?? 0);
$("first").addEventListener("click", () => goTo(0));
$("back").addEventListener("click", () => goTo(current() - 1));
$("next").addEventListener("click", () => goTo(current() + 1));
$("last").addEventListener("click", () => goTo(Infinity));
show(document.querySelector("[name=view]:checked").value);
