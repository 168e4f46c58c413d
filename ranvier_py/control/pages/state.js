// All that the page knows, in one object, and who is called when it changes. Only `change` writes to it.
import { fromHash } from './permalink.js';

export const HISTORY_S = 900;
const DETAILS_MAX = 64; // opened rows of which details are kept: more than anybody goes back to

export const state = {
  key: sessionStorage.getItem('ranvier-key') ?? '',
  asksKey: false, // the node wants a key
  trouble: '', // why nothing comes
  hello: null,
  live: {}, // panes as they are now
  at: 0, // time of the last line
  series: new Map(), // by name HISTORY_S numbers, the last second at the end
  past: null, // {panes, of}: panes as they were at time `of`; as long as that is not `chosenAt`, what comes is waited for
  chosenAt: null, // the time that the scrubber chose; null: now
  selected: {}, // the row under the cursor, by pane
  opened: {}, // the row that is shown in full, by pane
  pane: 'engines', // where keys move the cursor
  filter: '',
  sort: {}, // by pane: the title of a column, and the direction
  dialog: null,
  note: '', // what became of the last order
  details: new Map(), // what was fetched about rows that were opened, by their keys; see `keepDetails`
  ...fromHash(location.hash),
};

const listeners = [];

export function onChange(listener) {
  listeners.push(listener);
}

export function change(changes) {
  Object.assign(state, changes);
  for (const each of listeners) each();
}

// Keep what was fetched about a row. Of too many the first goes that is neither open nor under the cursor.
export function keepDetails(id, found) {
  const details = new Map(state.details), inUse = [...Object.values(state.opened), ...Object.values(state.selected)];
  details.delete(id);
  details.set(id, found);
  for (const each of [...details.keys()]) {
    if (details.size > DETAILS_MAX && each !== id && !inUse.includes(each)) details.delete(each);
  }
  change({ details });
}

// What a pane shows at the time that was chosen.
export function shown(pane) {
  return (state.chosenAt === null ? state.live : state.past?.panes ?? {})[pane];
}

// Words for workers of the node that did not say what they have served.
export function missing() {
  const names = shown('workers')?.missing ?? [];
  return names.length ? `, without worker ${names.join(', ')}, which does not answer` : '';
}

// Whether two values are alike: what is, need not be drawn again. Only JSON is looked into.
export function alike(a, b) {
  if (a === b) return true;
  if (![Array, Object].includes(a?.constructor) || a.constructor !== b?.constructor) return false;
  const names = Object.keys(a);
  return names.length === Object.keys(b).length && names.every((name) => name in b && alike(a[name], b[name]));
}

export function mayOrder() {
  return ['operate', 'admin'].includes(state.hello?.role) && state.chosenAt === null;
}

export function push(now) {
  for (const [name, values] of state.series) {
    values.copyWithin(0, 1);
    values[HISTORY_S - 1] = name in now && now[name] !== null ? now[name] : NaN;
  }
  for (const name in now) {
    if (!state.series.has(name)) values(name)[HISTORY_S - 1] = now[name] ?? NaN;
  }
}

export function takeHistory({ ended_at: endedAt, series }) {
  const late = Math.round(state.at - endedAt); // seconds that came while this was on its way
  for (const name in series) {
    const known = series[name], own = values(name), end = HISTORY_S - late;
    for (let place = 0; place < known.length; place++) {
      const to = end - known.length + place;
      if (to >= 0) own[to] = known[place] ?? NaN;
    }
  }
}

function values(name) {
  const made = state.series.get(name) ?? new Float64Array(HISTORY_S).fill(NaN);
  state.series.set(name, made);
  return made;
}
