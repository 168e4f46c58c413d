// The candidates of one decision: what each holds, and the seconds that the policy weighed.
import { html } from './html.js';
import { seconds, short } from './words.js';

const OWN = ['queue_s', 'prefill_s', 'others_s', 'decode_s', 'sum_s', 'ahead_s', 'tokens_per_s']; // have a column, or are parts of one

function sum(row) {
  return row.terms?.sum_s;
}

function whyNot(row, chosen) {
  if (!chosen || row === chosen) return row === chosen ? '← chosen' : '';
  if (row.reuses_prefixes === false) return 'reuses nothing';
  const words = row.matched_tokens < chosen.matched_tokens ? 'holds less' : row.load > chosen.load ? 'busier' : 'as good';
  if (sum(row) === undefined || sum(row) === sum(chosen)) return words;
  const more = sum(row) - sum(chosen);
  return more > 0 ? `+${seconds(more)}` : `−${seconds(-more)}, ${words}`;
}

export function Candidates({ report, marked }) {
  const chosen = report.candidates.find((each) => each.backend === report.chosen);
  const rows = [...report.candidates].sort((a, b) => (b === chosen) - (a === chosen) || (sum(a) ?? 0) - (sum(b) ?? 0) || a.load - b.load);
  const hasTerms = rows.some((each) => sum(each) !== undefined);
  const others = rows.map((row) => Object.entries(row.terms ?? {}).filter(([name]) => !OWN.includes(name)));
  return html`<p class="sentence"><b>${report.chosen}</b>: ${report.reason}, by policy ${report.policy};
      ${' '}${report.matched_tokens} of ${report.prompt_tokens ?? '?'} prompt tokens are held there${report.matched_tokens ? `, found by ${report.source}` : ''}</p>
    <table class="candidates"><thead><tr><th class="text">engine</th><th>holds</th><th>load</th>
      ${hasTerms && html`<th>wait</th><th>prefill</th><th>rest</th><th>sum</th>`}<th class="text">why not</th></tr></thead>
    <tbody>${rows.map((row, place) => html`<tr key=${row.backend} class=${row.backend === marked ? 'marked' : ''}>
      <td class="text name" data-title="engine">${row.backend}</td>
      <td data-title="holds">${row.trust ? `${short(row.matched_tokens)} ${row.trust.toLowerCase()}` : '–'}</td><td data-title="load">${row.load}</td>
      ${hasTerms && html`<td data-title="wait">${seconds(row.terms?.queue_s)}</td><td data-title="prefill">${seconds(row.terms?.prefill_s)}</td>
        <td data-title="rest">${seconds((row.terms?.others_s ?? 0) + (row.terms?.decode_s ?? 0))}</td><td data-title="sum">${seconds(sum(row))}</td>`}
      <td class="text" data-title="why not">${whyNot(row, chosen)}${others[place].length ? html` <small>${others[place].map(([name, value]) => `${name} ${short(value)}`).join(', ')}</small>` : ''}</td>
    </tr>`)}</tbody></table>
    ${report.left_out?.length > 0 && html`<p>Left out:</p><ul>${report.left_out.map((each) => html`<li key=${each.backend}>${each.why.includes(each.backend) ? '' : html`<b>${each.backend}</b> `}${each.why}</li>`)}</ul>`}`;
}
