// What a search did, from the rows it read: the steps, and the points that every node read covers.
// Nodes are numbered from the root, 0; row r of the tree tensors is node r + 1.

export function levelOf(plan, node) {
  let level = plan.depth + 1;
  while (node <= plan.offsets[level]) level -= 1;
  return level;
}

export function childrenOf(plan, node) {
  const level = levelOf(plan, node);
  if (level > plan.depth) return [];
  const width = level < plan.depth ? plan.branch : plan.block;
  const first = plan.offsets[level + 1] + 1 + (node - 1 - plan.offsets[level]) * width;
  return Array.from({ length: width }, (_, i) => first + i);
}

export function parentOf(plan, node) {
  const level = levelOf(plan, node);
  const width = level <= plan.depth ? plan.branch : plan.block;
  return plan.offsets[level - 1] + 1 + Math.floor((node - 1 - plan.offsets[level]) / width);
}

// The first leaf slot under a node, and the first behind them.
export function slotsOf(plan, node) {
  const level = levelOf(plan, node);
  const width = level <= plan.depth ? plan.block * plan.branch ** (plan.depth - level) : 1;
  const index = node - 1 - plan.offsets[level];
  return [index * width, (index + 1) * width];
}

// Steps in the order of their nodes, and nodes read from left to right with weight and points.
export function explain(plan, tree, found) {
  const isReal = (node) => node === 0 || tree.real[node - 1] === 1;
  const weightOf = new Map();
  found.selected.forEach((row, i) => row >= 0 && weightOf.set(row + 1, found.weights[i]));
  const above = new Set();
  for (const read of weightOf.keys()) {
    for (let node = read; node !== 0; ) {
      node = parentOf(plan, node);
      if (above.has(node)) break;
      above.add(node);
    }
  }
  const steps = [];
  for (const node of [...above].sort((a, b) => a - b)) {
    const children = childrenOf(plan, node).filter(isReal);
    const taken = children.filter((child) => above.has(child));
    if (children.length === 1 && taken.length === 1) continue; // a single child: no decision
    const read = children.filter((child) => weightOf.has(child));
    steps.push({ node, children, taken, read, leaves: levelOf(plan, node) === plan.depth });
  }
  const rank = [0]; // real points before every leaf slot
  for (let slot = 0; slot < plan.leaves; slot += 1) {
    rank.push(rank[slot] + tree.real[plan.leaf_offset + slot]);
  }
  const reads = [...weightOf].map(([node, weight]) => {
    const [start, stop] = slotsOf(plan, node);
    return { node, weight, start, points: tree.order.slice(rank[start], rank[stop]) };
  });
  reads.sort((a, b) => a.start - b.start);
  return { steps, reads, chance: (node) => found.policy[node - 1] };
}
