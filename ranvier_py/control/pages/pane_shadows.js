// Policies in the shadow against the live one: what each would have saved, in seconds of prefill.
import { Lines } from './charts.js';
import { html } from './html.js';
import { state } from './state.js';
import { Table } from './table.js';
import { percent, seconds, short } from './words.js';

const COLUMNS = [
  { title: 'policy', text: true, value: (row) => row.policy, kind: 'name' },
  { title: 'saved', value: (row) => row.saved_s, cell: (row) => seconds(row.saved_s), hint: 'seconds of prefill in all; less than 0 is a loss' },
  { title: 'a request', value: (row) => row.saved_ms_per_request, cell: (row) => seconds(row.saved_ms_per_request / 1000) },
  { title: 'tokens', value: (row) => row.saved_tokens, cell: (row) => short(row.saved_tokens), hint: 'that would not have been computed' },
  { title: 'elsewhere', value: (row) => row.elsewhere_share, cell: (row) => percent(row.elsewhere_share), hint: 'requests that it would have sent to another engine' },
  { title: 'requests', value: (row) => row.placed, cell: (row) => short(row.placed) },
];

export const shadows = {
  id: 'shadows',
  title: 'Policies in the shadow',
  needs: ['shadows'],
  rows: (view) => view.shadows,
  note: (view) => `live: ${view.live}`,
  draw(view) {
    if (!view.shadows.length) return html`<p class="empty">none runs; name some: shadow = ["affinity", "least_loaded"]</p>`;
    const lines = view.shadows.map((row) => ({ name: row.policy, values: () => [...(state.series.get(`saved_s/${row.policy}`) ?? [])] }));
    return html`<${Lines} lines=${lines} written=${(value) => seconds(value)} />
      <${Table} pane="shadows" columns=${COLUMNS} rows=${view.shadows} keyOf=${(row) => row.policy} empty="none" />`;
  },
};
