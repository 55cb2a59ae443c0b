// What the server says: the fleet, read again and again, and news as they happen.

import { rankName } from "./format.js";

const REFRESH = 3_000; // ms between reads of the fleet while the page is looked at
const NEWS_GAP = 400; // ms at least between a read that news caused and the one before it
const SILENCE = 25_000; // ms without a byte of the stream after which it is taken for dead
const MOST_HAPPENINGS = 5_000; // as many as the server keeps
const PACE_OVER = 20_000; // ms over which batches are counted
const LONGEST_WAIT = 15_000;

export class AskError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function ask(path, options = {}) {
  let answer;
  try {
    const url = new URL(path, location.origin); // without the token that the page's URL may have
    answer = await fetch(url, { credentials: "same-origin", cache: "no-store", ...options });
  } catch {
    throw new AskError(0, "the server does not answer");
  }
  if (answer.ok) return answer;
  let words = "";
  try {
    words = (await answer.json()).error;
  } catch {
    // The status says enough.
  }
  if (answer.status === 401) words = "this server wants its token: reload the page and give it";
  throw new AskError(answer.status, words || `the server answers ${answer.status}`);
}

export const askJson = async (path, options) => (await ask(path, options)).json();

export class Live {
  constructor(changed) {
    this.changed = changed;
    this.fleet = null;
    this.fleetAt = 0; // ms, by this machine's clock
    this.skew = 0; // s, the server's clock before this machine's
    this.happenings = []; // newest last
    this.since = 0; // s; from then on all that happened is known
    this.reads = []; // {at, seqs}: the last batches of all ranks, oldest first
    this.connection = "starting"; // live | lost
    this.trouble = "";
    this.lostAt = 0;
    this.retryAt = 0;
    this.said = "";
    this.lastId = "";
    this.unsaid = [];
    this.reading = null;
    this.stopper = null;
  }

  start() {
    this.run();
    setInterval(() => {
      if (!document.hidden && this.connection === "live") this.refresh().catch(() => this.cut());
    }, REFRESH);
    setInterval(() => this.say(), 2_000);
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden && this.connection === "live") this.refresh().catch(() => this.cut());
    });
  }

  now() {
    return Date.now() / 1000 + this.skew;
  }

  async run() {
    for (let wait = 500; ; wait = Math.min(wait * 2, LONGEST_WAIT)) {
      try {
        await this.refresh();
        if (!this.lastId) await this.remember();
        await this.stream(() => (wait = 500));
        this.lose("the server ended the stream of news");
      } catch (error) {
        this.lose(error.message);
      }
      const pause = wait * (0.75 + Math.random() / 2);
      this.retryAt = Date.now() + pause;
      this.changed();
      await new Promise((resolve) => setTimeout(resolve, pause));
    }
  }

  cut() {
    if (this.stopper) this.stopper.abort();
  }

  lose(trouble) {
    if (this.connection !== "lost") this.lostAt = Date.now();
    this.connection = "lost";
    this.trouble = trouble;
    this.changed();
  }

  // One read at a time; who asks meanwhile gets the same.
  refresh() {
    this.reading ??= askJson("/api/fleet")
      .then((fleet) => {
        this.fleet = fleet;
        this.fleetAt = Date.now();
        this.skew = fleet.now - this.fleetAt / 1000;
        this.note(fleet);
        this.changed();
      })
      .finally(() => (this.reading = null));
    return this.reading;
  }

  async remember() {
    const past = await askJson("/api/timeline");
    this.since = past.since;
    this.keep(past.happenings);
    this.lastId = past.id;
  }

  keep(happenings) {
    this.happenings = happenings.slice(-MOST_HAPPENINGS);
    if (happenings.length > MOST_HAPPENINGS) this.since = this.happenings[0].at;
  }

  // How many things have happened since the service started: the ids count them.
  get happened() {
    return Number(this.lastId.split("-").at(-1)) || 0;
  }

  note(fleet) {
    const last = this.reads.at(-1);
    if (last && this.fleetAt - last.at < 2_000) return;
    const seqs = new Map(fleet.ranks.map(({ epoch, seq, ...rank }) => [rankName(rank), { epoch, seq }]));
    this.reads = [...this.reads.filter((read) => this.fleetAt - read.at < PACE_OVER), { at: this.fleetAt, seqs }];
  }

  // Batches a second of a rank, or null while that is not known.
  pace(rank) {
    const first = this.reads[0];
    const then = first && first.seqs.get(rankName(rank));
    const seconds = first ? (this.fleetAt - first.at) / 1000 : 0;
    if (seconds < 1 || !then || then.seq === null || rank.epoch !== then.epoch) return null;
    return Math.max(0, rank.seq - then.seq) / seconds;
  }

  async stream(opened) {
    this.stopper = new AbortController();
    const headers = this.lastId ? { "Last-Event-ID": this.lastId } : {};
    const answer = await ask("/events", { headers, signal: this.stopper.signal });
    opened();
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let silence = 0;
    const listen = () => {
      clearTimeout(silence);
      silence = setTimeout(() => this.cut(), SILENCE);
    };
    try {
      let text = "";
      for (;;) {
        listen();
        const { value, done } = await reader.read();
        if (done) return;
        const pieces = (text + value).split("\n\n");
        text = pieces.pop();
        for (const piece of pieces) await this.take(piece);
      }
    } catch {
      throw new AskError(0, "the connection to the server broke");
    } finally {
      clearTimeout(silence);
      this.cut();
    }
  }

  async take(piece) {
    const event = { type: "message", data: "" };
    for (const line of piece.split("\n")) {
      if (line.startsWith("id: ")) event.id = line.slice(4);
      if (line.startsWith("event: ")) event.type = line.slice(7);
      if (line.startsWith("data: ")) event.data += line.slice(6);
    }
    if (!event.data) return;
    if (event.id) this.lastId = event.id;
    const data = JSON.parse(event.data);
    if (event.type === "fleet") {
      this.connection = "live";
      this.trouble = "";
      if (data.missed !== 0) await this.remember(); // another run of the server, or too long ago
      this.changed();
      return;
    }
    this.keep([...this.happenings, data]);
    this.unsaid.push(data);
    this.changed();
    this.refreshSoon();
  }

  refreshSoon() {
    if (this.soon) return;
    this.soon = setTimeout(() => {
      this.soon = 0;
      this.refresh().catch(() => this.cut());
    }, Math.max(0, NEWS_GAP - (Date.now() - this.fleetAt)));
  }

  // News for screen readers: a few at a time, not each.
  say() {
    if (!this.unsaid.length) return;
    const news = this.unsaid.splice(0);
    const shown = news.slice(-3).map((some) => `${rankName(some)}: ${some.text}`);
    const more = news.length > 3 ? `${news.length} things happened; the last: ` : "";
    this.said = more + shown.join(". ");
    this.changed();
  }
}
