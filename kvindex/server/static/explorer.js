// The match explorer: a prompt, and for each rank how far it matches, where it ends and why.

import { html, useState } from "./vendor/htm-preact-3.1.1.js";
import { STANDINGS, counted, number, partitionName, rankName, standing } from "./format.js";
import { askJson } from "./live.js";

const ROWS = 100;

export function readTokens(text) {
  const words = text.replace(/[[\],;]/g, " ").trim().split(/\s+/).filter(Boolean);
  const wrong = words.findIndex((word) => !/^\d{1,18}$/.test(word));
  if (wrong >= 0) throw new Error(`token ${wrong + 1} is no number: ${words[wrong].slice(0, 30)}`);
  if (!words.length) throw new Error("there are no token ids: write numbers with spaces or commas");
  return words.map(Number);
}

export function ExplorerView({ live }) {
  const { partitions } = live.fleet;
  const [state, setState] = useState({ found: null, trouble: "", asking: false });
  const [place, setPlace] = useState(0);
  const [form, setForm] = useState("tokens");
  const partition = partitions[place] || partitions[0];
  if (!partition) {
    return html`<section class="empty"><h2>No engines yet</h2>
      <p>There is nobody to match a prompt against: the Fleet view says how to register one.</p></section>`;
  }
  const asText = form === "text" && partition.tokenizer;
  const submit = async (event) => {
    event.preventDefault();
    const said = new FormData(event.target);
    const question = { model: partition.model, routing_group: partition.routing_group };
    if (said.get("lora")) question.lora = said.get("lora");
    if (said.get("salt")) question.salt = said.get("salt");
    setState({ found: null, trouble: "", asking: true });
    try {
      if (asText) question.text = said.get("prompt");
      else question.token_ids = readTokens(said.get("prompt"));
      const body = JSON.stringify(question);
      const headers = { "Content-Type": "application/json" };
      const found = await askJson("/api/explain", { method: "POST", headers, body });
      setState({ found, trouble: "", asking: false });
    } catch (error) {
      setState({ found: null, trouble: error.message, asking: false });
    }
  };
  return html`
    <h2 class="unseen">Match</h2>
    <form class="ask" onSubmit=${submit} aria-label="A prompt">
      <div class="filters">
        <label>Partition <select value=${place} onChange=${(event) => setPlace(Number(event.target.value))}>
          ${partitions.map((some, row) => html`<option value=${row}>${partitionName(some)}</option>`)}</select></label>
        <label>LoRA <input name="lora" placeholder="none" /></label>
        <label>Salt <input name="salt" placeholder="none" autocomplete="off" /></label>
        <div class="chips" role="group" aria-label="The prompt is">
          <button type="button" class="chip" aria-pressed=${!asText} onClick=${() => setForm("tokens")}>Token ids</button>
          <button type="button" class="chip" aria-pressed=${asText} disabled=${!partition.tokenizer}
            onClick=${() => setForm("text")}>Text</button>
        </div>
      </div>
      <label class="prompt">${asText ? "Prompt, with its chat template applied" : "Token ids"}
        <textarea name="prompt" rows="5" spellcheck=${false} required
          placeholder=${asText ? "You are a helpful assistant. …" : "[151644, 8948, 198, …] or numbers with spaces"}></textarea></label>
      ${!partition.tokenizer && html`<p class="faint">Text can be asked for once an engine's HTTP address is known to the
        service. Until then, an engine gives the ids: curl ENGINE/tokenize.</p>`}
      <button class="main" disabled=${state.asking}>${state.asking ? "Asking …" : "Explain the match"}</button>
    </form>
    <div aria-live="polite">
      ${state.trouble && html`<div class="notice bad" role="alert">No answer: ${state.trouble}.</div>`}
      ${state.found && html`<${Answer} found=${state.found} />`}
      ${!state.found && !state.trouble && !state.asking && html`<p class="empty">
        Give a prompt to see which ranks hold its beginning, how far, and why the match ends there.</p>`}
    </div>
  `;
}

function Answer({ found }) {
  const [hits, setHits] = useState(false);
  const best = found.ranks[0];
  const holding = found.ranks.filter((some) => some.match.tokens);
  const rows = (hits ? holding : found.ranks).slice(0, ROWS);
  const all = hits ? holding.length : found.ranks.length + found.left_out;
  return html`<section aria-label="Answer">
    <p class="summary"><strong>${best.match.tokens
      ? `${rankName(best)} holds most: ${number(best.match.tokens)} of ${counted(found.tokens, "token")}`
      : `No rank holds the beginning of these ${counted(found.tokens, "token")}`}.</strong>
      ${" "}${number(holding.length)} of ${counted(found.ranks.length, "rank")} hold some of it.
      <label class="inline"><input type="checkbox" checked=${hits} onChange=${(event) => setHits(event.target.checked)} /> only these</label></p>
    <p class="legend"><span><i class="bar hit"></i> matches</span> <span><i class="bar held"></i> resident, but out of reach</span>
      <span><i class="bar miss"></i> not resident</span></p>
    <ol class="answers">${rows.map((some) => html`<${Row} key=${rankName(some)} some=${some} tokens=${found.tokens} />`)}</ol>
    ${all > rows.length && html`<p class="faint">The first ${number(rows.length)} of ${number(all)}, longest match first.</p>`}
  </section>`;
}

function Row({ some, tokens }) {
  const { match, held } = some;
  const stands = standing(match);
  const share = (count) => `${(Math.min(count, tokens) / Math.max(1, tokens)) * 100}%`;
  const media = Object.entries(match.by_medium).map(([medium, count]) => `${number(count)} ${medium}`);
  return html`<li>
    <div class="answer-head">
      <span class="name">${rankName(some)}</span>
      <span class=${`badge ${stands}`}><span aria-hidden="true">${STANDINGS[stands].glyph}</span> ${STANDINGS[stands].label}</span>
      <span class="figure">${number(match.tokens)}${match.upper_bound ? " at most" : ""} <span class="faint">of ${counted(tokens, "token")}${media.length ? ` · ${media.join(", ")} blocks` : ""}</span></span>
    </div>
    <div class="bar" role="img" aria-label=${`${number(match.tokens)} of ${counted(tokens, "token")} match`}>
      ${(held ? held.spans : []).map(([start, stop]) => html`<div class="held" style=${{ left: share(start), width: share(stop - start) }}></div>`)}
      <div class="hit" style=${{ left: 0, width: share(match.tokens) }}></div>
    </div>
    <p>${some.text}.${some.notes.length > 0 && html` <span class="faint">${some.notes.join("; ")}.</span>`}</p>
  </li>`;
}
