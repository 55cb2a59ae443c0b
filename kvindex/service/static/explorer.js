// The match explorer: a prompt, and how far it matches on which ranks, where it ends and why.

import { html, useState } from "./html.js";
import { STANDINGS, counted, mediaOf, number, partitionName, rankName, standing } from "./format.js";
import { askJson } from "./live.js";

const ROWS = 100;
const MOST_NAMES = 200;

export function readTokens(text) {
  const words = text.replace(/[[\],;]/g, " ").trim().split(/\s+/).filter(Boolean);
  const wrong = words.findIndex((word) => !/^\d{1,18}$/.test(word));
  if (wrong >= 0) throw new Error(`token ${wrong + 1} is no number: ${words[wrong].slice(0, 30)}. For words, choose Text above`);
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
  const asText = form === "text";
  const withoutTokens = asText && !partition.tokenizer;
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
        <label class="place">Partition <select value=${place} onChange=${(event) => setPlace(Number(event.target.value))}>
          ${partitions.map((some, row) => html`<option value=${row}>${partitionName(some)}</option>`)}</select></label>
        <label>LoRA <input name="lora" placeholder="none" /></label>
        <label>Salt <input name="salt" placeholder="none" autocomplete="off" /></label>
        <div class="chips one" role="group" aria-label="The prompt is">
          <button type="button" class="chip" aria-pressed=${!asText} onClick=${() => setForm("tokens")}>Token ids</button>
          <button type="button" class="chip" aria-pressed=${asText} onClick=${() => setForm("text")}>Text</button>
        </div>
      </div>
      ${withoutTokens
        ? html`<${AskEngine} partition=${partition} />`
        : html`<label class="prompt" key=${form}>${asText ? "Prompt, with its chat template applied" : "Token ids"}
            <textarea name="prompt" rows="5" spellcheck="false" required
              placeholder=${asText ? "You are a helpful assistant. …" : "[151644, 8948, 198, …] or numbers with spaces"}></textarea></label>
          <button class="main" disabled=${state.asking}>${state.asking ? "Asking …" : "Explain the match"}</button>`}
    </form>
    <div aria-live="polite">
      ${state.trouble && html`<div class="notice bad" role="alert">No answer: ${state.trouble}.</div>`}
      ${state.found && html`<${Answer} found=${state.found} />`}
      ${!state.found && !state.trouble && !state.asking && html`<p class="empty">
        Give a prompt to see which ranks hold its beginning, how far, and why the match ends there.</p>`}
    </div>
  `;
}

const AskEngine = ({ partition }) => html`<div role="note">
  <p>The service knows no engine that turns text into the tokens of ${partitionName(partition)}: it asks engines that discovery
    found, or the one of <code>kvindex serve --tokenizer URL</code>. Until then, ask an engine and give the ids:</p>
  <pre>${`curl http://ENGINE:8000/tokenize -H 'Content-Type: application/json' \\
  -d '{"model": ${JSON.stringify(partition.model || "MODEL")}, "prompt": "You are a helpful assistant. …"}'`}</pre></div>`;

// Ranks with the same answer, as one.
function alike(ranks) {
  const groups = new Map();
  for (const some of ranks) {
    const { match, held, text, notes } = some;
    const key = JSON.stringify([match.tokens, match.upper_bound, match.lower_bound, standing(match), held && held.spans, text, notes]);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(some);
  }
  return [...groups.values()];
}

function Answer({ found }) {
  const best = found.ranks[0];
  const holding = found.ranks.filter((some) => some.match.tokens);
  const groups = alike(found.ranks.filter((some) => some.match.tokens || held(some)));
  const misses = found.ranks.filter((some) => !some.match.tokens && !held(some));
  const rows = groups.slice(0, ROWS);
  return html`<section aria-label="Answer">
    <p class="summary"><strong>${best.match.tokens
      ? `${rankName(best)} holds most: ${number(best.match.tokens)} of ${counted(found.tokens, "token")}`
      : `No rank holds the beginning of these ${counted(found.tokens, "token")}`}.</strong>
      ${holding.length > 0 && ` ${number(holding.length)} of ${counted(found.ranks.length + found.left_out, "rank")} hold some of it.`}</p>
    ${groups.length > 0 && html`<p class="legend"><span><i class="bar hit"></i> matches</span> <span><i class="bar held"></i> resident, but out of reach</span>
      <span><i class="bar miss"></i> not resident</span></p>`}
    <ol class="answers">${rows.map((some) => html`<${Row} key=${rankName(some[0])} ranks=${some} tokens=${found.tokens} />`)}
      ${misses.length > 0 && html`<${Misses} ranks=${misses} />`}</ol>
    ${groups.length > rows.length && html`<p class="faint">The first ${number(rows.length)} of ${number(groups.length)} answers, longest match first.</p>`}
    ${found.left_out > 0 && html`<p class="faint">${counted(found.left_out, "more rank")} with shorter matches: not shown.</p>`}
  </section>`;
}

const held = (some) => some.held && some.held.spans.length > 0;

// All that hold nothing, on one line; who they are, on demand.
function Misses({ ranks }) {
  const why = alike(ranks);
  const texts = new Set(ranks.map((some) => some.text.replace(/^0 of \d+ tokens: /, "")));
  return html`<li class="misses"><details>
    <summary><strong>${counted(ranks.length, "rank")}</strong> ${ranks.length === 1 ? "holds" : "hold"} nothing of it${ranks.some((some) => some.match.lower_bound) ? ", as far as events tell" : ""}
      ${texts.size === 1 && html`<span class="faint">: ${[...texts][0]}</span>`}</summary>
    ${why.map((some) => html`<p>${some[0].text}${some[0].notes.length > 0 ? `; ${some[0].notes.join("; ")}` : ""}:</p><${Names} ranks=${some} />`)}
  </details></li>`;
}

const Names = ({ ranks }) => html`<ul class="names">${ranks.slice(0, MOST_NAMES).map((some) => html`<li key=${rankName(some)}>${rankName(some)}</li>`)}
  ${ranks.length > MOST_NAMES && html`<li class="faint">and ${number(ranks.length - MOST_NAMES)} more</li>`}</ul>`;

// On which media, and how many blocks if that is the same for all.
function mediaWords(ranks) {
  const words = ranks.map(({ match }) => mediaOf(match.by_medium).map((medium) => `${number(match.by_medium[medium])} ${medium}`).join(", "));
  if (words.every((some) => some === words[0])) return words[0] && ` · ${words[0]} blocks`;
  return ` · on ${mediaOf(Object.assign({}, ...ranks.map(({ match }) => match.by_medium))).join(" or ")}`;
}

function Row({ ranks, tokens }) {
  const [some, ...others] = ranks;
  const { match } = some;
  const stands = standing(match);
  const share = (count) => `${(Math.min(count, tokens) / Math.max(1, tokens)) * 100}%`;
  const media = mediaWords(ranks);
  return html`<li>
    <div class="answer-head">
      <span class="name">${rankName(some)}</span>
      <span class=${`badge ${stands}`}><span aria-hidden="true">${STANDINGS[stands].glyph}</span> ${STANDINGS[stands].label}</span>
      <span class="figure">${number(match.tokens)}${match.upper_bound ? " at most" : ""}${match.lower_bound ? " at least" : ""} <span class="faint">of ${counted(tokens, "token")}${media}</span></span>
    </div>
    <div class="bar" role="img" aria-label=${`${number(match.tokens)} of ${counted(tokens, "token")} match`}>
      ${(some.held ? some.held.spans : []).map(([start, stop]) => html`<div class="held" style=${{ left: share(start), width: share(stop - start) }}></div>`)}
      <div class="hit" style=${{ left: 0, width: share(match.tokens) }}></div>
    </div>
    <p>${some.text}.${some.notes.length > 0 && html` <span class="faint">${some.notes.join("; ")}.</span>`}</p>
    ${others.length > 0 && html`<details><summary>and ${counted(others.length, "more rank")} with the same answer</summary><${Names} ranks=${others} /></details>`}
  </li>`;
}
