// Requests to the node: its stream, what it showed before, and orders. The key goes in a field, never in a URL.
import { change, push, state, takeHistory } from './state.js';

const PAUSE_MS = 1000, SILENT_MS = 5000;

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function answerOf(path, options = {}) {
  const headers = { ...options.headers };
  if (state.key) headers.authorization = `Bearer ${state.key}`;
  const answer = await fetch(path, { ...options, headers, credentials: 'omit', cache: 'no-store' });
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  throw new Refused(answer.status, body.error?.message ?? `the node answered with status ${answer.status}`);
}

export async function ask(path) {
  return (await answerOf(path)).json();
}

export async function order(path, body) {
  const text = typeof body === 'string' ? body : JSON.stringify(body);
  const headers = { 'content-type': 'application/json' };
  return (await answerOf(path, { method: 'POST', body: text, headers })).json();
}

let open = null; // aborts the stream that is open

// Follow the stream for ever; a new key begins anew.
export async function follow() {
  for (;;) {
    if (state.asksKey || document.hidden) {
      await new Promise((wake) => { woken = wake; });
      continue;
    }
    open = new AbortController();
    try {
      await read(open.signal);
      change({ trouble: 'the node has closed the stream; trying again' });
    } catch (error) {
      change(troubleOf(error));
    }
    if (!state.asksKey) await new Promise((wake) => { woken = wake; setTimeout(wake, PAUSE_MS); });
  }
}

let woken = () => {};

export function wake() {
  open?.abort();
  woken();
}

function troubleOf(error) {
  if (error.status === 401) {
    const wrong = state.key !== '';
    sessionStorage.removeItem('ranvier-key');
    return { asksKey: true, key: '', trouble: wrong ? 'The node refused this key (401): it is unknown, disabled or has ended.' : '' };
  }
  if (error.status === 403) return { asksKey: true, trouble: `Not allowed (403): ${error.message}` };
  if (error.name === 'AbortError') return {};
  return { trouble: `the node does not answer: ${error.message}; trying again` };
}

async function read(signal) {
  const answer = await answerOf('/admin/page/stream', { signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = '';
  for (;;) {
    const silent = setTimeout(() => open?.abort(), SILENT_MS); // a node that is cut off does not close
    const { value, done } = await reader.read().finally(() => clearTimeout(silent));
    if (done) return;
    text += value;
    const lines = text.split('\n');
    text = lines.pop();
    for (const line of lines) take(JSON.parse(line));
  }
}

function take(line) {
  if (line.hello) {
    state.series.clear();
    change({ hello: line.hello, live: {}, trouble: '', asksKey: false });
  } else if (line.history) {
    takeHistory(line.history);
    change({});
  } else {
    push(line.now);
    change({ at: line.at, live: { ...state.live, ...line.panes }, trouble: '' });
  }
}
