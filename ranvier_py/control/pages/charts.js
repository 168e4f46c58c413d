// Lines over the last quarter of an hour, by uPlot, and what is drawn of counters that only grow.
import { Drawn, html } from './html.js';
import { HISTORY_S, state } from './state.js';
import { colour } from './theme.js';

const COLOURS = ['--line0', '--line1', '--line2', '--line3', '--line4'];
const HEIGHT = 170, AXIS = 68; // pixels: an axis has room for -500 ms

const minute = new Intl.DateTimeFormat('en-GB', { hour: '2-digit', minute: '2-digit' }); // to make one takes long

// By how much a counter grew in the `over` seconds before each second.
export function growth(name, over) {
  const values = state.series.get(name);
  return Array.from({ length: HISTORY_S }, (_, at) => {
    const grown = values && at >= over ? values[at] - values[at - over] : NaN;
    return grown >= 0 ? grown : NaN;
  });
}

export function shareOf(part, whole) {
  return part.map((value, at) => (whole[at] > 0 ? value / whole[at] : null));
}

function drawLines(box, { data: { lines, written } }) {
  const width = box.clientWidth || 400, theme = document.documentElement.dataset.theme + matchMedia('(prefers-color-scheme: dark)').matches;
  const times = Array.from({ length: HISTORY_S }, (_, at) => state.at - (HISTORY_S - 1 - at));
  const values = [times, ...lines.map((line) => line.values().map((value) => (Number.isNaN(value) ? null : value)))];
  const kind = `${lines.map((line) => line.name).join()} ${width} ${theme}`;
  if (box.chart && box.kind === kind) return box.chart.setData(values);
  box.chart?.destroy();
  const axis = { stroke: colour('--soft'), grid: { stroke: colour('--grid'), width: 1 }, ticks: { stroke: colour('--grid'), width: 1 }, font: '11px system-ui' };
  box.kind = kind;
  box.chart = new globalThis.uPlot({
    width, height: HEIGHT, hooks: { draw: [markTime] }, legend: { show: false }, cursor: { show: false },
    scales: { y: { range: (_, low, high) => [Math.min(0, low ?? 0), Math.max(high ?? 0, 1e-6)] } },
    series: [{}, ...lines.map((line, place) => ({ label: line.name, stroke: colour(COLOURS[place % COLOURS.length]), width: 2, dash: place % 2 ? [6, 3] : undefined }))],
    axes: [{ ...axis, values: (_, ticks) => ticks.map((tick) => (tick ? minute.format(1000 * tick) : '')) },
      { ...axis, size: AXIS, values: (_, ticks) => ticks.map(written) }],
  }, values, box);
}

// The time that was chosen, as a line from top to bottom.
function markTime({ ctx, bbox, valToPos }) {
  if (state.chosenAt === null) return;
  ctx.fillStyle = colour('--line1');
  ctx.fillRect(valToPos(state.chosenAt, 'x', true) - devicePixelRatio, bbox.top, 2 * devicePixelRatio, bbox.height);
}

// lines: {name, values(): numbers of HISTORY_S seconds, NaN or null where there is none}, which are asked for when they are drawn.
export function Lines({ lines, written }) {
  return html`<p class="legend">${lines.map((line, place) => html`<span key=${line.name}><i class=${`swatch line${place % COLOURS.length}${place % 2 ? ' dashed' : ''}`}></i> ${line.name}</span> `)}</p>
    <div class="chart"><${Drawn} timed draw=${drawLines} end=${(box) => box.chart?.destroy()} data=${{ lines, written }} /></div>`;
}
