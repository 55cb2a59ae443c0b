// The picture: each prefix above what follows it, as wide as its share. Click or keys zoom.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./html.js";
import { counted, number } from "./format.js";
import { differentBlocks, layOut, ranksOf, shadeOf } from "./tree.js";
import { nameOf } from "./prefixes.js";

const LEAST_LINE = 34; // px
const MOST_LINE = 150;
const TWO_LINES = 48; // px; from then on a cell has room for two lines of words
const FIRST_LINE = 32; // px; that of all prompts
const REST = 22; // px; how high what is left out is drawn
const BELOW = 78; // px of the window that the legend and the margin take
const LEVELS = 14;
const NARROWEST = 3; // px; what is narrower is summed up
const WORDS = 90; // px; below it a cell has no room for words

export function Icicle({ found, grown, chosen, choose }) {
  const [top, setTop] = useState(-1);
  const [at, setAt] = useState(-1);
  const [width, room, box] = useRoom();
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
  const lines = Math.max(1, ...cells.map((some) => some.line));
  const line = Math.max(LEAST_LINE, Math.min(MOST_LINE, Math.floor((room - FIRST_LINE) / lines)));
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
    style=${{ height: `${FIRST_LINE + lines * line}px` }} onKeyDown=${keys}>
    ${width > 0 && cells.map((some) => some.some
      ? html`<${Cell} key=${some.some.row} cell=${some} width=${width} line=${line} home=${home} chosen=${chosen}
          found=${found} zoom=${zoom} top=${top} />`
      : html`<${Rest} key=${`rest ${some.rest.row}`} cell=${some} line=${line} roomy=${some.width * width > 110} />`)}
  </div>`;
}

const placed = (cell, line) => ({
  left: `${cell.x * 100}%`,
  width: `${cell.width * 100}%`,
  top: `${cell.line ? FIRST_LINE + (cell.line - 1) * line : 0}px`,
  height: `${(cell.line ? line : FIRST_LINE) - 1}px`,
});

function Cell({ cell, width, line, home, chosen, found, zoom, top }) {
  const { some } = cell;
  const { node, row } = some;
  const words = node ? nameOf(some) : `All prompts, ${counted(differentBlocks(found), "different block")}`;
  const roomy = cell.width * width > WORDS;
  const shade = node ? shadeOf(node.ranks, found.ranks.length) : "root";
  return html`<div class=${`cell shade ${shade} ${row === chosen && node ? "chosen" : ""} ${roomy ? "roomy" : ""} ${node && line >= TWO_LINES ? "tall" : ""}`}
    style=${placed(cell, line)}
    role="treeitem" aria-level=${some.level + 1} aria-label=${words} title=${words}
    aria-selected=${row === chosen} aria-expanded=${some.children.length ? true : null}
    data-row=${row} tabindex=${row === home ? 0 : -1} onClick=${() => zoom(row === top && some.parent ? some.parent.row : row)}>
    ${roomy && (node ? html`<span><b>${counted(some.blocks, "block")}</b>, ${ranksOf(some)}</span>
      <span class="second">${marks(some)}</span>` : words)}
  </div>`;
}

// As many words as are wanted; the cell cuts off what has no room.
function marks({ node, blocks }) {
  const words = [counted(blocks * node.block_size, "token")];
  if (node.lora !== null) words.push(`LoRA ${node.lora}`);
  if (node.salted) words.push("salted");
  return words.join(" · ");
}

// What is left out, or too narrow to be drawn.
function Rest({ cell, line, roomy }) {
  const words = counted(cell.count, "more prefix", "more prefixes");
  return html`<div class=${`cell rest ${roomy ? "roomy" : ""}`} style=${{ ...placed(cell, line), height: `${REST}px` }} role="presentation"
    title=${`${words}: zoom in, or ask for more`}>${roomy && html`<span>${words}</span>`}</div>`;
}

// How wide the picture is, and how high it may be, in pixels.
function useRoom() {
  const box = useRef(null);
  const [room, setRoom] = useState([0, 0]);
  useLayoutEffect(() => {
    const look = () => {
      const { width, top } = box.current.getBoundingClientRect();
      setRoom([width, innerHeight - top - scrollY - BELOW]);
    };
    const watch = new ResizeObserver(look);
    watch.observe(box.current);
    addEventListener("resize", look);
    return () => {
      watch.disconnect();
      removeEventListener("resize", look);
    };
  }, []);
  return [...room, box];
}
