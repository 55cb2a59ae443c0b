"""The look of the HTML report: two palettes, both with enough contrast to read."""

from __future__ import annotations

__all__ = ["STYLE"]

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --text: #1b1f24; --soft: #57606a;
  --line: #d5dae0; --elsewhere: #c2410c; --evicted: #b58900; --here: #6d28d9;
  --unreachable: #9d5b8b; --first: #2563a8; --unknown: #7b838c; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --card: #1d2126; --text: #e6e9ed;
  --soft: #a3abb5; --line: #363c44; --elsewhere: #fb8c50; --evicted: #e0b93d; --here: #b39bf5;
  --unreachable: #d99ac7; --first: #6aa8e8; --unknown: #8d959f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px; max-width: 1080px; background: var(--page);
  color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.7rem; } h2 { margin: 0 0 8px; font-size: 1.05rem; }
header p, footer, section > p, div > p { color: var(--soft); }
header p { margin: 4px 0 0; } footer { font-size: .9rem; }
section { margin: 16px 0; padding: 20px; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; }
section.cards { padding: 0; border: 0; background: none; display: grid; gap: 16px;
  grid-template-columns: repeat(auto-fit, minmax(260px, 1fr)); }
article { padding: 20px; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; }
article p { margin: 0; font-size: .95rem; }
article p.much { font-size: 2.2rem; font-weight: 650; line-height: 1.3; }
article:nth-child(1) .much { color: var(--elsewhere); }
section.two { display: grid; gap: 24px;
  grid-template-columns: repeat(auto-fit, minmax(min(320px, 100%), 1fr)); }
section.two > div { min-width: 0; }
svg { display: block; width: 100%; height: auto; margin: 8px 0; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
svg .grid { stroke: var(--line); stroke-width: 1; }
.elsewhere { fill: var(--elsewhere); background: var(--elsewhere); }
.evicted { fill: var(--evicted); background: var(--evicted); }
.here { fill: var(--here); background: var(--here); }
.unreachable { fill: var(--unreachable); background: var(--unreachable); }
.first { fill: var(--first); background: var(--first); }
.unknown { fill: var(--unknown); background: var(--unknown); }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 10px; border-bottom: 1px solid var(--line); text-align: right; }
th { font-weight: 500; } thead th { color: var(--soft); font-size: .9rem; }
th:first-child { text-align: left; padding-left: 0; white-space: nowrap; }
td:last-child { padding-right: 0; }
td code { font-size: .8rem; }
summary { color: var(--soft); cursor: pointer; }
li { margin: 4px 0; }
@media (max-width: 600px) { th:first-child { white-space: normal; } body { padding: 12px; } }
@media print { section, article { break-inside: avoid; } }
"""
