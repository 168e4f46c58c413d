// Decisions as they come; an open one shows its candidates.
import { Candidates } from './candidates.js';
import { html } from './html.js';
import { ask } from './node.js';
import { keepDetails, missing, state } from './state.js';
import { filtered, Table } from './table.js';
import { clock, percent, short } from './words.js';

const SHOWN = 12; // rows; a filter finds the others

const COLUMNS = [
  { title: 'time', value: (row) => row.at, cell: (row) => clock(row.at) },
  { title: 'engine', text: true, value: (row) => row.backend, kind: 'name' },
  { title: 'why', text: true, value: (row) => row.reason },
  { title: 'prompt', value: (row) => row.prompt_tokens, cell: (row) => short(row.prompt_tokens), hint: 'tokens' },
  { title: 'held', value: (row) => row.prompt_tokens ? row.matched_tokens / row.prompt_tokens : null, cell: (row) => percent(row.prompt_tokens ? row.matched_tokens / row.prompt_tokens : null), hint: 'share of the prompt that the engine is believed to hold' },
];

async function fetchDetails(id) {
  state.details.set(id, {}); // asked for once
  let found;
  try {
    found = await ask(`/admin/decisions/${encodeURIComponent(id)}`);
  } catch (error) {
    found = { error: error.message };
  }
  keepDetails(id, found);
}

function Opened(row) {
  const found = state.details.get(row.request_id);
  if (!found) fetchDetails(row.request_id);
  if (found?.error) return html`<p class="empty">${found.error}</p>`;
  if (!found?.candidates) return html`<p class="empty">asking</p>`;
  return html`<div class="opened"><p><small>request ${row.request_id}. ${found.weighed
    ? 'Seconds as they were weighed at that time.'
    : 'Nobody looked when it was decided: loads and holders of that time, without seconds.'}</small></p>
    <${Candidates} report=${found} /></div>`;
}

export const decisions = {
  id: 'decisions',
  title: 'Decisions',
  needs: ['decisions'],
  rows: (view) => view,
  note: (view) => `the last ${view.length} of this node${missing()}`,
  draw(view) {
    const rows = filtered(view, (row) => `${row.request_id} ${row.backend} ${row.reason} ${row.source}`);
    const shown = rows.filter((row, place) => place < SHOWN || state.opened.decisions === row.request_id);
    return html`<${Table} pane="decisions" columns=${COLUMNS} rows=${shown} keyOf=${(row) => row.request_id} more=${Opened} empty="no request came yet" />
      ${rows.length > SHOWN && html`<p class="empty">and ${rows.length - SHOWN} before them</p>`}`;
  },
};
