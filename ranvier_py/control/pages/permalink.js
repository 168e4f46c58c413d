// What is looked at, as the part of the address that no server ever sees. The key is never in it.

export function fromHash(hash) {
  const given = new URLSearchParams(hash.replace(/^#/, ''));
  const found = {};
  if (given.get('pane')) found.pane = given.get('pane');
  if (given.get('q')) found.filter = given.get('q');
  if (given.get('row')) {
    found.selected = { [found.pane ?? 'engines']: given.get('row') };
    if (given.get('open')) found.opened = { [found.pane ?? 'engines']: given.get('row') };
  }
  if (given.get('sort')) {
    const [title, down] = given.get('sort').split('~');
    found.sort = { [found.pane ?? 'engines']: { title, down: down === 'down' } };
  }
  const at = Number(given.get('at'));
  if (at > 0) found.chosenAt = at;
  return found;
}

export function toHash(state) {
  const { pane } = state, row = state.opened[pane] ?? state.selected[pane], sort = state.sort[pane];
  const words = new URLSearchParams({ pane });
  if (state.filter) words.set('q', state.filter);
  if (row) words.set('row', row);
  if (row && state.opened[pane] === row) words.set('open', '1');
  if (sort) words.set('sort', `${sort.title}~${sort.down ? 'down' : 'up'}`);
  if (state.chosenAt !== null) words.set('at', String(Math.round(state.chosenAt)));
  return `#${words}`;
}
