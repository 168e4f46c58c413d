// Which prefixes are warm: depth in tokens, width by heat, colour by how many engines hold them. Never their text.
import { Drawn, html } from './html.js';
import { ask } from './node.js';
import { colours, css } from './scale.js';
import { change, state } from './state.js';
import { colour } from './theme.js';
import { hierarchy, partition } from './vendor/d3-hierarchy.min.mjs';
import { age, short } from './words.js';

const HEIGHT = 260, THIN = 0.6;
const HOLDERS = [0, 1, 2, 3, 5, 9]; // the least number of each colour

let laid = { view: null, root: null, most: 1 }; // the layout of the view that was drawn last
let zoomed = null; // the node whose part of the map fills it

function layout(view) {
  if (laid.view === view) return laid;
  const nodes = view.tokens.map((tokens, place) => ({ place, tokens, children: [] }));
  const top = { place: -1, tokens: 0, children: [] };
  view.parent.forEach((parent, place) => (parent < 0 ? top : nodes[parent]).children.push(nodes[place]));
  const root = hierarchy(top).sum((each) => (each.children.length || each.place < 0 ? 0 : view.heat[each.place]));
  partition().size([1, 1])(root.sort((a, b) => b.value - a.value));
  laid = { view, root, most: view.tokens.reduce((most, tokens) => Math.max(most, tokens), 1) };
  zoomed = null;
  return laid;
}

// Returns what gives the colour of a number of holders.
function palette() {
  const table = HOLDERS.map((_, place) => css(colours()(place / (HOLDERS.length - 1))));
  return (holders) => table[HOLDERS.findLastIndex((least) => holders >= least)];
}

function boxOf(node, width, most) {
  const [low, high] = zoomed ? [zoomed.x0, zoomed.x1] : [0, 1];
  const across = (x) => (width * (x - low)) / (high - low), down = (tokens) => HEIGHT * Math.sqrt(tokens / most);
  const top = down(node.parent ? node.parent.data.tokens : 0);
  return { x: across(node.x0), y: top, width: across(node.x1) - across(node.x0), height: down(node.data.tokens) - top };
}

function drawMap(canvas, { data: view }) {
  const { root, most } = layout(view), width = canvas.parentElement.clientWidth, ratio = devicePixelRatio || 1;
  const kind = [view, zoomed, width, state.selected.prefixes, document.documentElement.dataset.theme];
  if (canvas.kind?.every((each, place) => each === kind[place])) return;
  canvas.kind = kind;
  canvas.width = width * ratio;
  canvas.height = HEIGHT * ratio;
  const context = canvas.getContext('2d');
  context.scale(ratio, ratio);
  context.strokeStyle = colour('--card');
  const colourOf = palette();
  const visit = (node) => {
    const box = boxOf(node, width, most);
    if (box.width < THIN || box.x > width || box.x + box.width < 0) return;
    if (node.data.place >= 0) {
      context.fillStyle = colourOf(view.holders[node.data.place]);
      context.fillRect(box.x, box.y, box.width, box.height);
      if (box.width > 3) context.strokeRect(box.x, box.y, box.width, box.height);
      if (view.name[node.data.place] === state.selected.prefixes) {
        context.strokeStyle = colour('--line1');
        context.lineWidth = 3;
        context.strokeRect(box.x + 1.5, box.y + 1.5, box.width - 3, box.height - 3);
        context.strokeStyle = colour('--card');
        context.lineWidth = 1;
      }
    }
    node.children?.forEach(visit);
  };
  visit(root);
}

function nodeAt(event) {
  const box = event.currentTarget.getBoundingClientRect(), { root, most } = laid;
  const x = event.clientX - box.left, y = event.clientY - box.top;
  let found = null;
  for (let node = root; node;) {
    if (node.data.place >= 0 && boxOf(node, box.width, most).y <= y) found = node;
    node = node.children?.find((child) => {
      const own = boxOf(child, box.width, most);
      return x >= own.x && x < own.x + own.width && y >= own.y;
    });
  }
  return found && boxOf(found, box.width, most).y + boxOf(found, box.width, most).height >= y ? found : null;
}

async function pick(event) {
  const node = nodeAt(event), { view } = laid;
  if (!node) {
    zoomed = null;
    return change({ selected: { ...state.selected, prefixes: undefined } });
  }
  const name = view.name[node.data.place];
  if (state.selected.prefixes === name) zoomed = zoomed === node ? null : node;
  change({ pane: 'prefixes', selected: { ...state.selected, prefixes: name } });
  const details = await ask(`/admin/routes/${name}?limit=1`).catch((error) => ({ error: error.message }));
  change({ details: { ...state.details, [name]: details } });
}

function Chosen({ view }) {
  const name = state.selected.prefixes, place = view.name.indexOf(name);
  if (place < 0) return html`<p class="legend">Click a prefix to see who holds it, again to have it fill the map.</p>`;
  const found = state.details[name], holders = found?.routes?.[0]?.holders ?? [];
  return html`<p class="legend" id="prefix"><span><code>${name}</code></span> <span><b>${short(view.tokens[place])}</b> tokens</span>
    ${' '}<span><b>${view.holders[place]}</b> engines</span> <span>used ${age(view.idle_s[place])} ago</span>
    ${' '}<span>${found?.error ?? holders.map((each) => `${each.backend} (${each.trust.toLowerCase()})`).join(', ')}</span></p>`;
}

function rowsOf(view) {
  return view.name.map((name, place) => ({ fingerprint: name, parent: view.name[view.parent[place]] ?? '', tokens: view.tokens[place], holders: view.holders[place], heat: view.heat[place], idle_s: view.idle_s[place] }));
}

export const prefixes = {
  id: 'prefixes',
  title: 'Prefixes',
  needs: ['prefixes'],
  wide: true,
  rows: rowsOf,
  note: (view) => `${short(view.name.length)} of ${short(view.routes)}, those used last`,
  draw(view) {
    if (!view.name.length) return html`<p class="empty">no prefix is known yet</p>`;
    return html`<div class="map"><${Drawn} tag="canvas" draw=${drawMap} data=${view} onClick=${pick} role="img" aria-label="prefixes by depth, heat and holders" /></div>
      <p class="legend"><span>down: 0 to ${short(laid.view === view ? laid.most : Math.max(...view.tokens))} tokens</span> <span>width: how lately used</span>
        ${' '}<span>held by</span> ${HOLDERS.map((least) => html`<span key=${least}><i class="swatch" style=${{ background: palette()(least) }}></i> ${least}${least === HOLDERS.at(-1) ? ' or more' : ''}</span> `)} <span>engines</span></p>
      <${Chosen} view=${view} />`;
  },
};
