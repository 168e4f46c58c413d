// Engines: what each does now, and its load in the last quarter of an hour as a strip; with orders for who may give them.
import { Drawn, html } from './html.js';
import { colours } from './scale.js';
import { goTo } from './scrubber.js';
import { change, HISTORY_S, mayOrder, state } from './state.js';
import { filtered, Table } from './table.js';
import { colour, isDark } from './theme.js';
import { byName, percent, short } from './words.js';

const NOT_ASKED = -1, FAILED = [213, 94, 0];
const MARKS = { ok: '●', unknown: '○', down: '■', hangs: '■' };

let loadMost = 1, drawnAt = 0; // the load that has the brightest colour, for all engines

function most() {
  if (drawnAt !== state.at) {
    drawnAt = state.at;
    loadMost = 4;
    for (const [name, values] of state.series) {
      if (name.startsWith('load/')) for (const value of values) if (value > loadMost) loadMost = value;
    }
  }
  return loadMost;
}

// The pixel of each load: all strips share them, and a strip has 900. `mark`: that of the time that was chosen.
let pixels = { of: null, mark: 0, most: 0, dark: null };

function pixelsNow() {
  const loadNow = most(), dark = isDark();
  if (pixels.most !== loadNow || pixels.dark !== dark) {
    const colourOf = colours(), scale = Math.log1p(loadNow);
    const of = Array.from({ length: loadNow + 1 }, (_, load) => packed(colourOf(Math.log1p(load) / scale)));
    of[0] = 0; // idle: the page shines through
    pixels = { of, mark: packed(rgbOf(colour('--line1'))), most: loadNow, dark };
  }
  return pixels;
}

function packed([red, green, blue]) {
  return (255 << 24) | (blue << 16) | (green << 8) | red; // as little-endian machines have it, which browsers run on
}

function rgbOf(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

// One pixel for each second, some for the time that was chosen: two of a screen. The style sheet stretches them.
function drawStrip(canvas, { data: name }) {
  const values = state.series.get(`load/${name}`), { of, mark } = pixelsNow(), failed = packed(FAILED);
  if (canvas.width !== HISTORY_S) [canvas.width, canvas.height] = [HISTORY_S, 1];
  if (!values) return;
  canvas.image ??= new ImageData(HISTORY_S, 1);
  const drawn = new Uint32Array(canvas.image.data.buffer), at = Math.round(HISTORY_S - (state.at - state.chosenAt));
  for (let second = 0; second < HISTORY_S; second++) {
    const value = values[second];
    drawn[second] = value === NOT_ASKED ? failed : of[value] ?? 0; // NaN: not known
  }
  const half = innerWidth > 860 ? 2 : 4;
  if (state.chosenAt !== null) drawn.fill(mark, Math.max(0, at - half), at + half);
  canvas.getContext('2d').putImageData(canvas.image, 0, 0);
}

function goToPlace(event) {
  event.stopPropagation();
  const box = event.currentTarget.getBoundingClientRect();
  goTo(Math.round(HISTORY_S * (1 - (event.clientX - box.left) / box.width)));
}

function Strip({ name }) {
  return html`<span class="strip" title="requests in flight, 15 minutes; click to go to a time" onClick=${goToPlace}>
    <${Drawn} timed tag="canvas" draw=${drawStrip} data=${name} />
  </span>`;
}

const COLUMNS = [
  { title: 'engine', text: true, value: (row) => row.name, kind: 'name' },
  { title: 'state', text: true, value: (row) => stateOf(row), cell: (row) => html`<span class=${`state ${levelOf(row)}`}>${MARKS[row.state] ?? '▲'} ${stateOf(row)}</span>` },
  { title: 'cache', text: true, value: (row) => row.level, hint: 'how well it is known what the engine holds' },
  { title: 'run', value: (row) => row.running, cell: (row) => short(row.running), hint: 'requests that it runs, as it reports' },
  { title: 'wait', value: (row) => row.waiting, cell: (row) => short(row.waiting), hint: 'requests in its queue, as it reports' },
  { title: 'tok/s', value: (row) => row.tokens_per_s, cell: (row) => short(row.tokens_per_s) },
  { title: 'hits', value: (row) => row.hit_share, cell: (row) => percent(row.hit_share), hint: 'prompt tokens that it had cached, by its own count' },
  { title: 'load', value: (row) => row.load, hint: 'requests in flight, of all nodes' },
  { title: 'last 15 minutes', kind: 'strips', value: (row) => row.load, cell: (row) => html`<${Strip} name=${row.name} />` },
];

function stateOf(row) {
  return row.draining ? (row.state === 'ok' ? 'drained' : `drained, ${row.state}`) : row.state.replaceAll('_', ' ');
}

// As the node has them, but those without trouble by name: by load they would jump about.
function troubledFirst(a, b) {
  return (a.state === 'ok') - (b.state === 'ok') || (a.state === 'ok' ? byName(a.name, b.name) : 0);
}

function levelOf(row) {
  if (['down', 'hangs'].includes(row.state)) return 'down';
  return row.state === 'ok' && !row.draining ? 'well' : row.state === 'unknown' ? '' : 'degraded';
}

function Opened(row) {
  const facts = Object.entries({
    url: row.url, models: (row.models ?? []).join(', ') || 'any', weight: row.weight, 'in flight here': row.in_flight,
    'predicted as cached': `${short(row.predicted_tokens)} tokens`, counted: `${short(row.cached_tokens)} tokens`, cache: row.why,
  });
  return html`<div class="opened">
    <dl>${facts.map(([name, value]) => value !== '' && html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    <p class="orders">
      <button disabled=${!mayOrder()} onClick=${() => change({ dialog: { kind: 'drain', row } })}>${row.draining ? 'undrain' : 'drain'}</button>
      <button disabled=${!mayOrder()} onClick=${() => change({ dialog: { kind: 'weight', row } })}>weight</button>
      <button onClick=${() => change({ dialog: { kind: 'explain', row } })}>explain</button>
      ${!mayOrder() && html`<small>${state.chosenAt === null ? `orders need a key of role operate; this one has role ${state.hello?.role}` : 'orders are for now: press live'}</small>`}
    </p></div>`;
}

export const engines = {
  id: 'engines',
  title: 'Engines',
  needs: ['engines'],
  watches: [most],
  wide: true,
  rows: (view) => view,
  note: (view) => `${view.length}, of which ${view.filter((row) => levelOf(row) === 'well').length} are well`,
  draw(view) {
    const rows = filtered([...view].sort(troubledFirst), (row) => `${row.name} ${row.url} ${row.state} ${row.level} ${(row.models ?? []).join(' ')}`);
    const empty = view.length ? 'no engine has this in its name, state, cache or model' : 'no engines';
    return html`<${Table} pane="engines" columns=${COLUMNS} rows=${rows} keyOf=${(row) => row.name} more=${Opened} empty=${empty} />
      <p class="legend">load 1 <i class="ramp"></i> ${short(most())} <i class="swatch failed"></i> gets no requests</p>`;
  },
};
