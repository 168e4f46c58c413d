// Values as an operator reads them, in few characters.

export function short(number) {
  if (number === null || number === undefined || Number.isNaN(number)) return '–';
  for (const [unit, mark] of [[1e9, 'G'], [1e6, 'M'], [1e3, 'k']]) {
    if (Math.abs(number) >= unit && Math.abs(number) >= 10000) {
      return (number / unit).toFixed(Math.abs(number) < 100 * unit ? 1 : 0) + mark;
    }
  }
  return Number.isInteger(number) ? String(number) : number.toFixed(Math.abs(number) < 10 ? 1 : 0);
}

export function percent(share) {
  return share === null || share === undefined ? '–' : `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}\u00a0%`;
}

export function bytes(number) {
  return number === null || number === undefined ? '–' : `${short(Math.round(number))}\u00a0B`;
}

// Seconds that a request waits or computes.
export function seconds(value) {
  if (value === null || value === undefined) return '–';
  const size = Math.abs(value);
  if (size < 0.01) return `${(1000 * value).toFixed(size && size < 0.001 ? 2 : 1)} ms`;
  if (size < 1) return `${(1000 * value).toFixed(0)} ms`;
  return `${value.toFixed(size < 100 ? 1 : 0)} s`;
}

// How long ago, or for how long.
export function age(value) {
  if (value === null || value === undefined) return '–';
  for (const [unit, name] of [[86400, 'd'], [3600, 'h'], [60, 'min']]) {
    if (value >= 2 * unit) return `${Math.round(value / unit)} ${name}`;
  }
  return `${Math.max(0, Math.round(value))} s`;
}

const second = new Intl.DateTimeFormat('en-GB', { timeStyle: 'medium' }); // to make one takes long

export function clock(at) {
  return second.format(1000 * at);
}

// w2 before w10.
export function byName(a, b) {
  return String(a).localeCompare(String(b), 'en', { numeric: true });
}
