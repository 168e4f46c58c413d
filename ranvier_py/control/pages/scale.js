import { isDark } from './theme.js';

// Colours of an amount, from little to much: cividis, which people of all kinds of sight read alike.
const STOPS = [
  [0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115],
  [138, 134, 120], [165, 156, 116], [195, 179, 105], [225, 204, 85], [254, 232, 56],
];

const STEPS = 255;

function ramp(share) {
  const place = share * (STOPS.length - 1), low = Math.min(STOPS.length - 2, Math.floor(place));
  return STOPS[low].map((value, index) => Math.round(value + (place - low) * (STOPS[low + 1][index] - value)));
}

const LIGHT_LAST = Array.from({ length: STEPS + 1 }, (_, step) => ramp(step / STEPS));
const DARK_LAST = [...LIGHT_LAST].reverse();

// Returns what gives the colour of a share, 0 to 1. Much stands out from the page: dark on a light one, light on a dark one.
export function colours() {
  const table = isDark() ? LIGHT_LAST : DARK_LAST;
  return (share) => table[Math.round(STEPS * Math.min(1, Math.max(0, share)))];
}

export function css([red, green, blue]) {
  return `rgb(${red} ${green} ${blue})`;
}
