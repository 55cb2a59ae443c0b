// A tile for each rank, grouped by worker, coloured by what is asked for; whom it stands for on hover and focus.

import { html, useRef, useState } from "./html.js";
import {
  NAMES, STANDINGS, ago, compact, counted, headline, mediaOf, number, partitionKey, partitionName, rankName, standing, sum, whyLeftOut,
} from "./format.js";

const MOST_TILES = 2_048;
const WITH_NAMES = 48; // so few tiles have room for words
const MOST_COLUMNS = 8;

const blocksOf = (rank) => sum(Object.values(rank.blocks));
const AGES = [[600, "h1", "under an hour"], [60, "h2", "under 10 min"], [10, "h3", "under a minute"], [2, "h4", "under 10 s"], [0, "h5", "under 2 s"]];

// Of an amount: five steps up to the most of all, whole ones of counts, and one for none.
function amounts(ranks, amount, show = compact, round = Math.ceil) {
  const most = Math.max(0, ...ranks.map((rank) => amount(rank) || 0));
  const step = round(most / 5);
  const shade = (rank) => (amount(rank) ? `h${Math.min(5, Math.ceil(amount(rank) / step))}` : "none");
  const steps = most ? [1, 2, 3, 4, 5].map((n) => [`h${n}`, `to ${show(step * n)}`]) : [];
  return { shade, legend: [["none", "none"], ...steps] };
}

// Of what is sent to ranks, and written on their tiles.
const loads = (ranks, name) => ({ ...amounts(ranks, (rank) => rank.routed?.[name]), written: (rank) => loadWords(rank.routed) });

// What tiles can be coloured by: {shade(rank), legend} from the ranks and what was read of them; some only where requests
// are sent to ranks.
export const COLOURS = {
  state: ["State", () => ({ shade: standing, legend: null })],
  blocks: ["Blocks", (ranks) => amounts(ranks, blocksOf)],
  load: ["Events", (ranks, live) => amounts(ranks, (rank) => live.pace(rank),
    (value) => `${value.toFixed(value < 10 ? 1 : 0)} batches/s`, (step) => step)],
  open: ["Open requests", (ranks) => loads(ranks, "open_requests"), true],
  queued: ["Queued tokens", (ranks) => loads(ranks, "queued_tokens"), true],
  age: ["Last event", () => ({
    shade: (rank) => rank.last_event_age === null ? "none"
      : rank.last_event_age >= 3600 ? "h0"
      : AGES.find(([least]) => rank.last_event_age >= least)[1],
    legend: [["none", "never"], ["h0", "an hour or more"], ...AGES.map(([, shade, words]) => [shade, words])],
  })],
};

export function Tiles({ ranks, live, colour, chosen, choose }) {
  const [tip, setTip] = useState(null);
  const box = useRef(null);
  const pointer = useRef("");
  const shown = ranks.slice(0, MOST_TILES);
  if (!shown.length) {
    return html`<p class="empty">No rank matches the filter. Clear the search, or switch states on.</p>`;
  }
  const groups = new Map();
  const order = (a, b) => NAMES.compare(partitionName(a), partitionName(b)) || NAMES.compare(a.worker, b.worker) || a.dp_rank - b.dp_rank;
  for (const rank of [...shown].sort(order)) {
    const key = partitionKey(rank);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(rank);
  }
  const painted = COLOURS[colour][1](shown, live);
  const tell = (event) => {
    const moved = event.type === "pointermove";
    const place = `${event.clientX} ${event.clientY}`;
    if (moved && pointer.current === place) return; // the page was scrolled below it
    if (moved) pointer.current = place;
    const tile = event.target.closest("[data-rank]");
    if (tip && tile ? tip.name === tile.dataset.rank : !tip && !tile) return;
    if (!tile) return moved && setTip(null);
    const [at, around] = [tile.getBoundingClientRect(), box.current.getBoundingClientRect()];
    const width = Math.min(300, around.width);
    setTip({
      name: tile.dataset.rank,
      left: Math.max(0, Math.min(at.left - around.left, around.width - width)),
      top: at.bottom - around.top + 6,
    });
  };
  const hush = () => setTip(null);
  const leave = () => setTip((now) => (now && document.activeElement.dataset.rank === now.name ? now : null));
  const told = tip && shown.find((rank) => rankName(rank) === tip.name);
  return html`<section class="fleet-tiles" aria-label="Ranks" ref=${box} onPointerMove=${tell} onfocusin=${tell}
    onPointerLeave=${leave} onfocusout=${hush} onKeyDown=${(event) => event.key === "Escape" && hush()}>
    ${painted.legend && html`<p class="legend">${COLOURS[colour][0]}: ${painted.legend.map(([shade, words]) => html`
      <span key=${shade}><i class=${`shade ${shade}`}></i> ${words}</span>`)}</p>`}
    ${[...groups.values()].map((members) => html`
      <${Group} key=${partitionKey(members[0])} ranks=${members} painted=${painted} chosen=${chosen} choose=${choose}
        named=${shown.length <= WITH_NAMES} />`)}
    ${ranks.length > shown.length && html`<p class="faint">
      ${number(ranks.length - shown.length)} more ranks: use the filter or the table.</p>`}
    ${told && html`<${Tip} rank=${told} live=${live} left=${tip.left} top=${tip.top} />`}
  </section>`;
}

function Tip({ rank, live, left, top }) {
  const stands = standing(rank);
  const pace = live.pace(rank);
  return html`<div class="tip" aria-hidden="true" style=${{ left: `${left}px`, top: `${top}px` }}>
    <b>${rankName(rank)}</b> <span class=${`badge ${stands}`}>${STANDINGS[stands].glyph} ${STANDINGS[stands].label}</span>
    <p>${blocksWords(rank)}</p>
    <p>last event ${rank.last_event_age === null ? "never" : ago(rank.last_event_age)}${pace === null ? "" : `, ${pace.toFixed(1)} batches/s`}</p>
    ${rank.routed && html`<p>requests: ${loadWords(rank.routed)} tokens</p>`}
    ${rank.routed?.left_out && html`<p class="faint">${whyLeftOut(rank.routed)}</p>`}
    ${rank.reason && html`<p class="faint">${headline(rank)}</p>`}
  </div>`;
}

const mediaWords = (rank) =>
  mediaOf(rank.blocks).map((medium) => `${compact(rank.blocks[medium])} ${medium}`).join(", ") || "no blocks";

const loadWords = (routed) => `${compact(routed.open_requests)} open, ${compact(routed.queued_tokens)} queued`;

const blocksWords = (rank) => (blocksOf(rank) ? `${mediaWords(rank)} blocks` : "no blocks");

function Group({ ranks, painted, chosen, choose, named }) {
  const [at, setAt] = useState(null);
  const home = ranks.find((rank) => rankName(rank) === (at ?? chosen)) || ranks[0];
  const live = ranks.filter((rank) => rank.state === "live").length;
  const name = partitionName(ranks[0]);
  const workers = new Map();
  for (const rank of ranks) {
    if (!workers.has(rank.worker)) workers.set(rank.worker, []);
    workers.get(rank.worker).push(rank);
  }
  const most = Math.max(...[...workers.values()].map((some) => some.length));
  const tile = (rank, words) => html`<${Tile} key=${rankName(rank)} rank=${rank} words=${words} shade=${painted.shade(rank)}
    more=${(painted.written || mediaWords)(rank)}
    home=${rank === home} chosen=${rankName(rank) === chosen} choose=${choose} />`;
  return html`<div class="group">
    <h3>${name} <span class="faint">${number(live)} of ${counted(ranks.length, "rank")} live, ${counted(workers.size, "worker")}</span></h3>
    <div class=${`tiles ${named ? "named" : ""} ${most > 1 ? "boxed" : ""}`} role="listbox" aria-label=${`Ranks of ${name}`}
      style=${{ "--columns": Math.min(most, MOST_COLUMNS) }} onKeyDown=${moveFocus}
      onfocusin=${(event) => setAt(event.target.dataset.rank)}>
      ${most === 1
        ? ranks.map((rank) => tile(rank, named && rankName(rank)))
        : [...workers].map(([worker, some]) => html`<div class="worker" role="group" key=${worker} aria-label=${worker}>
            <span class=${`name ${some.every((rank) => standing(rank) === "live") ? "" : "odd"}`} title=${worker} aria-hidden="true">${worker}</span>
            <div class="of-worker" role="presentation">${some.map((rank) => tile(rank, named && `rank ${rank.dp_rank}`))}</div></div>`)}
    </div>
  </div>`;
}

function Tile({ rank, words, more, shade, home, chosen, choose }) {
  const stands = standing(rank);
  const { glyph, label } = STANDINGS[stands];
  return html`<div class=${`tile ${shade === stands ? stands : `shade ${shade}`}`} role="option" aria-selected=${chosen}
    aria-label=${`${rankName(rank)}: ${label}, ${blocksWords(rank)}`} data-rank=${rankName(rank)}
    tabindex=${home ? 0 : -1} onClick=${() => choose(rankName(rank))}>
    ${(words || stands !== "live") && html`<span class="glyph">${glyph}</span>`}
    ${words && html`<span class="name">${words}</span>
      <span class="more">${stands === "live" ? more : label}</span>`}
  </div>`;
}

// Arrow keys go from tile to tile, as they lie on the screen.
function moveFocus(event) {
  const tiles = [...event.currentTarget.querySelectorAll("[data-rank]")];
  const from = tiles.indexOf(document.activeElement);
  if (from < 0) return;
  const to = {
    ArrowRight: () => tiles[from + 1],
    ArrowLeft: () => tiles[from - 1],
    ArrowDown: () => nextLine(tiles, from, 1),
    ArrowUp: () => nextLine(tiles, from, -1),
    Home: () => tiles[0],
    End: () => tiles.at(-1),
    Enter: () => tiles[from].click(),
    " ": () => tiles[from].click(),
  }[event.key];
  if (!to) return;
  event.preventDefault();
  const tile = to();
  if (tile) tile.focus();
}

// The tile of the next line, down or up, that lies nearest.
function nextLine(tiles, from, way) {
  const places = tiles.map((tile) => tile.getBoundingClientRect());
  const here = places[from];
  const beyond = (place) => (place.top - here.top) * way;
  const line = Math.min(...places.map(beyond).filter((far) => far > 1));
  const far = (row) => Math.abs(places[row].left - here.left);
  return tiles[places.reduce((best, place, row) =>
    Math.abs(beyond(place) - line) < 1 && (best < 0 || far(row) < far(best)) ? row : best, -1)];
}
