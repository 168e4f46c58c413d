// The boxes of a prefix map that `map_layout.js` has laid out, for who draws them and for who points at them.

export const NAME_CHARACTERS = 16; // of a fingerprint: the names of a map are one string

export function nameOf(map, place) {
  return map.name.slice(NAME_CHARACTERS * place, NAME_CHARACTERS * (place + 1));
}

// The place of a prefix, -1 if the map does not have it.
export function placeOf(map, name) {
  for (let place = 0; name && place < map.count; place++) if (map.name.startsWith(name, NAME_CHARACTERS * place)) return place;
  return -1;
}

// Calls `take(place, box)` for each prefix that is at least `thin` wide, from the top down. `take` returns true to leave
// out what is below. `size`: {width, height, zoomed: the place that fills the map, or -1}.
export function visitBoxes(map, { width, height, zoomed }, thin, take) {
  const low = zoomed < 0 ? 0 : map.low[zoomed], wide = zoomed < 0 ? 1 : map.high[zoomed] - low;
  const down = (tokens) => height * Math.sqrt(tokens / map.most);
  for (let at = 0; at < map.count;) {
    const place = map.walk[at], parent = map.parent[place];
    const x = (width * (map.low[place] - low)) / wide, right = (width * (map.high[place] - low)) / wide;
    if (right - x < thin || x >= width || right <= 0) {
      at = map.after[at];
      continue;
    }
    const y = down(parent < 0 ? 0 : map.tokens[parent]), box = { x, y, width: right - x, height: down(map.tokens[place]) - y };
    at = take(place, box) ? map.after[at] : at + 1;
  }
}
