// The time that all panes show: now, or any second of the last quarter of an hour.
import { html } from './html.js';
import { askPast } from './node.js';
import { change, HISTORY_S, state } from './state.js';
import { age, clock } from './words.js';

const SETTLED_MS = 80; // before what was dragged to is asked for
const AGAIN_MS = 1000; // before a node that did not answer is asked again

let timer = 0;

export function goTo(ago) {
  if (ago <= 0) return goLive();
  change({ chosenAt: state.at - Math.min(ago, HISTORY_S), past: state.past ?? { panes: state.live } });
  clearTimeout(timer);
  timer = setTimeout(fetchPast, SETTLED_MS);
}

export function goLive() {
  clearTimeout(timer);
  change({ chosenAt: null, past: null });
}

export function step(seconds) {
  goTo((state.chosenAt === null ? 0 : state.at - state.chosenAt) + seconds);
}

export async function fetchPast() {
  const wanted = state.chosenAt; // what was shown before stays until an answer comes
  try {
    const past = await askPast(Math.max(0, Math.round(state.at - wanted)));
    if (state.chosenAt === wanted) change({ past: { ...past, of: wanted }, note: '' });
  } catch (error) {
    if (state.chosenAt !== wanted || error.name === 'AbortError') return;
    if (error.status) change({ past: { panes: {}, of: wanted }, note: error.message });
    else timer = setTimeout(fetchPast, AGAIN_MS);
  }
}

export function Scrubber() {
  const ago = state.chosenAt === null ? 0 : Math.round(state.at - state.chosenAt);
  const words = ago ? `${age(ago)} ago, ${clock(state.chosenAt)}` : `now, ${state.at ? clock(state.at) : ''}`;
  return html`<div class=${`scrubber${ago ? ' past' : ''}`}>
    <input type="range" id="scrubber" min=${-HISTORY_S} max="0" step="1" value=${-ago} aria-label="time that is shown"
      onInput=${(event) => goTo(-event.target.value)} />
    <output for="scrubber">${words}</output>
    <button id="live" disabled=${!ago} onClick=${goLive}>live</button>
  </div>`;
}
