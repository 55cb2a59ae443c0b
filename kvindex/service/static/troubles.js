// What is wrong: engines that were not found, and why ranks are not well, each reason once.

import { html } from "./html.js";
import { STANDINGS, counted, headline, rankName, streamOf, whyLeftOut } from "./format.js";

const MOST_REASONS = 4;
const MOST_NAMES = 3;
const ORDER = Object.keys(STANDINGS);

export function Troubles({ fleet, choose }) {
  const groups = new Map();
  const add = (rank, stands, words, all) => {
    const key = stands + words.replace(/\d+/g, "#");
    if (!groups.has(key)) groups.set(key, { key, stands, words, all, ranks: [] });
    groups.get(key).ranks.push(rank);
  };
  for (const rank of fleet.ranks) {
    if (rank.routed?.left_out) add(rank, rank.routed.left_out, whyLeftOut(rank.routed), rank.routed.reason);
    if (rank.reason || rank.state !== "live") add(rank, streamOf(rank), headline(rank), rank.reason);
  }
  const missing = Object.entries(fleet.missing);
  if (!groups.size && !missing.length) return null;
  const worst = [...groups.values()].sort((a, b) =>
    ORDER.indexOf(b.stands) - ORDER.indexOf(a.stands) || b.ranks.length - a.ranks.length);
  const shown = worst.slice(0, MOST_REASONS);
  return html`<section class="troubles" aria-label="What is wrong">
    <ul class="plain">
      ${missing.slice(0, MOST_NAMES).map(([name, why]) => html`<li key=${`missing ${name}`}>
        <span class="badge closed"><span aria-hidden="true">?</span> not found</span>
        <b>${name}</b> <span class="why" title=${why}>${why}</span></li>`)}
      ${missing.length > MOST_NAMES && html`<li class="faint">${counted(missing.length - MOST_NAMES, "more engine or source", "more engines or sources")} not found: GET /ready names them all</li>`}
      ${shown.map((some) => html`<li key=${some.key}>
        <span class=${`badge ${some.stands}`}><span aria-hidden="true">${STANDINGS[some.stands].glyph}</span> ${STANDINGS[some.stands].label}</span>
        <button class="link" onClick=${() => choose(rankName(some.ranks[0]))}>${namesOf(some.ranks)}</button>
        <span class="why" title=${some.all}>${some.words || STANDINGS[some.stands].says}</span></li>`)}
      ${worst.length > shown.length && html`<li class="faint">${counted(worst.length - shown.length, "more reason")}: the table has them all</li>`}
    </ul>
  </section>`;
}

// "vllm-7: 8 ranks", or the names of a few.
function namesOf(ranks) {
  if (ranks.length === 1) return rankName(ranks[0]);
  const workers = [...new Set(ranks.map((rank) => rank.worker))];
  const more = workers.length - MOST_NAMES;
  return `${workers.slice(0, MOST_NAMES).join(", ")}${more > 0 ? ` and ${counted(more, "more worker")}` : ""}: ${counted(ranks.length, "rank")}`;
}
