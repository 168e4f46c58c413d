// The page: its head, its panes, and what draws them again when something has changed.
import { drawTimed, html, render } from './html.js';
import { Dialogs, KeyForm } from './dialogs.js';
import { followKeys } from './keys.js';
import { follow, wake } from './node.js';
import { Pane } from './pane.js';
import { clients } from './pane_clients.js';
import { decisions } from './pane_decisions.js';
import { engines } from './pane_engines.js';
import { hits } from './pane_hits.js';
import { peers, Partition } from './pane_peers.js';
import { prefixes } from './pane_prefixes.js';
import { shadows } from './pane_shadows.js';
import { tenants } from './pane_tenants.js';
import { verdict } from './pane_verdict.js';
import { fromHash, toHash } from './permalink.js';
import { fetchPast, Scrubber } from './scrubber.js';
import { change, onChange, shown, state } from './state.js';
import { nextTheme, themeName, useTheme } from './theme.js';

export const PANES = [verdict, engines, prefixes, decisions, hits, shadows, peers, clients, tenants];

const root = document.getElementById('page');
const SETTLED_MS = 200; // before what is looked at is written into the address

let due = false, written = location.hash, settled = 0;

function Head() {
  const now = state.live.verdict;
  return html`<header>
    <h1 title=${now ? `${now.node}, release ${now.release}` : ''}><img src="/page/icon.svg" alt="" width="20" height="20" /> <span>${now?.node || 'Ranvier'}</span>
      <small>${now ? `release ${now.release}` : ''}</small></h1>
    <${Scrubber} />
    <input id="filter" type="search" placeholder="filter  /" aria-label="filter" value=${state.filter}
      onInput=${(event) => change({ filter: event.target.value })} />
    <button id="theme" title="light, dark or as the system (t)" onClick=${nextTheme}>${themeName()}</button>
    <button id="help" title="keys (?)" onClick=${() => change({ dialog: { kind: 'help' } })}>?</button>
  </header>`;
}

function Banners() {
  return html`<div class="banners" role="status">
    ${state.trouble && !state.asksKey && html`<p class="banner down">■ ${state.trouble}</p>`}
    ${state.note && html`<p class="banner note">${state.note} <button onClick=${() => change({ note: '' })}>close</button></p>`}
    <${Partition} peers=${shown('peers')} verdict=${shown('verdict')} />
  </div>`;
}

function App() {
  if (state.asksKey) return html`<${KeyForm} />`;
  const waits = state.chosenAt !== null && state.past?.of !== state.chosenAt;
  return html`<${Head} /><${Banners} />
    <main class=${waits ? 'waits' : ''} aria-busy=${waits}>${PANES.map((pane) => html`<${Pane} key=${pane.id} pane=${pane} />`)}</main>
    <${Dialogs} />`;
}

function draw() {
  due = false;
  render(html`<${App} />`, root);
  drawTimed(state.at, state.chosenAt, themeName());
  clearTimeout(settled);
  settled = setTimeout(writeHash, SETTLED_MS);
}

// Browsers take milliseconds for this, and refuse it if it is too often: not with each second that a slider passes.
function writeHash() {
  const hash = toHash(state);
  if (hash !== written && !state.asksKey) {
    written = hash;
    history.replaceState(null, '', hash);
  }
}

useTheme();
onChange(() => {
  if (!due) requestAnimationFrame(draw);
  due = true;
});
addEventListener('hashchange', () => {
  written = location.hash;
  change({ selected: {}, opened: {}, filter: '', chosenAt: null, past: null, ...fromHash(location.hash) });
  if (state.chosenAt !== null) fetchPast();
});
document.addEventListener('visibilitychange', wake);
followKeys();
draw();
follow();
const started = setInterval(() => { // a permalink to a time needs the node's own time first
  if (!state.at) return;
  clearInterval(started);
  if (state.chosenAt !== null && !state.past) fetchPast();
}, 50);
