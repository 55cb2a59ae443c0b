// One rank: how it stands, what it holds, what was counted, and what happened to it last.

import { html } from "./html.js";
import {
  KINDS, STANDINGS, ago, counted, mediaOf, number, partitionName, rankName, streamOf, sum, whyLeftOut,
} from "./format.js";

const LAST = 8;

export function RankDetails({ rank, live, close }) {
  const { routed } = rank;
  const happened = live.happenings
    .filter((some) => some.worker === rank.worker && some.dp_rank === rank.dp_rank)
    .slice(-LAST)
    .reverse();
  return html`<aside class="panel" aria-label=${`Rank ${rankName(rank)}`}>
    <div class="panel-head">
      <h3>${rankName(rank)}</h3>
      <button class="quiet" onClick=${close} aria-label="Close the details"><span aria-hidden="true">✕</span></button>
    </div>
    ${routed?.left_out && html`<${Standing} stands=${routed.left_out} words=${whyLeftOut(routed)} />`}
    <${Standing} stands=${streamOf(rank)} words=${rank.reason} />
    <${Media} rank=${rank} />
    <dl>
      ${routed && html`<${Entry} name="Open requests" value=${number(routed.open_requests)} />
        <${Entry} name="Queued" value=${counted(routed.queued_tokens, "token")} />`}
      <${Entry} name="Model" value=${partitionName(rank)} />
      <${Entry} name="Block size" value=${rank.block_size ? counted(rank.block_size, "token") : "not known yet"} />
      <${Entry} name="Last event" value=${rank.last_event_age === null ? "never" : ago(rank.last_event_age)} />
      <${Entry} name="Last batch" value=${rank.seq === null ? "none" : number(rank.seq)} />
      <${Entry} name="Lag" value=${counted(rank.lag, "batch", "batches")} />
      <${Entry} name="Life of the engine" value=${`${rank.epoch + 1}${rank.restarts ? "" : " (no restart seen)"}`} />
      <${Entry} name="Gaps" value=${number(rank.gaps)} />
      <${Entry} name="Replays" value=${`${number(rank.replays_filled)} of ${number(rank.replays_asked)} read to the end, ${number(rank.replays_failed)} failed`} />
      <${Entry} name="Losses" value=${number(rank.losses)} />
      <${Entry} name="Undecodable" value=${number(rank.decode_failures)} />
      <${Entry} name="Orphans" value=${counted(rank.orphans, "block")} />
      <${Entry} name="Ignored" value=${ignored(rank)} />
      <${Entry} name="Events from" value=${rank.endpoint} />
      <${Entry} name="Replay from" value=${rank.replay_endpoint || "nowhere: gaps cannot be repaired"} />
    </dl>
    <h4>Last happenings</h4>
    ${happened.length
      ? html`<ul class="plain">${happened.map((some) => html`<li key=${some.id}>
          <span class=${`kind ${some.kind}`} aria-hidden="true">${KINDS[some.kind].glyph}</span>${" "}
          ${some.text} <span class="faint">${ago(Math.max(0, live.now() - some.at))}</span></li>`)}</ul>`
      : html`<p class="faint">Nothing since the service started.</p>`}
  </aside>`;
}

const Standing = ({ stands, words }) => html`<div class="standing">
    <p><span class=${`badge ${stands}`}>
      <span aria-hidden="true">${STANDINGS[stands].glyph}</span> ${STANDINGS[stands].label}</span></p>
    <p>${words || STANDINGS[stands].says}</p>
  </div>`;

const Entry = ({ name, value }) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`;

const ignored = (rank) =>
  Object.entries(rank.ignored)
    .map(([reason, count]) => `${number(count)} ${reason.replaceAll("_", " ")}`)
    .join(", ") || "0";

function Media({ rank }) {
  const media = mediaOf(rank.blocks);
  const all = sum(Object.values(rank.blocks));
  if (!all) return html`<p class="faint">It holds no blocks yet.</p>`;
  const words = media.map((medium) => `${number(rank.blocks[medium])} ${medium}`).join(", ");
  return html`<div>
    <div class="media" role="img" aria-label=${`Blocks: ${words}`}>
      ${media.map((medium, place) => html`<div key=${medium} class=${`medium m${Math.min(place, 3)}`}
        style=${{ flexGrow: rank.blocks[medium] }}></div>`)}
    </div>
    <p class="legend">${media.map((medium, place) => html`<span key=${medium}>
      <i class=${`medium m${Math.min(place, 3)}`}></i> ${medium} ${number(rank.blocks[medium])}</span>`)}</p>
  </div>`;
}
