// What was asked over time, as small charts: the server keeps the past, so it is there from the first look.

import { html, useEffect, useState } from "./html.js";
import { age, clock, compact, number, partitionKey, partitionName, sum } from "./format.js";
import { askJson } from "./live.js";

const WINDOWS = [[300, "5 minutes"], [900, "15 minutes"], [3600, "hour"], [21_600, "6 hours"], [86_400, "day"]];
const READ = 5_000; // ms
const HEIGHT = 60; // of a chart, in its own units; its width is 100

const rate = (value) => (value === null ? "–" : value >= 100 ? compact(Math.round(value)) : value.toFixed(value < 10 ? 1 : 0));
const percent = (value) => (value === null ? "–" : `${Math.round(value * 100)} %`);
const whole = (value) => (value === null ? "–" : number(value));
const share = (part, all) => (all ? part / all : null);

export function Traffic({ live }) {
  const [seconds, setSeconds] = useState(900);
  const [place, setPlace] = useState("");
  const [cursor, setCursor] = useState(null); // a point that is looked at; null: the last one
  const found = useTraffic(live, seconds, place);
  if (!found) return null;
  const charts = chartsOf(found);
  const last = charts[0].rows.length - 1;
  const at = cursor === null ? last : Math.min(cursor, last);
  return html`<section class="traffic" aria-label="Traffic">
    <div class="traffic-head">
      <h3>Traffic</h3>
      <label>The last <select value=${seconds} onChange=${(event) => setSeconds(Number(event.target.value))}>
        ${WINDOWS.map(([value, name]) => html`<option value=${value}>${name}</option>`)}</select></label>
      ${found.partitions.length > 1 && html`<label>of <select value=${place} onChange=${(event) => setPlace(event.target.value)}>
        <option value="">all models</option>
        ${found.partitions.map((some) => html`<option value=${partitionKey(some)}>${partitionName(some)}</option>`)}</select></label>`}
      <span class="faint when">${cursor === null || !charts[0].rows[at] ? "" : clock(charts[0].rows[at].at)}</span>
    </div>
    <div class="charts">${charts.map((chart) => html`<${Chart} key=${chart.title} chart=${chart} found=${found} at=${at}
      looking=${cursor !== null} look=${setCursor} />`)}</div>
  </section>`;
}

function useTraffic(live, seconds, place) {
  const [found, setFound] = useState(null);
  useEffect(() => {
    let left = false;
    const read = () => {
      if (document.hidden) return;
      const query = new URLSearchParams({ seconds });
      if (place) {
        const [model, group] = JSON.parse(place);
        query.set("model", model);
        query.set("routing_group", group);
      }
      // A server that is gone is said by the header; the charts stay as they were.
      askJson(`/api/traffic?${query}`).then((answer) => left || setFound(answer), () => {});
    };
    read();
    const tick = setInterval(read, READ);
    document.addEventListener("visibilitychange", read);
    return () => {
      left = true;
      clearInterval(tick);
      document.removeEventListener("visibilitychange", read);
    };
  }, [seconds, place, live.connection]);
  return found;
}

// Each chart: its lines, the value of each line at each point, and how to say it.
function chartsOf({ points, step }) {
  const rows = points.at.map((at, row) => Object.fromEntries(Object.entries(points).map(([name, column]) => [name, column[row]])));
  const reported = sum(points.requests) > 0;
  const queries = rows.map((row) => (row.seconds ? row.queries / row.seconds : null));
  const time = rows.map((row) => (row.queries ? row.nanoseconds / row.queries / 1e6 : null));
  const hits = [{
    name: "attainable", tone: "c0", says: "what the best rank held",
    values: rows.map((row) => (reported ? share(row.attainable, row.asked) : share(row.best_match, row.tokens))),
  }];
  if (reported) {
    hits.push({ name: "chosen", tone: "c1", says: "what the chosen rank held", values: rows.map((row) => share(row.chosen, row.asked)) });
  }
  if (sum(points.reported) > 0) {
    hits.push({ name: "delivered", tone: "c2", says: "what its engine found cached", values: rows.map((row) => share(row.delivered, row.reported)) });
  }
  const away = rows.map((row) => row.ranks - row.live);
  const most = Math.max(1, ...queries.map((value) => value || 0));
  return [
    {
      title: "Queries", unit: "per second", rows, step, most, show: rate, top: rate(most),
      lines: [{ name: "queries", tone: "c0", values: queries, filled: true }],
      note: (row) => (time[row] === null || time[row] === undefined ? "" : `${time[row].toFixed(2)} ms each`),
    },
    {
      title: "Hit rate", unit: "of the prompts' tokens", rows, step, most: 1, show: percent, top: "100 %", lines: hits,
      note: () => "", none: "No prompts were asked for.",
    },
    {
      title: "Ranks not live", unit: "", rows, step, most: Math.max(1, ...away), show: whole, top: number(Math.max(1, ...away)),
      lines: [{ name: "not live", tone: "c3", values: away, filled: true }],
      note: (row) => (rows[row] ? `of ${number(rows[row].ranks)}` : ""),
    },
  ];
}

function Chart({ chart, found, at, looking, look }) {
  const { rows, lines, show, step } = chart;
  const from = found.now - found.seconds;
  const x = (time) => Math.max(0, Math.min(100, ((time - from) / found.seconds) * 100));
  const y = (value) => HEIGHT - (value / chart.most) * (HEIGHT - 4) - 1;
  const middle = (row) => x(rows[row].at + step / 2);
  const known = rows.length ? x(rows[0].at) : 100;
  const empty = lines.every((line) => line.values.every((value) => value === null));
  const words = (row) => lines.map((line) => `${lines.length > 1 ? `${line.name} ` : ""}${show(line.values[row] ?? null)}`).join(", ");
  const pick = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const share = ((event.clientX - box.left) / box.width) * 100;
    const nearest = rows.reduce((best, _, row) => (Math.abs(middle(row) - share) < Math.abs(middle(best) - share) ? row : best), 0);
    if (rows.length) look(nearest);
  };
  const keys = (event) => {
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: rows.length - 1 }[event.key];
    if (event.key === "Escape") look(null);
    else if (to === undefined || !rows.length) return;
    else look(Math.max(0, Math.min(rows.length - 1, to)));
    event.preventDefault();
  };
  return html`<figure class="chart">
    <figcaption><span class="title">${chart.title}</span> <span>${chart.unit}</span>
      <span class="top" aria-hidden="true">up to ${chart.top}</span></figcaption>
    <p class="values">${lines.map((line) => html`<span key=${line.name} title=${line.says}>${lines.length > 1 || line.says ? html`<i class=${line.tone}></i>` : ""}
      <b>${show(line.values[at] ?? null)}</b> ${line.says ? html`<span class="faint">${line.name}</span>` : ""}</span>`)}
      <span class="faint">${chart.note(at)}</span></p>
    <div class="plot" tabindex="0" role="slider" aria-label=${`${chart.title} over the last ${age(found.seconds)}`}
      aria-valuemin="0" aria-valuemax=${Math.max(0, rows.length - 1)} aria-valuenow=${Math.max(0, at)}
      aria-valuetext=${rows[at] ? `${clock(rows[at].at)}: ${words(at)}` : "nothing is known yet"}
      onPointerMove=${pick} onPointerLeave=${() => look(null)} onBlur=${() => look(null)} onKeyDown=${keys}>
      ${known > 0.5 && html`<span class="unknown" style=${{ width: `${known}%` }} title="before the service was watched"></span>`}
      <svg viewBox=${`0 0 100 ${HEIGHT}`} preserveAspectRatio="none" aria-hidden="true">
        ${lines.map((line) => pieces(line.values).map((piece) => html`
          ${line.filled && html`<path class=${`area ${line.tone}`} d=${`${path(piece, middle, y)} L${middle(piece.at(-1)[0])} ${HEIGHT} L${middle(piece[0][0])} ${HEIGHT} Z`} />`}
          <path class=${`line ${line.tone}`} d=${path(piece, middle, y)} />`))}
        ${looking && rows[at] && html`<path class="cursor" d=${`M${middle(at)} 0 V${HEIGHT}`} />`}
      </svg>
      ${empty && html`<span class="none faint">${chart.none || "Nothing is known yet."}</span>`}
    </div>
    <p class="axis faint" aria-hidden="true"><span>${age(found.seconds)} ago</span><span>now</span></p>
  </figure>`;

  // Values without holes between them: [row, value].
  function pieces(values) {
    const found_ = [];
    let last = null;
    values.forEach((value, row) => {
      if (value === null || value === undefined) return (last = null);
      const gap = last === null || rows[row].at - rows[row - 1].at > 2 * step;
      if (gap) found_.push((last = []));
      last.push([row, value]);
    });
    return found_;
  }
}

function path(piece, x, y) {
  const dots = piece.length > 1 ? piece : [piece[0], piece[0]];
  return dots.map(([row, value], place) => `${place ? "L" : "M"}${(x(row) + (piece.length > 1 ? 0 : place * 0.8)).toFixed(2)} ${y(value).toFixed(2)}`).join(" ");
}
