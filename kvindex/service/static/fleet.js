// The fleet at a glance: totals, what is wrong, traffic, a tile for each rank, and a table of them all.

import { html, useMemo, useState } from "./html.js";
import { STANDINGS, age, compact, counted, mediaOf, number, rankName, standing, sum } from "./format.js";
import { RankDetails } from "./rank.js";
import { RankTable } from "./table.js";
import { COLOURS, Tiles } from "./tiles.js";
import { Traffic } from "./traffic.js";
import { Troubles } from "./troubles.js";

export function FleetView({ live }) {
  const { fleet } = live;
  const [text, setText] = useState("");
  const [hidden, setHidden] = useState(() => new Set());
  const [chosen, setChosen] = useState(null);
  const [colour, setColour] = useState("state");
  const shown = useMemo(() => {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    return fleet.ranks.filter((rank) => {
      const name = `${rankName(rank)} ${rank.model} ${rank.routing_group} ${rank.reason} ${rank.routed?.reason || ""}`.toLowerCase();
      return !hidden.has(standing(rank)) && words.every((word) => name.includes(word));
    });
  }, [fleet, text, hidden]);
  if (!fleet.ranks.length) return html`<${Troubles} fleet=${fleet} /><${NoRanks} />`;
  const routes = fleet.ranks.some((some) => some.routed);
  const rank = fleet.ranks.find((some) => rankName(some) === chosen);
  return html`
    <h2 class="unseen">Fleet</h2>
    <${Totals} fleet=${fleet} />
    <${Troubles} fleet=${fleet} choose=${setChosen} />
    <${Traffic} live=${live} />
    <section class="filters" aria-label="Filter">
      <label>Find <input type="search" value=${text} placeholder="worker or words"
        onInput=${(event) => setText(event.target.value)} /></label>
      <label>Colour by <select value=${colour} onChange=${(event) => setColour(event.target.value)}>
        ${Object.entries(COLOURS).filter(([, [, , routed]]) => routes || !routed).map(([name, [title]]) => html`<option value=${name}>${title}</option>`)}</select></label>
      <${Standings} ranks=${fleet.ranks} hidden=${hidden} setHidden=${setHidden} />
    </section>
    <div class=${rank ? "split" : ""}>
      <div>
        <${Tiles} ranks=${shown} live=${live} colour=${colour} chosen=${chosen} choose=${setChosen} />
        <${RankTable} ranks=${shown} totals=${fleet.totals} choose=${setChosen} chosen=${chosen} />
      </div>
      ${rank && html`<${RankDetails} rank=${rank} live=${live} close=${() => setChosen(null)} />`}
    </div>
  `;
}

function NoRanks() {
  return html`<section class="empty">
    <h2>No engines yet</h2>
    <p>Nothing is followed, so there is nothing to show. Name an engine when the service starts:</p>
    <pre>kvindex serve --worker vllm-0=tcp://HOST:5557,replay=tcp://HOST:5657</pre>
    <p>or register one while it runs:</p>
    <pre>${`curl -X POST ${location.origin}/register \\
  -H 'Content-Type: application/json' -d '
  {"instance_id": 1, "model_name": "MODEL", "block_size": 16,
   "endpoint": "tcp://HOST:5557", "replay_endpoint": "tcp://HOST:5657"}'`}</pre>
    <p>This page shows it as soon as it is there.</p>
  </section>`;
}

function Totals({ fleet }) {
  const { totals, ranks } = fleet;
  const live = totals.states.live || 0;
  const missing = Object.keys(fleet.missing).length;
  const copies = sum(Object.values(totals.blocks));
  const oldest = Math.max(0, ...ranks.map((rank) => rank.last_event_age ?? 0));
  const media = mediaOf(totals.blocks).map((medium) => `${compact(totals.blocks[medium])} ${medium}`);
  return html`<section class="totals" aria-label="Totals">
    <${Total} name="Ranks live" value=${`${number(live)} of ${number(totals.ranks)}`}
      more=${`${counted(totals.workers, "worker")}, ${missing ? `${number(missing)} not found` : counted(fleet.partitions.length, "partition")}`}
      share=${live / totals.ranks} tone=${live === totals.ranks && !missing ? "good" : "warn"} />
    <${Total} name="Complete" value=${`${number(totals.complete)} of ${number(totals.ranks)}`}
      more=${totals.complete === totals.ranks ? "all history applied" : `${number(totals.ranks - totals.complete)} with unseen history`}
      share=${totals.complete / totals.ranks}
      tone=${totals.complete === totals.ranks ? "good" : "warn"} />
    <${Total} name="Blocks" value=${compact(copies)} more=${media.join(", ") || "none yet"} />
    <${Total} name="Copies of a block" value=${totals.unique_blocks ? (copies / totals.unique_blocks).toFixed(2) : "–"}
      more=${`${compact(totals.unique_blocks)} different blocks`} />
    <${Total} name="Lag" value=${counted(totals.lag, "batch", "batches")}
      more=${`longest quiet ${age(oldest)}`} tone=${totals.lag ? "warn" : ""} />
    <${Total} name="Losses" value=${number(totals.losses)}
      more=${`${counted(totals.gaps, "gap")}, ${counted(totals.restarts, "restart")}`}
      tone=${totals.losses ? "bad" : ""} />
    ${ranks.some((rank) => rank.routed) && html`<${Load} routed=${ranks.map((rank) => rank.routed).filter(Boolean)} />`}
    ${fleet.followed && html`<${FollowedPool} pool=${fleet.followed} />`}
  </section>`;
}

function Load({ routed }) {
  const out = routed.filter((some) => some.left_out).length;
  return html`<${Total} name="Open requests" value=${compact(sum(routed.map((some) => some.open_requests)))}
    more=${`${compact(sum(routed.map((some) => some.queued_tokens)))} tokens queued${out ? `, ${counted(out, "rank")} left out` : ""}`}
    tone=${out ? "warn" : ""} />`;
}

function FollowedPool({ pool }) {
  const lag = pool.lag_messages === null ? "not joined yet" : `${counted(pool.lag_messages, "message")} behind, the last one: ${age(pool.lag_seconds)}`;
  return html`<${Total} name="Followed from" value=${pool.server.split("/").pop()}
    more=${`${pool.server}: ${pool.trouble || lag}`} tone=${pool.trouble ? "warn" : ""} />`;
}

function Total({ name, value, more, share, tone = "" }) {
  return html`<div class=${`total ${tone}`}>
    <h3>${name}</h3>
    <p class="figure">${value}</p>
    <p class="faint">${more}</p>
    ${share !== undefined && html`<div class="share" aria-hidden="true"><div style=${{ width: `${share * 100}%` }}></div></div>`}
  </div>`;
}

function Standings({ ranks, hidden, setHidden }) {
  const counts = {};
  for (const rank of ranks) counts[standing(rank)] = (counts[standing(rank)] || 0) + 1;
  const toggle = (name) => {
    const next = new Set(hidden);
    if (!next.delete(name)) next.add(name);
    setHidden(next);
  };
  return html`<div class="chips" role="group" aria-label="Shown states">
    ${Object.keys(STANDINGS).filter((name) => counts[name]).map((name) => html`
      <button class=${`chip ${name}`} aria-pressed=${!hidden.has(name)} title=${STANDINGS[name].says}
        onClick=${() => toggle(name)}>
        <span class="dot" aria-hidden="true">${STANDINGS[name].glyph}</span>
        ${STANDINGS[name].label} <b>${number(counts[name])}</b>
      </button>`)}
  </div>`;
}
