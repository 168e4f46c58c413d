// Requests to the node: its stream, what it showed before, and orders. What is large is read by a worker (`reader.js`).
import { answerOf } from './requests.js';
import { change, push, state, takeHistory } from './state.js';

const PAUSE_MS = 1000;

const reader = new Worker('/page/reader.js', { type: 'module' });
const waiting = new Map(); // by the number of a question to the reader: who waits for its answer
let asked = 0;
let woken = () => {}; // ends what `follow` waits for

reader.onmessage = ({ data: { id, made, failed, line, ended } }) => {
  if (line) return take(line);
  if (ended) return woken(ended);
  const { resolve, reject } = waiting.get(id);
  waiting.delete(id);
  if (failed) reject(failed);
  else resolve(made);
};
reader.onerror = (event) => change({ trouble: `this page can't read what the node sends: ${event.message ?? 'its worker did not start'}` });

function askReader(question) {
  return new Promise((resolve, reject) => {
    waiting.set(++asked, { resolve, reject });
    reader.postMessage({ ...question, id: asked });
  });
}

export async function ask(path) {
  return (await answerOf(path, state.key)).json();
}

export async function order(path, body) {
  const text = typeof body === 'string' ? body : JSON.stringify(body);
  const headers = { 'content-type': 'application/json' };
  return (await answerOf(path, state.key, { method: 'POST', body: text, headers })).json();
}

// What all panes showed so many seconds ago. A later question ends the one before, with an AbortError.
export function askPast(ago) {
  return askReader({ past: ago, key: state.key });
}

// A picture of the prefix map; see `map_drawing.js`.
export function pictureOf(draw) {
  return askReader({ draw });
}

// Follow the stream for ever; a new key begins anew.
export async function follow() {
  for (;;) {
    const stops = state.asksKey || document.hidden;
    reader.postMessage({ follow: !stops, key: state.key });
    const ended = await new Promise((wake) => { woken = wake; });
    if (ended) change(troubleOf(ended));
    if (ended && !state.asksKey) await new Promise((wake) => { woken = wake; setTimeout(wake, PAUSE_MS); });
  }
}

// Begin anew: the key is another, or the page is seen again, or not any more.
export function wake() {
  woken();
}

function troubleOf({ name, status, message }) {
  if (status === 401) {
    const wrong = state.key !== '';
    sessionStorage.removeItem('ranvier-key');
    return { asksKey: true, key: '', trouble: wrong ? 'The node refused this key (401): it is unknown, disabled or has ended.' : '' };
  }
  if (status === 403) return { asksKey: true, trouble: `Not allowed (403): ${message}` };
  if (name === 'AbortError') return {};
  if (name === 'Closed') return { trouble: 'the node has closed the stream; trying again' };
  return { trouble: `the node does not answer: ${message}; trying again` };
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
