// What happened: a lane for each rank that had trouble, and all happenings as a list.

import { html, useMemo, useState } from "./html.js";
import {
  KINDS, STANDINGS, age, ago, clock, counted, day, number, partitionName, rankName,
} from "./format.js";

const WINDOWS = [[300, "5 minutes"], [900, "15 minutes"], [3600, "hour"], [21_600, "6 hours"], [86_400, "day"]];
const SHORTEST = 60; // s: a history that is shorter than the window fills the picture
const LANES = 24;
const ROWS = 100;
const MARKED = ["gap", "loss", "restart", "added", "removed"];
const GRAVE = { loss: 8, gap: 4, restart: 4, replay: 0, state: 0, added: 0, removed: 2 };
const AWAY = { connecting: 3, stale: 2, repairing: 1 };

export function TimelineView({ live }) {
  const [window_, setWindow] = useState(900);
  const [hidden, setHidden] = useState(() => new Set());
  const [text, setText] = useState("");
  const [rows, setRows] = useState(ROWS);
  const now = live.now();
  const words = text.toLowerCase();
  const fits = (some) => !hidden.has(some.kind) &&
    `${rankName(some)} ${some.model} ${some.text}`.toLowerCase().includes(words);
  const shown = useMemo(() => live.happenings.filter(fits).reverse(), [live.happenings, hidden, words]);
  const known = new Map(live.fleet.ranks.map((rank) => [rankName(rank), rank]));
  const toggle = (kind) => {
    const next = new Set(hidden);
    if (!next.delete(kind)) next.add(kind);
    setHidden(next);
  };
  return html`
    <h2 class="unseen">Timeline</h2>
    <section class="filters" aria-label="Filter">
      <label>The last <select value=${window_} onChange=${(event) => setWindow(Number(event.target.value))}>
        ${WINDOWS.map(([seconds, name]) => html`<option value=${seconds}>${name}</option>`)}</select></label>
      <label>Find <input type="search" value=${text} placeholder="worker or words" onInput=${(event) => setText(event.target.value)} /></label>
      <${Kinds} happenings=${live.happenings} hidden=${hidden} toggle=${toggle} />
    </section>
    <${Lanes} happenings=${shown} all=${live.happenings} since=${live.since} now=${now} seconds=${window_} ranks=${live.fleet.ranks} />
    <p class="summary faint">${live.happened > live.happenings.length
      ? `The latest ${number(live.happenings.length)} of ${counted(live.happened, "happening")}: those before ${clock(live.since)} are no longer kept.`
      : `All ${counted(live.happened, "happening")} since the service started at ${clock(live.since)}.`}</p>
    ${shown.length
      ? html`<${List} shown=${shown.slice(0, rows)} now=${now} known=${known} />`
      : html`<p class="empty">${live.happenings.length ? "Nothing fits the filter." : "Nothing has happened since the service started. Gaps, losses, restarts and changes of state will be listed here as they come."}</p>`}
    ${shown.length > rows && html`<button onClick=${() => setRows(rows + ROWS)}>Show more of ${number(shown.length)}</button>`}
  `;
}

function Kinds({ happenings, hidden, toggle }) {
  const counts = {};
  for (const some of happenings) counts[some.kind] = (counts[some.kind] || 0) + 1;
  return html`<div class="chips" role="group" aria-label="Shown kinds">
    ${Object.keys(KINDS).filter((kind) => counts[kind]).map((kind) => html`<button class="chip"
      aria-pressed=${!hidden.has(kind)} onClick=${() => toggle(kind)}>
      <span class=${`kind ${kind}`} aria-hidden="true">${KINDS[kind].glyph}</span> ${KINDS[kind].label}
      ${" "}<b>${number(counts[kind])}</b></button>`)}
  </div>`;
}

function Lanes({ happenings, all, since, now, seconds, ranks }) {
  const span = Math.min(seconds, Math.max(SHORTEST, (now - since) * 1.05));
  const from = now - span;
  const lanes = new Map();
  for (const some of happenings) {
    const name = rankName(some);
    if (!lanes.has(name)) lanes.set(name, { name, marks: [], states: [], gravity: 0 });
    const lane = lanes.get(name);
    lane.marks.push(some);
    if (some.at >= from) lane.gravity += GRAVE[some.kind] + (some.kind === "state" ? AWAY[some.state] || 0 : 0);
  }
  const drawn = [...lanes.values()].filter((lane) => lane.gravity > 0)
    .sort((a, b) => b.gravity - a.gravity || a.name.localeCompare(b.name, "en", { numeric: true }));
  if (!drawn.length) {
    return html`<p class="summary">All quiet: in the last ${age(seconds)} nothing that is shown here went wrong at any of ${counted(ranks.length, "rank")}.</p>`;
  }
  for (const some of all) {
    const lane = lanes.get(rankName(some)); // states of what the filter hides, too
    if (lane) lane.states.push(some);
  }
  const there = new Set(ranks.map(rankName));
  const stands = new Set(drawn.slice(0, LANES).flatMap((lane) => lane.states.map(standsOf)));
  return html`<section class="lanes" role="img"
    aria-label=${`${counted(drawn.length, "rank")} with happenings in the last ${age(seconds)}; the list below has them all`}>
    <div class="lane axis"><span></span><div>${[1, 0.75, 0.5, 0.25, 0].map((part) => html`<span style=${{ left: `${(1 - part) * 100}%` }}>
      ${clock(now - span * part)}</span>`)}</div></div>
    ${drawn.slice(0, LANES).map((lane) => html`<div class="lane" key=${lane.name}>
      <span class="name" title=${lane.name}>${lane.name}</span>
      <div><${Lane} lane=${lane} since=${since} from=${from} now=${now} there=${there.has(lane.name)} /></div></div>`)}
    ${drawn.length > LANES && html`<p class="faint">${number(drawn.length - LANES)} more ranks: narrow the filter.</p>`}
    <p class="legend">${Object.keys(STANDINGS).filter((name) => name !== "closed" && stands.has(name)).map((name) => html`<span key=${name}>
      <i class=${`band ${name}`}></i> ${STANDINGS[name].label}</span>`)}
      <span><i class="unknown"></i> not known</span> <span><i class="absent"></i> not there</span></p>
  </section>`;
}

const standsOf = (some) => (some.kind === "removed" ? "closed" : some.state === "live" && !some.complete ? "partial" : some.state);

// What is known of a rank begins when it was added, or with the first that is kept of it; then
// how it stood before is not known, and least of all before the history begins.
function Lane({ lane, since, from, now, there }) {
  const share = (at) => Math.min(100, Math.max(0, ((at - from) / (now - from)) * 100));
  const states = lane.states;
  const first = states[0];
  const bands = states.map((some, place) => {
    const next = states[place + 1];
    return { stands: standsOf(some), start: share(some.at), stop: next ? share(next.at) : there ? 100 : share(some.at) };
  }).filter((band) => band.stop > band.start && STANDINGS[band.stands] && band.stands !== "closed");
  const unknown = share(first && first.kind !== "added" ? first.at : since);
  const seen = lane.marks.filter((some) => some.at >= from && MARKED.includes(some.kind));
  return html`
    ${unknown > 0 && html`<i class="unknown" title="not known" style=${{ left: 0, width: `${unknown}%` }}></i>`}
    ${bands.map((band) => html`<i class=${`band ${band.stands}`} title=${STANDINGS[band.stands].label}
      style=${{ left: `${band.start}%`, width: `${band.stop - band.start}%` }}></i>`)}
    ${seen.map((some) => html`<b class=${`mark kind ${some.kind}`} key=${some.id} title=${`${clock(some.at)} ${some.text}`}
      style=${{ left: `${share(some.at)}%` }}>${KINDS[some.kind].glyph}</b>`)}`;
}

const List = ({ shown, now, known }) => html`<div class="scroll" tabindex="0" role="region" aria-label="Table of happenings, scrollable"><table class="stack">
  <caption class="unseen">What happened, newest first</caption>
  <thead><tr><th scope="col">When</th><th scope="col">Rank</th><th scope="col" class="minor">Model</th><th scope="col">Kind</th><th scope="col">What</th></tr></thead>
  <tbody>${shown.map((some) => html`<tr key=${some.id}>
    <td title=${day(some.at)}><time datetime=${new Date(some.at * 1000).toISOString()}>${clock(some.at)}</time>
      <span class="faint"> ${ago(Math.max(0, now - some.at))}</span></td>
    <th scope="row">${rankName(some)}</th><td class="minor">${partitionName(some.model ? some : known.get(rankName(some)) || some)}</td>
    <td><span class=${`kind ${some.kind}`}><span aria-hidden="true">${KINDS[some.kind].glyph}</span> ${KINDS[some.kind].label}</span></td>
    <td class="wide">${some.text}</td></tr>`)}</tbody></table></div>`;
