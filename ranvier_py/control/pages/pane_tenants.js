// Tenants and keys: what they send, what is left of their limits, who waits and who was refused.
import { html } from './html.js';
import { shown } from './state.js';
import { filtered, Table } from './table.js';
import { percent, short } from './words.js';

function tightest(row) {
  return [...row.limits].sort((a, b) => a.remaining / a.amount - b.remaining / b.amount)[0];
}

function used(row) {
  const limit = tightest(row);
  return limit ? 1 - limit.remaining / limit.amount : null;
}

function cachedShare(row) {
  return row.prompt_tokens ? row.cached_tokens / row.prompt_tokens : null;
}

const COLUMNS = [
  { title: 'who', text: true, value: (row) => row.name, kind: 'name' },
  { title: 'share', value: (row) => row.share, cell: (row) => percent(row.share), hint: 'of all requests of this node' },
  { title: 'requests', value: (row) => row.requests, cell: (row) => short(row.requests) },
  { title: 'prompt', value: (row) => row.prompt_tokens, cell: (row) => short(row.prompt_tokens), hint: 'tokens, as engines counted them' },
  { title: 'cached', value: cachedShare, cell: (row) => percent(cachedShare(row)), hint: 'of the prompt tokens, as engines counted them' },
  { title: 'answer', value: (row) => row.output_tokens, cell: (row) => short(row.output_tokens), hint: 'tokens, as engines counted them' },
  { title: 'limit', text: true, value: (row) => tightest(row)?.limit ?? 'none', hint: 'the one of which least is left' },
  { title: 'taken', kind: 'bars', value: used, cell: (row) => used(row) === null ? '–' : html`<span class="bar" title=${percent(used(row))}><i style=${{ width: `${100 * Math.min(1, used(row))}%` }}></i></span> ${percent(used(row))}`, hint: 'of this limit' },
  { title: 'waiting', value: (row) => row.waiting ?? null, cell: (row) => short(row.waiting), hint: 'requests that wait for their turn' },
  { title: 'refused', value: (row) => row.refused, cell: (row) => short(row.refused), hint: 'with status 429' },
];

function Opened(row) {
  return html`<div class="opened">${row.last_refusal && html`<p>last refusal: ${row.last_refusal}</p>`}
    ${row.limits.length === 0 && html`<p>no limit was met yet</p>`}
    <ul>${row.limits.map((each) => html`<li key=${each.limit}>${each.limit}: ${short(each.used)} used and ${short(each.reserved)} reserved of ${short(each.amount)},
      ${' '}${short(each.remaining)} left${each.mode === 'shadow' ? ' (counted only)' : ''}</li>`)}</ul></div>`;
}

// Each tenant that sent something, and each scope that has limits.
function rowsOf(view) {
  const counts = shown('tenant_requests') ?? {}, total = Object.values(counts).reduce((sum, [count]) => sum + count, 0);
  const found = new Map(Object.entries(counts).map(([tenant, [requests, refused, prompt_tokens, cached_tokens, output_tokens]]) => [
    tenant ? `tenant ${tenant}` : 'no tenant', { requests, share: requests / total, prompt_tokens, cached_tokens, output_tokens, refused, limits: [] }]));
  for (const [scope, each] of Object.entries(view.limits ?? {})) {
    const row = found.get(scope) ?? { requests: null, share: null, prompt_tokens: null, cached_tokens: null, output_tokens: null, refused: 0 };
    found.set(scope, { ...row, refused: Math.max(row.refused, each.refused), limits: each.limits, last_refusal: each.last_refusal, waiting: each.waiting });
  }
  return [...found].map(([name, row]) => ({ name, ...row }));
}

export const tenants = {
  id: 'tenants',
  title: 'Tenants',
  needs: ['tenants', 'tenant_requests'],
  wide: true,
  rows: rowsOf,
  note: (view) => view.needs_key ? `${view.limited} with limits` : '',
  draw(view) {
    if (!view.needs_key) return html`<p class="empty">clients need no keys here; name them in keys_file to have limits</p>`;
    const rows = filtered(rowsOf(view), (row) => row.name);
    return html`<${Table} pane="tenants" columns=${COLUMNS} rows=${rows} keyOf=${(row) => row.name} more=${Opened} empty="no request came yet" />`;
  },
};
