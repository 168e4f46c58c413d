// What is wrong, the worst first, with what to do about it.
import { html } from './html.js';
import { change, shown } from './state.js';
import { filtered } from './table.js';
import { age, percent, short } from './words.js';

const MARKS = { down: '■', degraded: '▲', notice: '●', well: '✓' };
const WORDS = { down: 'down', degraded: 'degraded', notice: 'nothing that fails requests', well: 'nothing is wrong' };

function groups(findings) {
  const found = new Map();
  for (const each of findings) {
    const key = `${each.severity} ${each.kind}`;
    found.set(key, [...(found.get(key) ?? []), each]);
  }
  return [...found.values()];
}

function Group({ found }) {
  const [first] = found, names = found.map((each) => each.about).filter(Boolean);
  return html`<li class=${first.severity}>
    <details open=${first.severity !== 'notice'}>
      <summary><b>${MARKS[first.severity]} ${first.kind}</b> ${first.what}${found.length > 1 ? `, and ${found.length - 1} more` : ''}
        <small> for ${age(first.since_s)}</small></summary>
      ${found.length > 1 && html`<p>also ${found.slice(1).map((each) => each.about || each.what).join(', ')}</p>`}
      ${first.whom && html`<p>touches ${first.whom}</p>`}
      <p>${first.remedy}</p>
      ${first.command && html`<p><code>${first.command}</code></p>`}
      ${names.length > 0 && html`<p>${names.slice(0, 8).map((name) => html`<button key=${name}
        onClick=${() => change({ filter: name, pane: 'engines' })}>show ${name}</button> `)}</p>`}
    </details></li>`;
}

function shareOf(part, whole) {
  return whole ? part / whole : null;
}

export const verdict = {
  id: 'verdict',
  title: 'Verdict',
  needs: ['verdict', 'requests'],
  wide: true,
  rows: (view) => view.findings,
  note: (view) => view.dropped ? `${view.dropped} more are not shown` : '',
  draw(view) {
    const findings = filtered(view.findings, (each) => `${each.kind} ${each.about} ${each.what} ${each.node}`);
    const requests = shown('requests') ?? {}, served = Object.values(requests.outcomes ?? {}).reduce((sum, each) => sum + each, 0);
    return html`<p class=${`sentence ${view.severity}`}>${MARKS[view.severity]} ${view.ready ? 'ready' : `not ready: ${view.reason}`};
        ${' '}${WORDS[view.severity]}</p>
      <p class="figures"><span>policy <b>${requests.policy}</b></span> <span><b>${short(served)}</b> requests</span>
        ${' '}<span><b>${short(requests.prompt_tokens)}</b> prompt tokens</span>
        ${' '}<span><b>${percent(shareOf(requests.predicted_tokens, requests.prompt_tokens))}</b> predicted as cached</span>
        ${' '}<span><b>${percent(shareOf(requests.cached_tokens, requests.counted_tokens))}</b> cached, as engines count</span>
        ${' '}<span><b>${short(requests.routes)}</b> routes</span></p>
      <ul class="findings">${groups(findings).map((found) => html`<${Group} key=${found[0].kind + found[0].severity} found=${found} />`)}</ul>`;
  },
};
