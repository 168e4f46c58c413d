// Which prefixes are warm: depth in tokens, width by heat, colour by how many engines hold them. Never their text.
// The chosen one has a frame; the opened one fills the map.
import { Drawn, html } from './html.js';
import { nameOf, placeOf, visitBoxes } from './map_boxes.js';
import { ask, pictureOf } from './node.js';
import { colours as shades, css } from './scale.js';
import { change, keepDetails, state } from './state.js';
import { choose, order } from './table.js';
import { colour } from './theme.js';
import { age, short } from './words.js';

const HEIGHT = 260, SEEN = 3; // pixels: narrower prefixes can be clicked, but keys pass over them
const HOLDERS = [0, 1, 2, 3, 5, 9]; // the least number of each colour

function palette() {
  return HOLDERS.map((_, place) => css(shades()(place / (HOLDERS.length - 1))));
}

function sizeOf(map, width) {
  return { width, height: HEIGHT, zoomed: placeOf(map, state.opened.prefixes) };
}

async function drawMap(canvas, { data: map }) {
  const width = canvas.parentElement.clientWidth, ratio = devicePixelRatio || 1, { selected, opened } = state;
  const kind = [map, width, ratio, selected.prefixes, opened.prefixes, ...palette()];
  if (canvas.kind?.every((each, place) => each === kind[place])) return;
  canvas.kind = kind;
  const picture = await pictureOf({
    map, ratio, size: sizeOf(map, width), chosen: placeOf(map, selected.prefixes),
    colours: palette(), holders: HOLDERS, line: colour('--card'), mark: colour('--line1'),
  });
  if (canvas.kind !== kind) return picture.close(); // what is shown has changed meanwhile
  [canvas.width, canvas.height] = [picture.width, picture.height];
  canvas.getContext('bitmaprenderer').transferFromImageBitmap(picture);
}

function pick(event, map) {
  const box = event.currentTarget.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  let found = -1;
  visitBoxes(map, sizeOf(map, box.width), 0, (place, each) => {
    const isHere = x >= each.x && x < each.x + each.width;
    if (isHere && y >= each.y && y < each.y + each.height) found = place;
    return !isHere;
  });
  const name = found < 0 ? undefined : nameOf(map, found);
  if (name && name === state.selected.prefixes) return choose('prefixes', name);
  const opened = name ? state.opened.prefixes : undefined; // beside the map: back to all of it
  change({ pane: 'prefixes', selected: { ...state.selected, prefixes: name }, opened: { ...state.opened, prefixes: opened } });
}

// The names that keys go through: from the top down, and from left to right.
function namesOf(map) {
  const found = [], width = document.querySelector('[data-pane=prefixes] .map')?.clientWidth ?? 0;
  visitBoxes(map, sizeOf(map, width), SEEN, (place) => { found.push(nameOf(map, place)); });
  return found;
}

let askedFor = ''; // the prefix of which details were asked last

async function fetchDetails(name) {
  askedFor = name;
  keepDetails(name, await ask(`/admin/routes/${name}?limit=1`).catch((error) => ({ error: error.message })));
}

function Chosen({ map }) {
  const name = state.selected.prefixes, place = placeOf(map, name);
  if (place < 0) return html`<p class="legend">Click a prefix to see who holds it, again to have it fill the map, and once more to go back; or j, k and Enter.</p>`;
  if (askedFor !== name) fetchDetails(name);
  const found = state.details.get(name), holders = found?.routes?.[0]?.holders ?? [];
  return html`<p class="legend" id="prefix"><span><code>${name}</code></span> <span><b>${short(map.tokens[place])}</b> tokens</span>
    ${' '}<span><b>${map.holders[place]}</b> engines</span> <span>used ${age(map.idle_s[place])} ago</span>
    ${' '}<span>${found?.error ?? holders.map((each) => `${each.backend} (${each.trust.toLowerCase()})`).join(', ')}</span></p>`;
}

function rowsOf(map) {
  return Array.from({ length: map.count }, (_, place) => ({
    fingerprint: nameOf(map, place), parent: map.parent[place] < 0 ? '' : nameOf(map, map.parent[place]),
    tokens: map.tokens[place], holders: map.holders[place], heat: map.heat[place], idle_s: map.idle_s[place],
  }));
}

export const prefixes = {
  id: 'prefixes',
  title: 'Prefixes',
  needs: ['prefixes'],
  wide: true,
  rows: rowsOf,
  whole: (map) => ({ routes: map.routes, prefixes: rowsOf(map) }),
  note: (map) => `${short(map.count)} of ${short(map.routes)}, those used last`,
  draw(map) {
    order.prefixes = () => namesOf(map);
    if (!map.count) return html`<p class="empty">no prefix is known yet</p>`;
    const colours = palette();
    return html`<div class="map"><${Drawn} tag="canvas" draw=${drawMap} data=${map} onClick=${(event) => pick(event, map)} role="img" aria-label="prefixes by depth, heat and holders" /></div>
      <p class="legend"><span>down: 0 to ${short(map.most)} tokens</span> <span>width: how lately used</span>
        ${' '}<span>held by</span> ${HOLDERS.map((least, place) => html`<span key=${least}><i class="swatch" style=${{ background: colours[place] }}></i> ${least}${least === HOLDERS.at(-1) ? ' or more' : ''}</span> `)} <span>engines</span></p>
      <${Chosen} map=${map} />`;
  },
};
