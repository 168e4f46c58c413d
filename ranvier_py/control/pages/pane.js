// The frame of a pane: its title, what it shows in a word, and its contents as files.
import { Component, drawMore, html } from './html.js';
import { saveCsv, saveJson } from './files.js';
import { alike, mayOrder, shown, state } from './state.js';

// A pane: {id, title, needs: names of what the node sends, note(view), draw(view), rows(view), whole?(view), wide?: true}.
export class Pane extends Component {
  shouldComponentUpdate() {
    const { pane } = this.props, before = this.looked;
    this.looked = [...pane.needs.map(shown), ...(pane.watches ?? []).map((each) => each()), ...choices(pane.id)];
    return !before || this.looked.some((each, place) => !alike(each, before[place]));
  }

  render({ pane }) {
    const [view] = pane.needs.map(shown);
    return html`<section data-pane=${pane.id} class=${pane.wide ? 'wide' : ''} aria-label=${pane.title}
      oncontentvisibilityautostatechange=${seenOrNot}>
      <h2>${pane.title} <small>${view !== undefined ? pane.note?.(view) : ''}</small>
        <span class="files">
          <button title="the rows, as CSV" disabled=${view === undefined} onClick=${() => saveCsv(pane.id, pane.rows(view))}>CSV</button>
          <button title="all of it, as JSON" disabled=${view === undefined} onClick=${() => saveJson(pane.id, pane.whole?.(view) ?? view)}>JSON</button>
        </span></h2>
      ${view === undefined ? html`<p class="empty">${pane.missing ?? absent()}</p>` : pane.draw(view)}
    </section>`;
  }
}

// Browsers say whether a pane is near to what is seen of the page (`content-visibility` in the style sheet).
function seenOrNot({ target, skipped }) {
  target.skipped = skipped;
  if (!skipped) drawMore();
}

function absent() {
  return state.chosenAt === null ? (state.at ? 'nothing yet' : 'waiting for the node') : 'not known of that time';
}

// What people chose, as far as it changes how a pane looks.
function choices(id) {
  return [
    state.pane === id, state.selected[id], state.opened[id], state.sort[id], state.filter, state.chosenAt === null, mayOrder(), state.hello?.role,
    state.details, document.documentElement.dataset.theme, state.at === 0,
  ];
}
