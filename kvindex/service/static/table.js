// All ranks as a table: sortable, a page of rows at a time.

import { html, useState } from "./html.js";
import {
  NAMES, STANDINGS, age, compact, counted, headline, mediaOf, number, partitionName, rankName, standing, streamOf,
  whyLeftOut,
} from "./format.js";

const ROWS = 50;
const MOST_MEDIA = 4;
const ORDER = Object.keys(STANDINGS);

function columnsFor(totals, routes) {
  const media = mediaOf(totals.blocks).slice(0, MOST_MEDIA);
  const count = (key, title, minor = true) => ({ key, title, minor, sort: (rank) => rank[key], number: true });
  const load = (key, title) => ({ key, title, sort: (rank) => rank.routed?.[key] ?? 0, show: (rank) => compact(rank.routed?.[key] ?? 0), number: true });
  return [
    { key: "rank", title: "Rank", sort: rankName },
    { key: "model", title: "Model", minor: true, sort: partitionName, show: partitionName },
    { key: "state", title: "State", sort: (rank) => ORDER.indexOf(standing(rank)), show: badge },
    ...(routes ? [load("open_requests", "Open"), load("queued_tokens", "Queued")] : []),
    count("lag", "Lag", routes),
    { key: "age", title: "Last event", number: true, minor: routes, sort: (rank) => rank.last_event_age ?? Infinity, show: (rank) => age(rank.last_event_age) },
    ...media.map((medium) => ({ key: `m:${medium}`, title: medium, number: true, minor: true, sort: (rank) => rank.blocks[medium] || 0 })),
    count("gaps", "Gaps"),
    count("losses", "Losses"),
    count("restarts", "Restarts"),
    { key: "reason", title: "Reason", sort: (rank) => rank.reason, show: reason, wide: true, minor: true },
  ];
}

function reason(rank) {
  if (rank.routed?.left_out) return html`<span title=${whyLeftOut(rank.routed)}>${whyLeftOut(rank.routed)}</span>`;
  return rank.reason ? html`<span title=${rank.reason}>${headline(rank)}</span>` : "–";
}

function badge(rank) {
  const stream = streamOf(rank);
  const all = new Set([standing(rank), ...(stream === "live" ? [] : [stream])]);
  return html`<span class="badges">${[...all].map((stands) => html`<span key=${stands} class=${`badge ${stands}`}>
    <span aria-hidden="true">${STANDINGS[stands].glyph}</span> ${STANDINGS[stands].label}</span>`)}</span>`;
}

export function RankTable({ ranks, totals, chosen, choose }) {
  const [sort, setSort] = useState({ key: "state", down: true });
  const [page, setPage] = useState(0);
  const columns = columnsFor(totals, ranks.some((rank) => rank.routed));
  const by = columns.find((column) => column.key === sort.key) || columns[0];
  const sorted = [...ranks].sort((a, b) => compare(by.sort(a), by.sort(b)) * (sort.down ? -1 : 1) || NAMES.compare(rankName(a), rankName(b)));
  const pages = Math.max(1, Math.ceil(sorted.length / ROWS));
  const at = Math.min(page, pages - 1);
  const rows = sorted.slice(at * ROWS, at * ROWS + ROWS);
  const order = (key) => setSort({ key, down: sort.key === key ? !sort.down : key !== "rank" && key !== "model" });
  return html`<section aria-label="Table of ranks">
    <div class="scroll" tabindex="0" role="region" aria-label="Table of ranks, scrollable">
    <table>
      <caption class="unseen">${counted(ranks.length, "rank")}, sorted by ${by.title}</caption>
      <thead><tr>${columns.map((column) => html`<th key=${column.key} scope="col"
        class=${`${column.number ? "number" : ""} ${column.minor ? "minor" : ""}`}
        aria-sort=${sort.key === column.key ? (sort.down ? "descending" : "ascending") : null}>
        <button onClick=${() => order(column.key)}>${column.title}
          <span aria-hidden="true">${sort.key === column.key ? (sort.down ? "↓" : "↑") : ""}</span></button></th>`)}
      </tr></thead>
      <tbody>${rows.map((rank) => html`<tr key=${rankName(rank)} class=${rankName(rank) === chosen ? "chosen" : ""}>
        ${columns.map((column) => html`<${Cell} key=${column.key} column=${column} rank=${rank} choose=${choose} />`)}
      </tr>`)}</tbody>
    </table></div>
    ${pages > 1 && html`<${Pager} at=${at} pages=${pages} all=${sorted.length} turn=${setPage} />`}
  </section>`;
}

function Cell({ column, rank, choose }) {
  if (column.key === "rank") {
    return html`<th scope="row"><button class="link" onClick=${() => choose(rankName(rank))}>${rankName(rank)}</button></th>`;
  }
  const shown = column.show ? column.show(rank) : number(column.sort(rank));
  const quiet = column.number && !column.sort(rank) ? "zero" : "";
  return html`<td class=${`${column.number ? "number" : ""} ${column.wide ? "line" : ""} ${column.minor ? "minor" : ""} ${quiet}`}>${shown}</td>`;
}

function Pager({ at, pages, all, turn }) {
  return html`<div class="pager">
    <button onClick=${() => turn(at - 1)} disabled=${at === 0}>Previous</button>
    <span>${number(at * ROWS + 1)}–${number(Math.min(all, at * ROWS + ROWS))} of ${number(all)}</span>
    <button onClick=${() => turn(at + 1)} disabled=${at === pages - 1}>Next</button>
  </div>`;
}

function compare(a, b) {
  if (typeof a === "string") return NAMES.compare(a, b);
  return a === b ? 0 : a < b ? -1 : 1;
}
