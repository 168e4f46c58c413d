// One table for all panes: sorted by a click on a title, with a cursor, rows that open, and cards on narrow screens.
import { Component, drawnAlready, drawSoon, html } from './html.js';
import { alike, change, state } from './state.js';
import { byName } from './words.js';

const SHOWN = 200; // rows: a thousand take half a second to draw, and nobody reads them

export const order = {}; // by pane what gives the keys of its rows, as they are drawn, for the cursor

// columns: {title, value(row), cell(row)?, text?: true for words, hint?}; more(row): what an open row shows.
export function Table({ pane, columns, rows, keyOf, more, empty }) {
  const sorted = sortedRows(pane, columns, rows);
  const shown = sorted.filter((row, place) => place < SHOWN || state.opened[pane] === keyOf(row));
  order[pane] = () => shown.map(keyOf);
  if (!rows.length) return html`<p class="empty">${empty}</p>`;
  return html`<table role="grid">
    <thead><tr>${columns.map((column) => html`<${Title} key=${column.title} ...${{ pane, column }} />`)}</tr></thead>
    ${shown.map((row) => html`<${Row} key=${keyOf(row)} ...${{ pane, columns, row, id: keyOf(row), more }} />`)}
  </table>
  ${shown.length < rows.length && html`<p class="empty">and ${rows.length - shown.length} more, which the filter finds</p>`}`;
}

function Title({ pane, column }) {
  const sort = state.sort[pane], chosen = sort?.title === column.title;
  const aria = chosen ? (sort.down ? 'descending' : 'ascending') : 'none';
  return html`<th class=${column.text ? 'text' : ''} aria-sort=${aria} title=${column.hint ?? ''}>
    <button class="title" onClick=${() => sortBy(pane, column)}>${column.title}${chosen ? (sort.down ? ' ▾' : ' ▴') : ''}</button>
  </th>`;
}

// A row is drawn at once when somebody chooses or opens it, and soon if what it shows has changed; else it stays.
class Row extends Component {
  isRow = true;
  keep = (element) => { this.element = element; };

  shouldComponentUpdate({ pane, row, id }) {
    if (state.opened[pane] === id || this.opened || isSelected(pane, id) !== this.selected) return true;
    if (!alike(row, this.props.row)) drawSoon(this);
    return false;
  }

  drawNow() { this.forceUpdate(); }
  componentDidUpdate() { drawnAlready(this); }
  componentWillUnmount() { drawnAlready(this); }

  render({ pane, columns, row, id, more }) {
    const selected = this.selected = isSelected(pane, id), opened = this.opened = state.opened[pane] === id;
    return html`<tbody ref=${this.keep} class=${selected ? 'selected' : ''}>
      <tr data-row=${id} aria-selected=${selected} onClick=${() => choose(pane, id, Boolean(more))}>
        ${columns.map((column) => html`<td class=${`${column.text ? 'text' : ''} ${column.kind ?? ''}`} data-title=${column.title}>
          ${column.cell ? column.cell(row) : column.value(row)}</td>`)}
      </tr>
      ${opened && more && html`<tr class="more"><td colspan=${columns.length}>${more(row)}</td></tr>`}
    </tbody>`;
  }
}

function isSelected(pane, id) {
  return state.pane === pane && state.selected[pane] === id;
}

export function choose(pane, id, opens = true) {
  const isOpen = state.opened[pane] === id;
  change({
    pane,
    selected: { ...state.selected, [pane]: id },
    opened: { ...state.opened, [pane]: opens && !isOpen ? id : undefined },
  });
}

export function move(by) {
  const { pane } = state, keys = order[pane]?.() ?? [];
  if (!keys.length) return;
  const before = keys.indexOf(state.selected[pane]);
  const place = before < 0 ? 0 : Math.min(keys.length - 1, Math.max(0, before + by));
  change({ selected: { ...state.selected, [pane]: keys[place] } });
  document.querySelector(`[data-pane="${pane}"] tr[data-row="${CSS.escape(keys[place])}"]`)?.scrollIntoView({ block: 'nearest' });
}

function sortBy(pane, column) {
  const before = state.sort[pane];
  const down = before?.title === column.title ? !before.down : !column.text;
  change({ pane, sort: { ...state.sort, [pane]: { title: column.title, down } } });
}

function sortedRows(pane, columns, rows) {
  const sort = state.sort[pane], column = columns.find((each) => each.title === sort?.title);
  if (!column) return rows;
  const compared = (a, b) => {
    const [x, y] = [column.value(a), column.value(b)];
    if (x === null || x === undefined) return 1; // what is not known comes last
    if (y === null || y === undefined) return -1;
    return (typeof x === 'number' ? x - y : byName(x, y)) * (sort.down ? -1 : 1);
  };
  return [...rows].sort(compared);
}

export function filtered(rows, textOf) {
  const wanted = state.filter.trim().toLowerCase();
  return wanted ? rows.filter((row) => textOf(row).toLowerCase().includes(wanted)) : rows;
}
