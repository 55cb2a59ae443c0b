// The radix tree as /api/prefixes tells it, made ready to be drawn. No DOM in here.

// Classes of "how many ranks hold it"; the last one has no end.
const EDGES = [1, 2, 4, 8, 16, 32];

export const shadeOf = (ranks) => {
  if (!ranks) return "hole";
  const place = EDGES.findLastIndex((edge) => ranks >= edge);
  return `h${place}`;
};

export function legendOf(most) {
  return EDGES.filter((edge) => edge <= Math.max(1, most)).map((edge, place) => {
    const next = EDGES[place + 1];
    const words = !next ? `${edge} or more` : next - 1 === edge ? `${edge}` : `${edge}–${next - 1}`;
    return { shade: `h${place}`, words };
  });
}

// Returns the root: {row: -1, children, weight, level}; a node has its own fields under `node`.
export function growTree(found, measure) {
  const root = { row: -1, node: null, parent: null, children: [], level: 0, own: 0 };
  const grown = found.nodes.map((node, row) => ({
    row, node, parent: null, children: [], level: 0, own: measureOf(node, measure),
  }));
  for (const some of grown) {
    some.parent = some.node.parent < 0 ? root : grown[some.node.parent];
    some.level = some.parent.level + 1;
    some.parent.children.push(some);
  }
  const left = (some, source) => (source.left_out ? (some.out = source) : null);
  left(root, found);
  for (const some of grown) left(some, some.node);
  for (const some of [...grown].reverse()) weigh(some);
  weigh(root);
  return { root, nodes: grown, most: Math.max(0, ...found.nodes.map((node) => node.ranks)) };
}

const measureOf = (node, measure) => node.blocks * (measure === "copies" ? Math.max(1, node.ranks) : 1);

function weigh(some) {
  some.children.sort((a, b) => b.weight - a.weight);
  const below = some.children.reduce((total, child) => total + child.weight, 0);
  some.outWeight = some.out ? Math.max(some.out.left_out_blocks, below * 0.02, 1) : 0;
  some.weight = some.own + below + some.outWeight;
}

// Cells of a zoomed node and all below it, to `levels` levels; x and width are shares of 1.
export function layOut(top, levels, narrowest) {
  const cells = [];
  const above = [];
  for (let some = top; some; some = some.parent) above.unshift(some);
  above.forEach((some, line) => cells.push({ some, x: 0, width: 1, line }));
  const spread = (some, x, width, line) => {
    if (line >= levels) return;
    const whole = some.weight - some.own;
    let from = x;
    let narrow = 0;
    for (const child of some.children) {
      const share = (width * child.weight) / whole;
      if (share < narrowest) {
        narrow += 1;
        continue;
      }
      cells.push({ some: child, x: from, width: share, line });
      spread(child, from, share, line + 1);
      from += share;
    }
    const rest = x + width - from;
    const count = narrow + (some.out ? some.out.left_out : 0);
    if (count && rest > narrowest / 2) cells.push({ rest: some, count, x: from, width: rest, line });
  };
  spread(top, 0, 1, above.length);
  return cells;
}

// Which ranks hold a node on a medium: bit r % 8 of byte r // 8 stands for rank r.
export function holders(found, node, medium) {
  const bytes = atob(node.rows[medium] || "");
  const held = [];
  for (let place = 0; place < bytes.length; place += 1) {
    const byte = bytes.charCodeAt(place);
    for (let bit = 0; bit < 8; bit += 1) {
      if ((byte >> bit) & 1) held.push(found.ranks[place * 8 + bit]);
    }
  }
  return held.filter(Boolean);
}
