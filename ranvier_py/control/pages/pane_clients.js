// Clients and what breaks their prefixes, with the rule that would mend it.
import { html } from './html.js';
import { filtered, Table } from './table.js';
import { percent, seconds, short } from './words.js';

function rulesOf(each) {
  return Object.entries(each.rules ?? {}).sort((a, b) => b[1] - a[1]).map(([name]) => name);
}

const COLUMNS = [
  { title: 'client', text: true, value: (row) => row.client, kind: 'name' },
  { title: 'turns', value: (row) => row.turns, cell: (row) => short(row.turns) },
  { title: 'prompt', value: (row) => row.prompt_tokens, cell: (row) => short(row.prompt_tokens), hint: 'tokens' },
  { title: 'reused', value: (row) => row.reused_share, cell: (row) => percent(row.reused_share), hint: 'as engines counted' },
  { title: 'could be', value: (row) => row.reusable_share, cell: (row) => percent(row.reusable_share), hint: 'if it broke no prefix' },
  { title: 'broken', value: (row) => row.break_tokens, cell: (row) => short(row.break_tokens), hint: 'tokens that were computed again' },
  { title: 'costs', value: (row) => row.break_prefill_s, cell: (row) => seconds(row.break_prefill_s), hint: 'seconds of prefill' },
  { title: 'mended by', text: true, value: (row) => row.breaks.flatMap(rulesOf)[0] ?? '–', hint: 'the rule that would mend most' },
];

function opened(view) {
  return (row) => html`<div class="opened"><ul>${row.breaks.slice(0, 12).map((each) => html`<li key=${`${each.cause} ${each.path} ${each.scope}`}>
      <b>${each.cause}</b> at <code>${each.path}</code>: ${short(each.count)} times, ${short(each.tokens)} tokens, ${seconds(each.prefill_s)}
      ${rulesOf(each).map((name) => html` <span key=${name}>– <code>client_rules = ["${name}"]</code> would mend it${isOn(view, name) ? ' (it is on)' : ''}</span>`)}</li>`)}</ul>
    ${!row.breaks.length && html`<p>it breaks none</p>`}</div>`;
}

function isOn(view, name) {
  return view.rules.find((rule) => rule.rule === name)?.settings.length > 0;
}

export const clients = {
  id: 'clients',
  title: 'Clients',
  needs: ['clients'],
  wide: true,
  rows: (view) => view.clients,
  note: (view) => `${view.clients.length} kinds`,
  draw(view) {
    const rows = filtered(view.clients, (row) => `${row.client} ${row.breaks.map((each) => each.cause).join(' ')}`);
    return html`<${Table} pane="clients" columns=${COLUMNS} rows=${rows} keyOf=${(row) => row.client} more=${opened(view)} empty="no chat came yet" />`;
  },
};
