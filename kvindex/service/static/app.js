// The page: its header, its four views, and what is said when something is wrong.

import { html, render, useEffect, useErrorBoundary, useMemo, useState } from "./html.js";
import { ago, clock } from "./format.js";
import { Live } from "./live.js";
import { FleetView } from "./fleet.js";
import { PrefixesView } from "./prefixes.js";
import { ExplorerView } from "./explorer.js";
import { TimelineView } from "./timeline.js";

const VIEWS = {
  fleet: ["Fleet", FleetView],
  prefixes: ["Prefixes", PrefixesView],
  match: ["Match", ExplorerView],
  timeline: ["Timeline", TimelineView],
};

const viewNow = () => {
  const name = location.hash.slice(1).split("?")[0];
  return VIEWS[name] ? name : "fleet";
};

function useView() {
  const [view, setView] = useState(viewNow);
  useEffect(() => {
    const follow = () => setView((before) => (location.hash === "#main" ? before : viewNow()));
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  return view;
}

function useLive() {
  const [, redraw] = useState(0);
  const live = useMemo(() => new Live(() => redraw((count) => count + 1)), []);
  useEffect(() => {
    live.start();
    const tick = setInterval(() => redraw((count) => count + 1), 1_000); // ages grow
    return () => clearInterval(tick);
  }, []);
  return live;
}

function Theme() {
  const system = () => (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const [theme, setTheme] = useState(document.documentElement.dataset.theme || system());
  const other = theme === "dark" ? "light" : "dark";
  const toggle = () => {
    document.documentElement.dataset.theme = other;
    try {
      localStorage.setItem("kvindex-theme", other);
    } catch {
      // It holds until the page is left.
    }
    setTheme(other);
  };
  return html`<button class="quiet" onClick=${toggle} aria-label=${`Use ${other} colours`}>
    <span aria-hidden="true">${theme === "dark" ? "☀" : "☾"}</span>
  </button>`;
}

function Pulse({ live }) {
  if (live.connection === "live") {
    const old = (Date.now() - live.fleetAt) / 1000;
    return html`<p class="pulse live"><span aria-hidden="true">●</span> Live
      <span class="faint">read ${ago(Math.max(0, old - 0.6))}</span></p>`;
  }
  const words = live.connection === "lost" ? "Not connected" : "Connecting …";
  return html`<p class=${`pulse ${live.connection}`}><span aria-hidden="true">○</span> ${words}</p>`;
}

function Trouble({ live }) {
  if (live.connection !== "lost") return null;
  const lost = ago((Date.now() - live.lostAt) / 1000);
  const left = Math.max(0, Math.ceil((live.retryAt - Date.now()) / 1000));
  const from = live.fleetAt ? `What you see is from ${clock(live.fleetAt / 1000)}.` : "";
  // What counts seconds stands outside the alert, which would be read aloud again and again.
  return html`<div class="notice bad">
    <span role="alert"><strong>Connection lost</strong>: ${live.trouble}. ${from}</span>
    ${" "}That was ${lost}. ${left ? `Trying again in ${left} s.` : "Trying now."}
  </div>`;
}

function Header({ view, live }) {
  const links = Object.entries(VIEWS).map(
    ([name, [title]]) =>
      html`<a href=${"#" + name} aria-current=${name === view ? "page" : null}>${title}</a>`,
  );
  return html`<header>
    <h1><img src="/static/icon.svg" alt="" width="22" height="22" /> kvindex</h1>
    <nav aria-label="Views">${links}</nav>
    <${Pulse} live=${live} />
    <${Theme} />
  </header>`;
}

function Body({ view, live }) {
  const [error, reset] = useErrorBoundary();
  useEffect(() => reset(), [view]);
  if (error) {
    return html`<div class="notice bad" role="alert">This view cannot be shown: ${error.message}.
      Please report it, with the browser's version.</div>`;
  }
  const Shown = VIEWS[view][1];
  if (!live.fleet) return html`<p class="empty">Reading the fleet …</p>`;
  return html`<${Shown} live=${live} />`;
}

function App() {
  const live = useLive();
  const view = useView();
  useEffect(() => {
    document.title = `${VIEWS[view][0]} · kvindex`;
  }, [view]);
  return html`
    <${Header} view=${view} live=${live} />
    <main id="main" tabindex="-1">
      <${Trouble} live=${live} />
      <${Body} view=${view} live=${live} />
    </main>
    <div class="unseen" role="status" aria-live="polite">${live.said}</div>
    <footer>${live.fleet ? `kvindex ${live.fleet.version}` : ""}</footer>
  `;
}

render(html`<${App} />`, document.getElementById("app"));
