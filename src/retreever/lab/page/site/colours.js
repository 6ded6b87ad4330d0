// One colour for every node read, the same in the tree, the table and the picture; safe for colour-blind eyes.
const PALETTE = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8a6d00", "#7a52a8"];

export const colourOf = (index) => PALETTE[index % PALETTE.length];

const SVG = "http://www.w3.org/2000/svg";

export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}
