// Who holds which prefixes: an icicle of the radix tree, the same as a table, and details.

import { html, useEffect, useMemo, useState } from "./html.js";
import { compact, counted, mediaOf, number, partitionKey, partitionName } from "./format.js";
import { askJson } from "./live.js";
import { Icicle } from "./icicle.js";
import { differentBlocks, growTree, holders, legendOf, ranksOf } from "./tree.js";

const MOST_RANKS = 60;
const ROWS = 200;

export function PrefixesView({ live }) {
  const { partitions } = live.fleet;
  const [asked, setAsked] = useState({ partition: 0, nodes: 1000, least: 1 });
  const [measure, setMeasure] = useState("copies");
  const [form, setForm] = useState("picture");
  const [found, trouble, reading, read] = useFound(asked, partitions);
  const [chosen, setChosen] = useState(-1);
  const grown = useMemo(() => found && growTree(found, measure), [found, measure]);
  const set = (name) => (event) => setAsked({ ...asked, [name]: Number(event.target.value) });
  useEffect(() => setChosen(-1), [found]);
  return html`
    <h2 class="unseen">Prefixes</h2>
    <section class="filters" aria-label="What is shown">
      <label class="place">Partition <select value=${asked.partition} onChange=${set("partition")}>
        ${partitions.map((some, row) => html`<option value=${row}>${partitionName(some)}</option>`)}
      </select></label>
      <label>Width <select value=${measure} onChange=${(event) => setMeasure(event.target.value)}>
        <option value="copies">copies on all ranks</option>
        <option value="blocks">different blocks</option></select></label>
      <label>At least <select value=${asked.least} onChange=${set("least")}>
        ${[1, 2, 4, 16, 64].map((least) => html`<option value=${least}>${counted(least, "block")}</option>`)}</select></label>
      <label>At most <select value=${asked.nodes} onChange=${set("nodes")}>
        ${[300, 1000, 3000].map((most) => html`<option value=${most}>${number(most)} prefixes</option>`)}</select></label>
      <div class="chips one" role="group" aria-label="Form">
        ${["picture", "table"].map((name) => html`<button class="chip" aria-pressed=${form === name}
          onClick=${() => setForm(name)}>${name === "picture" ? "Picture" : "Table"}</button>`)}
      </div>
      <button onClick=${read} disabled=${reading}>${reading ? "Reading …" : "Read again"}</button>
    </section>
    ${trouble && html`<div class="notice bad" role="alert">The prefixes cannot be read: ${trouble}.</div>`}
    ${!trouble && !found && html`<p class="empty">Reading the prefixes …</p>`}
    ${found && !found.nodes.length && html`<${NoPrefixes} ranks=${live.fleet.ranks.length} />`}
    ${found && found.nodes.length > 0 && html`
      <p class="summary">${counted(found.nodes.length, "prefix", "prefixes")} of
        ${" "}${compact(differentBlocks(found))} different blocks, the most widely held first${found.left_out ? `; ${number(found.left_out)} more begin prompts and are left out` : ""}.</p>
      <div class="split wide">
        <div>
          ${form === "picture"
            ? html`<${Icicle} key=${measure} found=${found} grown=${grown} chosen=${chosen} choose=${setChosen} />`
            : html`<${PrefixTable} found=${found} grown=${grown} choose=${setChosen} chosen=${chosen} />`}
          <${Legend} all=${found.ranks.length} />
        </div>
        <${Details} found=${found} grown=${grown} chosen=${chosen} />
      </div>`}
  `;
}

function useFound(asked, partitions) {
  const [state, setState] = useState({ found: null, trouble: "", reading: true });
  const [again, setAgain] = useState(0);
  const partition = partitions[asked.partition];
  const key = partition ? partitionKey(partition) : "";
  useEffect(() => {
    let left = false;
    setState((before) => ({ ...before, reading: true }));
    const query = new URLSearchParams({ max_nodes: asked.nodes, min_blocks: asked.least });
    if (partition) {
      query.set("model", partition.model);
      query.set("routing_group", partition.routing_group);
    }
    askJson(`/api/prefixes?${query}`).then(
      (found) => left || setState({ found, trouble: "", reading: false }),
      (error) => left || setState({ found: null, trouble: error.message, reading: false }),
    );
    return () => (left = true);
  }, [key, asked.nodes, asked.least, again]);
  return [state.found, state.trouble, state.reading, () => setAgain(again + 1)];
}

const NoPrefixes = ({ ranks }) => html`<section class="empty">
  <h2>Nothing is cached yet</h2>
  <p>${ranks ? "The engines are followed, and hold no blocks that match. Send them a prompt that is longer than a block, or lower “at least”, then read again." : "No engines are followed: the Fleet view says how to register one."}</p>
</section>`;

const Legend = ({ all }) => html`<p class="legend">Held by
  ${legendOf(all).map(({ shade, words }) => html`<span key=${shade}><i class=${`shade ${shade}`}></i> ${words}</span>`)}
  ${" "}of ${counted(all, "rank")} <span><i class="shade hole"></i> a hole</span></p>`;

export function nameOf(some) {
  const { node } = some;
  const parts = [counted(some.blocks, "block"), ranksOf(some)];
  if (node.lora !== null) parts.push(`LoRA ${node.lora}`);
  if (node.salted) parts.push("salted");
  return parts.join(", ");
}

function percentOf(some, found) {
  const counts = some.nodes.map((node) => Math.round((node.ranks / found.ranks.length) * 100));
  const [least, most] = [Math.min(...counts), Math.max(...counts)];
  return least === most ? `${most || "under 1"} %` : `${least}–${most} %`;
}

function Details({ found, grown, chosen }) {
  const some = grown.runs[chosen];
  if (!some) {
    return html`<aside class="panel hint" aria-label="The chosen prefix">
      <h3>No prefix chosen</h3>
      <p>Each cell is a run of blocks that prompts share, with what follows it below. Click one to zoom
        in and to see who holds it. In the picture the arrow keys move, Enter zooms in, Escape out.</p>
    </aside>`;
  }
  const { node, blocks } = some;
  const last = some.nodes.at(-1);
  const tokens = blocks * node.block_size;
  return html`<aside class="panel" aria-label="The chosen prefix">
    <h3>${counted(tokens, "token")}</h3>
    <p>Tokens ${number(node.depth * node.block_size)} to ${number((node.depth + blocks) * node.block_size - 1)} of
      their prompts.</p>
    <dl>
      <div><dt>Blocks</dt><dd>${number(blocks)}, each of ${counted(node.block_size, "token")}</dd></div>
      <div><dt>Held by</dt><dd>${node.ranks ? `${ranksOf(some)} of ${number(found.ranks.length)}, ${percentOf(some, found)}` : "no rank: a hole, what follows is resident"}</dd></div>
      <div><dt>LoRA</dt><dd>${node.lora ?? "none"}</dd></div>
      <div><dt>Salted</dt><dd>${node.salted ? "yes: under a salt, or other first extra keys" : "no"}</dd></div>
      <div><dt>Followed by</dt><dd>${counted(last.children, "prefix", "prefixes")}${last.left_out ? `, ${number(last.left_out)} of them not shown` : ""}</dd></div>
    </dl>
    ${some.nodes.length > 1 && html`<p class="faint">Who holds its first ${node.blocks === 1 ? "block" : `${number(node.blocks)} blocks`}; what comes later, fewer hold:</p>`}
    ${mediaOf(node.by_medium).map((medium) => html`<${Holders} key=${medium} medium=${medium}
      ranks=${holders(found, node, medium)} />`)}
  </aside>`;
}

function Holders({ medium, ranks }) {
  const shown = ranks.slice(0, MOST_RANKS);
  return html`<h4>On ${medium}: ${counted(ranks.length, "rank")}</h4>
    <ul class="names">${shown.map(([worker, dpRank]) => html`<li>${worker}/${dpRank}</li>`)}
      ${ranks.length > shown.length && html`<li class="faint">and ${number(ranks.length - shown.length)} more</li>`}</ul>`;
}

function PrefixTable({ found, grown, chosen, choose }) {
  const rows = [];
  const walk = (some) => {
    for (const child of some.children) {
      if (rows.length >= ROWS) return;
      rows.push(child);
      walk(child);
    }
  };
  walk(grown.root);
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Table of prefixes, scrollable"><table>
    <caption class="unseen">Prefixes, each followed by what comes after it</caption>
    <thead><tr><th scope="col">After</th><th scope="col" class="number">Blocks</th><th scope="col" class="number">Ranks</th>
      <th scope="col">On</th><th scope="col">LoRA</th><th scope="col">Salted</th></tr></thead>
    <tbody>${rows.map(({ row, node, level, blocks, ...run }) => html`<tr key=${row} class=${row === chosen ? "chosen" : ""}>
      <th scope="row"><button class="link" style=${{ paddingLeft: `${Math.min(level - 1, 20) * 14}px` }}
        onClick=${() => choose(row)}>${node.depth ? `${counted(node.depth, "block")}` : "the start"}</button></th>
      <td class="number">${number(blocks)}</td><td class="number">${ranksOf(run)}</td>
      <td>${mediaOf(node.by_medium).map((medium) => `${number(node.by_medium[medium])} ${medium}`).join(", ") || "–"}</td>
      <td>${node.lora ?? "–"}</td><td>${node.salted ? "yes" : "–"}</td></tr>`)}</tbody></table>
    ${grown.all.length > rows.length && html`<p class="faint">The first ${number(rows.length)} of ${number(grown.all.length)}.</p>`}
  </div>`;
}
