// Templates: `html` makes what preact draws, without a build step and without text that is taken for markup.
import { Component, h, render } from './vendor/preact.mjs';
import htm from './vendor/htm.mjs';

export const html = htm.bind(h);
export { Component, h, render };

const SLICE_MS = 4; // of a frame: strips and charts are drawn in the frames after the tables, so that none takes long

const due = new Set(); // what is to be drawn again

function drawSome() {
  const began = performance.now();
  try {
    for (const each of due) {
      if (performance.now() - began > SLICE_MS) break;
      due.delete(each);
      each.props.draw(each.element, each.props);
    }
  } finally {
    if (due.size) requestAnimationFrame(drawSome);
  }
}

// Something that draws itself after each update: a canvas or a chart, which preact must leave alone.
export class Drawn extends Component {
  keep = (element) => { this.element = element ?? this.element; };

  componentDidMount() { this.props.draw(this.element, this.props); }
  componentDidUpdate() {
    if (!due.size) requestAnimationFrame(drawSome);
    due.add(this);
  }
  componentWillUnmount() {
    due.delete(this);
    this.props.end?.(this.element);
  }
  render({ tag = 'div', draw, end, data, ...rest }) { return h(tag, { ...rest, ref: this.keep }); }
}
