// Cache hits: what nodes predicted, and what engines counted.
import { growth, Lines, shareOf } from './charts.js';
import { html } from './html.js';
import { filtered, Table } from './table.js';
import { percent, short } from './words.js';

const OVER_S = 30; // of a share: long enough for a few requests

const COLUMNS = [
  { title: 'engine', text: true, value: (row) => row.name, kind: 'name' },
  { title: 'own count', value: (row) => row.engine_hit_share, cell: (row) => percent(row.engine_hit_share), hint: 'share of prompt tokens that it had cached, from its metrics page' },
  { title: 'pred/count', value: (row) => row.cached_tokens, cell: (row) => `${short(row.predicted_tokens)}/${short(row.cached_tokens)}`, hint: 'tokens that this node took for cached there, and those that were, as answers counted' },
  { title: 'precision', value: (row) => row.precision, cell: (row) => percent(row.precision), hint: 'of what was predicted, what was cached' },
  { title: 'recall', value: (row) => row.recall, cell: (row) => percent(row.recall), hint: 'of what was cached, what was predicted' },
  { title: 'used', value: (row) => row.cache_usage, cell: (row) => percent(row.cache_usage), hint: 'of its cache' },
  { title: 'bias', text: true, value: (row) => row.biases.join(', ') || '–' },
];

export const hits = {
  id: 'hits',
  title: 'Hits',
  needs: ['hits'],
  rows: (view) => view.engines,
  note: (view) => `precision ${percent(view.route_precision)}, recall ${percent(view.route_recall)}`,
  draw(view) {
    const lines = [
      { name: 'predicted', values: () => shareOf(growth('predicted_tokens', OVER_S), growth('prompt_tokens', OVER_S)) },
      { name: 'counted by engines', values: () => shareOf(growth('engine_cached_tokens', OVER_S), growth('engine_prompt_tokens', OVER_S)) },
    ];
    const rows = filtered(view.engines, (row) => `${row.name} ${row.profile}`);
    return html`<${Lines} lines=${lines} written=${percent} />
      <${Table} pane="hits" columns=${COLUMNS} rows=${rows} keyOf=${(row) => row.name} empty="no answer had counts yet" />`;
  },
};
