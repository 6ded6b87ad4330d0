// Every node read has a colour of its own, the same in the tree, the table and the picture.
// The first six are those of Okabe and Ito; each later one is the farthest from all before it, as seen by normal,
// red-blind and green-blind eyes, and stands out on white and on black. A few nodes thus differ plainly. Of 64 some are
// close: pointing at one lights up everything that belongs to it.
export const COLOURS = [
  "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#880070", "#b800f8", "#0800b8", "#605800",
  "#68e088", "#701000", "#6810d8", "#d00898", "#9878f8", "#805878", "#104878", "#e8b8f8", "#b80040", "#500090",
  "#90b068", "#d0d000", "#f800d8", "#f880e8", "#582850", "#004018", "#e0a090", "#3848b8", "#6888c8", "#787850",
  "#70d0c8", "#00c828", "#006050", "#0000f8", "#009000", "#a848b8", "#703898", "#b08060", "#30a0b0", "#f85090",
  "#f0c070", "#00c898", "#784838", "#b89000", "#b098d0", "#7068c8", "#9030e0", "#308070", "#b05870", "#a83000",
  "#505888", "#d850f0", "#903858", "#9870b0", "#404828", "#4008c8", "#b8d0b0", "#c85098", "#780040", "#f890b0",
  "#1880e0", "#e80838", "#985828", "#30e838",
];

// Gives every node read its `colour`. Nodes that were read before keep theirs: `before` is the answer of the last call.
export function paint(reads, before = new Map()) {
  const kept = reads.filter(({ node }) => before.has(node)).map(({ node }) => [node, before.get(node)]);
  const colours = new Map(kept);
  const used = new Set(colours.values());
  const free = COLOURS.filter((colour) => !used.has(colour));
  for (const read of reads) {
    if (!colours.has(read.node)) colours.set(read.node, free.shift());
    read.colour = colours.get(read.node);
  }
  return colours;
}

// White or dark letters, whichever reads better on a colour.
export function inkOn(colour) {
  const [red, green, blue] = [1, 3, 5].map((i) => (parseInt(colour.slice(i, i + 2), 16) / 255) ** 2.2);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.3 ? "#222" : "#fff";
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}
