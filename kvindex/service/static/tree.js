// The radix tree as /api/prefixes tells it, made ready to be drawn. No DOM in here.

// Classes of "which share of the ranks holds it": each from its edge on.
const EDGES = [0, 0.02, 0.1, 0.25, 0.5, 0.75];

export const shadeOf = (ranks, all) =>
  ranks ? `h${EDGES.findLastIndex((edge) => ranks / all >= edge)}` : "hole";

// The classes that some number of ranks falls into.
export function legendOf(all) {
  const percent = (edge) => `${Math.round(edge * 100)}`;
  return EDGES.map((edge, place) => {
    const next = EDGES[place + 1];
    const least = Math.max(1, Math.ceil(edge * all));
    const words = !next ? `${percent(edge)} % or more` : edge ? `${percent(edge)}–${percent(next)} %` : `under ${percent(next)} %`;
    return { shade: `h${place}`, words, some: next === undefined || least < next * all };
  }).filter((one) => one.some);
}

// Returns the root and what grows from it: {row, node, nodes, parent, children, level, weight}.
// A run of only children that about as many ranks hold is one of them: `nodes`, from `node` on.
export function growTree(found, measure) {
  const root = { row: -1, node: null, nodes: [], parent: null, children: [], level: 0, own: 0 };
  const grown = [];
  const runs = []; // by row: the run that a node is part of
  const alone = countChildren(found);
  if (found.left_out) root.out = found;
  found.nodes.forEach((node, row) => {
    const before = node.parent < 0 ? root : runs[node.parent];
    let run = before;
    if (before === root || !alone[node.parent] || !isLike(before.nodes.at(-1), node, found.ranks.length)) {
      run = { row, node, nodes: [], parent: before, children: [], level: before.level + 1, own: 0, blocks: 0 };
      before.children.push(run);
      grown.push(run);
    }
    runs[row] = run;
    run.nodes.push(node);
    run.own += measureOf(node, measure);
    run.blocks += node.blocks;
    if (node.left_out) run.out = node;
  });
  for (const some of [...grown].reverse()) weigh(some);
  weigh(root);
  return { root, runs, all: grown };
}

// Of the whole tree; of some ranks only those that were looked at.
export const differentBlocks = (found) => found.unique_blocks ??
  found.nodes.reduce((total, node) => total + node.blocks + node.left_out_blocks, found.left_out_blocks);

// By row: whether exactly one node follows it.
function countChildren(found) {
  return found.nodes.map((node) => node.children === 1 && !node.left_out);
}

const isLike = (node, next, all) =>
  shadeOf(node.ranks, all) === shadeOf(next.ranks, all) && node.salted === next.salted && node.lora === next.lora;

// How many ranks hold a run: "97–98 ranks".
export function ranksOf(some) {
  const counts = some.nodes.map((node) => node.ranks);
  const [least, most] = [Math.min(...counts), Math.max(...counts)];
  return least === most ? `${most} ${most === 1 ? "rank" : "ranks"}` : `${least}–${most} ranks`;
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
