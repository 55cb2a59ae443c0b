// The picture: each prefix above what follows it, as wide as its share. Click or keys zoom.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/htm-preact-3.1.1.js";
import { counted, number } from "./format.js";
import { layOut, ranksOf, shadeOf } from "./tree.js";
import { nameOf } from "./prefixes.js";

const LINE = 34; // px
const LEVELS = 14;
const NARROWEST = 3; // px; what is narrower is summed up
const WORDS = 46; // px; below it a cell has no room for words

export function Icicle({ found, grown, chosen, choose }) {
  const [top, setTop] = useState(-1);
  const [at, setAt] = useState(-1);
  const [width, box] = useWidth();
  const focusing = useRef(false);
  useEffect(() => {
    setTop(-1);
    setAt(-1);
  }, [found]);
  const cell = (row) => grown.runs[row] || grown.root;
  const zoomed = cell(top);
  const cells = layOut(zoomed, LEVELS + zoomed.level, NARROWEST / Math.max(1, width));
  const drawn = new Set(cells.filter((some) => some.some).map((some) => some.some.row));
  const home = drawn.has(at) ? at : top;
  const height = (Math.max(...cells.map((some) => some.line)) + 1) * LINE;
  const zoom = (row) => {
    setTop(row);
    setAt(row);
    choose(row);
  };
  useLayoutEffect(() => {
    if (!focusing.current) return;
    focusing.current = false;
    const target = box.current.querySelector('[tabindex="0"]');
    if (target) target.focus();
  });
  const keys = (event) => {
    const here = cell(home);
    const siblings = here.parent ? here.parent.children.filter((some) => drawn.has(some.row)) : [];
    const place = siblings.indexOf(here);
    const to = {
      ArrowDown: () => here.children.find((some) => drawn.has(some.row)),
      ArrowUp: () => here.parent,
      ArrowRight: () => siblings[place + 1],
      ArrowLeft: () => siblings[place - 1],
      Home: () => grown.root,
    }[event.key];
    focusing.current = true;
    if (to) {
      const next = to();
      if (next) {
        setAt(next.row);
        choose(next.row);
      }
    } else if (event.key === "Enter" || event.key === " ") zoom(home);
    else if (event.key === "Escape" || event.key === "Backspace") zoom(zoomed.parent ? zoomed.parent.row : -1);
    else {
      focusing.current = false;
      return;
    }
    event.preventDefault();
  };
  return html`<div class="icicle" ref=${box} role="tree" aria-label="Prefixes, most shared first"
    style=${{ height: `${height}px` }} onKeyDown=${keys}>
    ${width > 0 && cells.map((some) => some.some
      ? html`<${Cell} key=${some.some.row} cell=${some} width=${width} home=${home} chosen=${chosen}
          found=${found} zoom=${zoom} top=${top} />`
      : html`<${Rest} key=${`rest ${some.rest.row}`} cell=${some} roomy=${some.width * width > 110} />`)}
  </div>`;
}

const placed = (cell) => ({
  left: `${cell.x * 100}%`,
  width: `${cell.width * 100}%`,
  top: `${cell.line * LINE}px`,
});

function Cell({ cell, width, home, chosen, found, zoom, top }) {
  const { some } = cell;
  const { node, row } = some;
  const words = node ? nameOf(some) : `All prompts, ${counted(found.unique_blocks, "different block")}`;
  const roomy = cell.width * width > WORDS;
  const shade = node ? shadeOf(node.ranks) : "root";
  return html`<div class=${`cell ${shade} ${row === chosen && node ? "chosen" : ""} ${roomy ? "roomy" : ""}`} style=${placed(cell)}
    role="treeitem" aria-level=${some.level + 1} aria-label=${words} title=${words}
    aria-selected=${row === chosen} aria-expanded=${some.children.length ? true : null}
    data-row=${row} tabindex=${row === home ? 0 : -1} onClick=${() => zoom(row === top && some.parent ? some.parent.row : row)}>
    ${roomy && (node ? html`<b>${number(some.blocks)}</b> ${marks(some)}` : words)}
  </div>`;
}

// As many words as are wanted; the cell cuts off what has no room.
function marks(some) {
  const { node } = some;
  const words = [`× ${ranksOf(some)}`];
  if (node.lora !== null) words.push(`LoRA ${node.lora}`);
  if (node.salted) words.push("salted");
  return words.join(" · ");
}

function Rest({ cell, roomy }) {
  const words = counted(cell.count, "more prefix", "more prefixes");
  return html`<div class=${`cell rest ${roomy ? "roomy" : ""}`} style=${placed(cell)} role="presentation"
    title=${`${words}: zoom in, or ask for more`}>${roomy && html`<span>${words}</span>`}</div>`;
}

function useWidth() {
  const box = useRef(null);
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const watch = new ResizeObserver(([entry]) => setWidth(entry.contentRect.width));
    watch.observe(box.current);
    return () => watch.disconnect();
  }, []);
  return [width, box];
}
