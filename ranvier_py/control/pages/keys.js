// The keyboard.
import { change, state } from './state.js';
import { choose, move } from './table.js';
import { goLive, step } from './scrubber.js';
import { nextTheme } from './theme.js';

export const KEYS = [
  ['/', 'filter all panes; Escape leaves the field'],
  ['j  k', 'the next row, the one before'],
  ['Enter', 'open or close the row; of the prefixes: have it fill the map, or go back'],
  ['e', 'explain: where a request would go, and why'],
  ['n  p', 'the next pane, the one before'],
  [',  .', '10 seconds back, forward'],
  ['l', 'live again'],
  ['t', 'light, dark or as the system'],
  ['?', 'these keys'],
  ['Escape', 'close, or clear the filter'],
];

function rowOf(pane) {
  return (state.live[pane] ?? []).find?.((row) => row.name === state.selected[pane]);
}

function goToPane(by) {
  const ids = [...document.querySelectorAll('[data-pane]')].map((each) => each.dataset.pane);
  const pane = ids[(ids.indexOf(state.pane) + by + ids.length) % ids.length];
  change({ pane });
  document.querySelector(`[data-pane="${pane}"]`)?.scrollIntoView({ block: 'nearest' });
}

const DO = {
  '/': () => document.getElementById('filter')?.focus(),
  j: () => move(1),
  ArrowDown: () => move(1),
  k: () => move(-1),
  ArrowUp: () => move(-1),
  Enter: () => state.selected[state.pane] && choose(state.pane, state.selected[state.pane]),
  e: () => change({ dialog: { kind: 'explain', row: rowOf('engines') } }),
  n: () => goToPane(1),
  p: () => goToPane(-1),
  ',': () => step(10),
  '.': () => step(-10),
  l: goLive,
  t: nextTheme,
  '?': () => change({ dialog: { kind: 'help' } }),
  Escape: () => change(state.dialog ? { dialog: null } : { filter: '' }),
};

export function followKeys() {
  addEventListener('keydown', (event) => {
    const field = event.target.closest('input, textarea, select');
    if (field?.id === 'filter' && event.key === 'Escape') field.blur();
    if (field || event.ctrlKey || event.metaKey || event.altKey || state.asksKey) return;
    if (state.dialog && event.key !== 'Escape') return;
    if (event.target.closest('button, summary') && event.key === 'Enter') return; // it has a meaning of its own
    const act = DO[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
}
