// Templates: `html` makes what preact draws, without a build step and without text that is taken for markup.
import { Component, h, render } from './vendor/preact.mjs';
import htm from './vendor/htm.mjs';

export const html = htm.bind(h);
export { Component, h, render };

// Something that draws itself after each update: a canvas or a chart, which preact must leave alone.
export class Drawn extends Component {
  keep = (element) => { this.element = element ?? this.element; };

  componentDidMount() { this.props.draw(this.element, this.props); }
  componentDidUpdate() { this.props.draw(this.element, this.props); }
  componentWillUnmount() { this.props.end?.(this.element); }
  render({ tag = 'div', draw, end, data, ...rest }) { return h(tag, { ...rest, ref: this.keep }); }
}
