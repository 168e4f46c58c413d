// The nodes of the cluster: who is there, how far away, and how far their tables are from ours.
import { html } from './html.js';
import { filtered, Table } from './table.js';
import { age, bytes } from './words.js';

const MARKS = { alive: '●', suspect: '▲', dead: '■', left: '○' };
const LOST = ['suspect', 'dead'];

const COLUMNS = [
  { title: 'node', text: true, value: (row) => row.name, kind: 'name' },
  { title: 'state', text: true, value: (row) => row.state, cell: (row) => html`<span class=${`state ${LOST.includes(row.state) ? 'down' : 'well'}`}>${MARKS[row.state] ?? '▲'} ${row.state}</span>` },
  { title: 'rtt', value: (row) => row.rtt_ms, cell: (row) => row.rtt_ms === null ? '–' : `${row.rtt_ms} ms` },
  { title: 'silent', value: (row) => row.silent_s, cell: (row) => age(row.silent_s), hint: 'since its last packet' },
  { title: 'routes', text: true, value: (row) => row.routes ? 'shared' : 'none', hint: 'none: it makes other fingerprints' },
  { title: 'release', text: true, value: (row) => row.release ?? '–', cell: (row) => html`${row.release ?? '–'} <small>protocol ${row.protocol ?? '–'}</small>` },
];

function Opened(row) {
  const facts = { address: row.address, public: row.public, 'in this state': age(row.since_s), incarnation: row.incarnation, session: row.session, datagrams: row.datagrams };
  return html`<div class="opened"><dl>${Object.entries(facts).map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${String(value ?? '–')}</dd></div>`)}</dl></div>`;
}

function Facts({ view }) {
  const rates = Object.entries(view.bytes_per_s ?? {}).map(([plane, each]) => `${plane} ${bytes(each.sent)}/s out, ${bytes(each.received)}/s in`);
  const lag = view.lag_ms?.p50 === null || !view.lag_ms ? 'no route came yet' : `routes arrive ${view.lag_ms.p50} ms (p50), ${view.lag_ms.p99} ms (p99) after they were learned`;
  const sync = Object.entries(view.route_sync ?? {}).filter(([, value]) => typeof value !== 'object').map(([name, value]) => `${name.replaceAll('_', ' ')} ${value}`);
  const others = Object.entries(view.other_protocols ?? {}).map(([host, protocol]) => `${host} speaks protocol ${protocol}`);
  const differing = Object.entries(view.backend_sets?.differing ?? {}).map(([name, how]) => `${name} has other engines: ${how}`);
  return html`<p class="facts">${[lag, ...rates, ...others, ...differing].map((each) => html`<span key=${each}>${each}</span> `)}</p>
    ${sync.length > 0 && html`<details><summary>comparison of tables</summary><p class="facts">${sync.map((each) => html`<span key=${each}>${each}</span> `)}</p></details>`}`;
}

// Peers that do not answer: members in doubt, and those that were lost lately.
export function Partition({ peers: view, verdict }) {
  const members = view?.members ?? [], found = (verdict?.findings ?? []).filter((each) => each.kind === 'peer_lost' && each.severity !== 'notice');
  const lost = new Set([...members.filter((row) => row.state === 'suspect').map((row) => row.name), ...found.map((each) => each.about)]);
  if (!lost.size) return null;
  const all = new Set([...members.map((row) => row.name), ...lost]);
  const cut = 2 * lost.size > all.size;
  return html`<p class="banner down" id="partition">■ ${lost.size} of ${all.size} peers do not answer: ${[...lost].join(', ')}.
    ${cut ? ' This node may be cut off: what it shows of the cluster is what it knew before.' : ''}</p>`;
}

export const peers = {
  id: 'peers',
  title: 'Peers',
  needs: ['peers'],
  missing: 'this node has no peers: it does not gossip',
  rows: (view) => view.members,
  note: (view) => `${view.name} at ${view.address}, protocol ${view.protocol}`,
  draw(view) {
    const rows = filtered(view.members, (row) => `${row.name} ${row.address} ${row.state} ${row.release}`);
    return html`<${Table} pane="peers" columns=${COLUMNS} rows=${rows} keyOf=${(row) => row.session} more=${Opened} empty="no peers yet" />
      <${Facts} view=${view} />`;
  },
};
