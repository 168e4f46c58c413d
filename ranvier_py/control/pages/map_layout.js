// Where each prefix stands on the map: columns of numbers, one element a prefix, as they pass between a worker and the page.
// `walk` has the prefixes in the order of the tree, each before those below it; `after` where the next one beside it is.
import { hierarchy, partition } from './vendor/d3-hierarchy.min.mjs';

export function laidOut(view) {
  const count = view.tokens.length;
  const nodes = view.tokens.map((_, place) => ({ place, children: [] })), top = { place: -1, children: [] };
  view.parent.forEach((parent, place) => (parent < 0 ? top : nodes[parent]).children.push(nodes[place]));
  const root = hierarchy(top).sum((each) => (each.children.length || each.place < 0 ? 0 : view.heat[each.place]));
  partition().size([1, 1])(root.sort((a, b) => b.value - a.value));
  const map = {
    routes: view.routes, count, name: view.name.join(''), most: view.tokens.reduce((most, each) => Math.max(most, each), 1),
    parent: Int32Array.from(view.parent), tokens: Uint32Array.from(view.tokens), holders: Uint32Array.from(view.holders),
    heat: Float64Array.from(view.heat), idle_s: Float64Array.from(view.idle_s),
    low: new Float64Array(count), high: new Float64Array(count), walk: new Int32Array(count), after: new Int32Array(count),
  };
  let at = 0;
  const visit = (node) => {
    const mine = at, { place } = node.data;
    if (place >= 0) [map.walk[at++], map.low[place], map.high[place]] = [place, node.x0, node.x1];
    node.children?.forEach(visit);
    if (place >= 0) map.after[mine] = at;
  };
  visit(root);
  return map;
}
