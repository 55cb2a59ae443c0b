// Numbers, times and states in words.

const PLAIN = new Intl.NumberFormat("en");

export const number = (value) => PLAIN.format(value);

export function compact(value) {
  if (value < 10_000) return number(value);
  for (const [unit, size] of [["k", 1e3], ["M", 1e6], ["G", 1e9]]) {
    if (value < size * 1000) return (value / size).toFixed(value < size * 100 ? 1 : 0) + unit;
  }
  return number(value);
}

export const counted = (value, one, many = one + "s") =>
  `${number(value)} ${value === 1 ? one : many}`;

export function age(seconds) {
  if (seconds === null || seconds === undefined) return "never";
  if (seconds < 1) return "now";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129_600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86_400)} d`;
}

export const ago = (seconds) => (seconds < 1 ? "just now" : `${age(seconds)} ago`);

const CLOCK = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
const DAY = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });

export const clock = (seconds) => CLOCK.format(seconds * 1000);
export const day = (seconds) => DAY.format(seconds * 1000);

export const NAMES = new Intl.Collator("en", { numeric: true }); // "vllm-9" before "vllm-10"

export const rankName = (rank) => `${rank.worker}/${rank.dp_rank}`;

export const partitionName = (some) =>
  (some.model || "any model") + (some.routing_group === "default" ? "" : ` · ${some.routing_group}`);

export const partitionKey = (some) => JSON.stringify([some.model, some.routing_group]);

// How a rank stands, worst last. The glyph says the same as the colour.
export const STANDINGS = {
  live: { glyph: "●", label: "live and complete", says: "All that is known to exist was applied." },
  partial: {
    glyph: "◐",
    label: "live, not complete",
    says: "In order, but what came before was not seen: it may hold more than is known.",
  },
  drained: { glyph: "⊘", label: "drained", says: "An operator wants it to get no more requests." },
  asleep: { glyph: "☾", label: "asleep", says: "Its engine sleeps, and gets no requests." },
  syncing: { glyph: "⇣", label: "syncing", says: "Connected; a replay is catching up." },
  repairing: { glyph: "↻", label: "repairing", says: "Batches are missing and are asked for." },
  stale: { glyph: "◌", label: "stale", says: "No sign of life for too long." },
  unwell: { glyph: "!", label: "unwell", says: "Its engine is unwell, and gets no requests." },
  ejected: { glyph: "⊗", label: "ejected", says: "Its engine failed, and gets no requests for a while." },
  connecting: { glyph: "○", label: "connecting", says: "No connection to its publisher." },
  closed: { glyph: "✕", label: "closed", says: "Not followed any more." },
};

// Of its events, and of the rank as a whole: one that gets no requests stands as that.
export const streamOf = (rank) =>
  rank.state === "live" && !rank.complete ? "partial" : STANDINGS[rank.state] ? rank.state : "closed";

export const standing = (rank) => rank.routed?.left_out || streamOf(rank);

export const whyLeftOut = ({ reason, seconds }) => reason + (seconds === null ? "" : `; tried again in ${age(Math.max(1, seconds))}`);

export const KINDS = {
  state: { glyph: "●", label: "state" },
  gap: { glyph: "▲", label: "gap" },
  replay: { glyph: "↻", label: "replay" },
  loss: { glyph: "✖", label: "loss" },
  restart: { glyph: "⟲", label: "restart" },
  added: { glyph: "+", label: "added" },
  removed: { glyph: "−", label: "removed" },
};

// The first clause of why a rank stands as it does, without addresses: what ranks have in common.
export function headline({ reason, endpoint, replay_endpoint: replay }) {
  let words = reason;
  if (endpoint) words = words.replaceAll(endpoint, "its publisher");
  if (replay) words = words.replaceAll(replay, "its replay endpoint");
  return words.replace(/ \([^()]*\)/g, "").split(/[;:] /)[0];
}

const MEDIA = ["GPU", "CPU", "CPU_PINNED", "DISK", "STORAGE", "FS", "OBJ", "EXTERNAL"];

export function mediaOf(counts) {
  const place = (medium) => (MEDIA.indexOf(medium) + MEDIA.length + 1) % (MEDIA.length + 1);
  return Object.keys(counts).sort((a, b) => place(a) - place(b) || a.localeCompare(b));
}

export const sum = (values) => values.reduce((total, value) => total + value, 0);
