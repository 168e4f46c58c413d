// What asks somebody something: for the key, for a confirmation, for a request to explain; and the list of keys.
import { Drawn, html } from './html.js';
import { Candidates } from './candidates.js';
import { KEYS } from './keys.js';
import { order, wake } from './node.js';
import { change, state } from './state.js';

function close() {
  change({ dialog: null });
}

function Dialog({ title, children }) {
  const open = (element) => element.open || element.showModal();
  return html`<${Drawn} tag="dialog" draw=${open} end=${(element) => element.close()} aria-label=${title} onCancel=${(event) => { event.preventDefault(); close(); }}>
    <h2>${title}</h2>${children}</${Drawn}>`;
}

export function KeyForm() {
  const take = (event) => {
    event.preventDefault();
    const key = new FormData(event.target).get('key').trim();
    sessionStorage.setItem('ranvier-key', key);
    change({ key, asksKey: false, trouble: '' });
    wake();
  };
  return html`<form class="key" onSubmit=${take}>
    <h1><img src="/page/icon.svg" alt="" width="24" height="24" /> Ranvier</h1>
    <p>This node's control port needs a key: one of role <b>read</b> to look, of role <b>operate</b> to give orders.</p>
    ${state.trouble && html`<p class="banner down" id="refused">■ ${state.trouble}</p>`}
    <label>key <input name="key" type="password" autocomplete="off" spellcheck="false" required autofocus /></label>
    <button>look</button>
    <p><small>It is kept for this tab alone, until it is closed, and goes to this node alone.</small></p>
  </form>`;
}

async function carryOut(path, body, words) {
  close();
  try {
    const done = await order(path, body);
    const silent = Object.entries(done.reached ?? {}).filter(([, answer]) => answer && answer !== 'ok' && typeof answer === 'string');
    change({ note: `${words}: done${done.shared ? ', and sent to the other nodes' : ''}${silent.length && done.shared ? ` (${silent.map(([name, why]) => `${name}: ${why}`).join('; ')})` : ''}` });
  } catch (error) {
    change({ note: `${words}: refused (${error.status ?? 'no answer'}): ${error.message}` });
  }
}

function Drain({ row }) {
  const wanted = !row.draining, verb = wanted ? 'drain' : 'undrain';
  const words = wanted
    ? `It gets no new requests; ${row.load} in flight end as usual. Its prefixes are computed again elsewhere.`
    : 'It gets requests again.';
  return html`<${Dialog} title=${`${verb} ${row.name}?`}><p>${words}</p><p class="orders">
    <button id="confirm" class="main" onClick=${() => carryOut('/admin/backends/drain', { name: row.name, draining: wanted }, `${verb} ${row.name}`)}>${verb}</button>
    <button onClick=${close}>cancel</button></p></${Dialog}>`;
}

function Weight({ row }) {
  const take = (event) => {
    event.preventDefault();
    const weight = Number(new FormData(event.target).get('weight'));
    carryOut('/admin/backends/weight', { name: row.name, weight }, `weight ${weight} for ${row.name}`);
  };
  return html`<${Dialog} title=${`weight of ${row.name}`}><form onSubmit=${take}>
    <p>It is ${row.weight} now. Policies by load send it so many times what one of weight 1 gets.</p>
    <p><input name="weight" type="number" min="0.01" max="1000" step="any" value=${row.weight} required /></p>
    <p class="orders"><button id="confirm" class="main">set</button>
    <button type="button" onClick=${close}>cancel</button></p></form></${Dialog}>`;
}

function Explain({ row }) {
  const take = async (event) => {
    event.preventDefault();
    const body = new FormData(event.target).get('body');
    let explained;
    try {
      explained = { report: await order('/explain', body) };
    } catch (error) {
      explained = { error: error.message };
    }
    if (state.dialog?.kind === 'explain') change({ dialog: { ...state.dialog, body, explained } });
  };
  const { body, explained } = state.dialog, model = row?.models?.[0] ?? '';
  const sample = JSON.stringify({ model, messages: [{ role: 'user', content: 'Where would this go?' }] }, null, 1);
  return html`<${Dialog} title="where would a request go, and why?"><form onSubmit=${take}>
    <p>Paste the body of a request: nothing is sent to an engine, placed, learned or counted.</p>
    <p><textarea name="body" rows="7" spellcheck="false">${body ?? sample}</textarea></p>
    ${explained?.error && html`<p class="banner down">■ ${explained.error}</p>`}
    ${explained?.report && html`<${Candidates} report=${explained.report} marked=${row?.name} />`}
    <p class="orders"><button class="main">explain</button><button type="button" onClick=${close}>close</button></p>
  </form></${Dialog}>`;
}

function Help() {
  return html`<${Dialog} title="keys"><dl class="keys">${KEYS.map(([key, words]) => html`<div key=${key}><dt><kbd>${key}</kbd></dt><dd>${words}</dd></div>`)}</dl>
    <p>The address has what you look at (pane, row, filter, order, time), and never the key: send it to somebody.</p>
    <p class="orders"><button class="main" onClick=${close}>close</button></p></${Dialog}>`;
}

const KINDS = { drain: Drain, weight: Weight, explain: Explain, help: Help };

export function Dialogs() {
  const { dialog } = state;
  return dialog && html`<${KINDS[dialog.kind]} key=${dialog.kind} ...${dialog} />`;
}
