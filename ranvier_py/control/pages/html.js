// Templates: `html` makes what preact draws, without a build step and without text that is taken for markup.
import { Component, h, render } from './vendor/preact.mjs';
import htm from './vendor/htm.mjs';

export const html = htm.bind(h);
export { Component, h, render };

// What is drawn in a frame after panes, so that none takes long: milliseconds of strips and charts, or rows. The browser
// lays out and paints a row for 0.3 ms, if it is seen; else to compute it is all.
const SLICE_MS = 4, SEEN_ROWS = 16, UNSEEN_ROWS = 64;

const due = new Set(); // what is to be drawn again: {element, drawNow(), isRow?: true}
const timed = new Set(); // what shows the history: drawn again when time passes, or another time is chosen
let planned = false, timesDrawn = [];

export function drawSoon(one) {
  due.add(one);
  drawMore();
}

// Call this when a pane comes into view as well: its canvases have waited for that.
export function drawMore() {
  if (!planned) requestAnimationFrame(drawSome);
  planned = true;
}

export function drawnAlready(one) {
  due.delete(one);
}

function isSeen({ element }) {
  return !element?.closest('section')?.skipped;
}

// Those first that are seen. Rows are drawn even where nobody looks, since they are searched and read aloud.
function drawSome() {
  planned = false;
  const began = performance.now(), seen = [...due].filter(isSeen), rest = [...due].filter((each) => each.isRow && !isSeen(each));
  let share = 0;
  try {
    for (const each of [...seen, ...rest]) {
      if (share >= 1 || performance.now() - began > SLICE_MS) break;
      if (each.isRow) share += 1 / (isSeen(each) ? SEEN_ROWS : UNSEEN_ROWS);
      due.delete(each);
      each.drawNow();
    }
  } finally {
    if ([...seen, ...rest].some((each) => due.has(each))) drawMore();
  }
}

// Draw again what is `timed`, if this is not what it was drawn for: without a look at the rows that it stands in.
export function drawTimed(...now) {
  if (now.every((each, place) => each === timesDrawn[place])) return;
  timesDrawn = now;
  timed.forEach(drawSoon);
}

// Something that draws itself after each update: a canvas or a chart, which preact must leave alone.
export class Drawn extends Component {
  keep = (element) => { this.element = element ?? this.element; };

  drawNow() { this.props.draw(this.element, this.props); }
  componentDidMount() {
    this.drawNow();
    if (this.props.timed) timed.add(this);
  }
  componentDidUpdate() { drawSoon(this); }
  componentWillUnmount() {
    due.delete(this);
    timed.delete(this);
    this.props.end?.(this.element);
  }
  render({ tag = 'div', draw, end, data, timed: _, ...rest }) { return h(tag, { ...rest, ref: this.keep }); }
}
