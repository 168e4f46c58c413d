// A web worker: reads what the node sends and draws the prefix map, so that neither holds up the page.
// It is asked {follow, key}, {past, id, key} or {draw, id}, and answers {line}, {ended}, or {id, made} and {id, failed}.
import { drawn } from './map_drawing.js';
import { laidOut } from './map_layout.js';
import { answerOf } from './requests.js';

const SILENT_MS = 5000;

let open = null, rewinding = null; // what aborts the stream, and the question for the past, that are open

onmessage = ({ data }) => {
  if ('follow' in data) return follow(data);
  if ('past' in data) return answer(data.id, past(data));
  return answer(data.id, drawn(data.draw));
};

async function answer(id, making) {
  try {
    const made = await making;
    postMessage({ id, made }, { transfer: owned(made) });
  } catch (error) {
    postMessage({ id, failed: troubleOf(error) });
  }
}

function troubleOf({ name, message, status }) {
  return { name, message, status };
}

// What need not be copied: a picture, and the columns of a map.
function owned(made) {
  if (made instanceof ImageBitmap) return [made];
  const map = made.panes?.prefixes ?? {};
  return Object.values(map).filter(ArrayBuffer.isView).map((each) => each.buffer);
}

function withMap(shown) {
  if (shown.panes?.prefixes) shown.panes.prefixes = laidOut(shown.panes.prefixes);
  return shown;
}

// A later question ends the one before: nobody waits for that any more.
async function past({ past: ago, key }) {
  rewinding?.abort();
  rewinding = new AbortController();
  const found = await answerOf(`/admin/page/past?ago=${ago}`, key, { signal: rewinding.signal });
  return withMap(await found.json());
}

async function follow({ follow: wanted, key }) {
  open?.abort();
  const mine = open = new AbortController();
  if (!wanted) return;
  try {
    await read(mine, key);
    if (open === mine) postMessage({ ended: { name: 'Closed' } });
  } catch (error) {
    if (open === mine) postMessage({ ended: troubleOf(error) }); // else it was ended for another
  }
}

async function read(mine, key) {
  const found = await answerOf('/admin/page/stream', key, { signal: mine.signal });
  const reader = found.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = '';
  for (;;) {
    const silent = setTimeout(() => mine.abort(), SILENT_MS); // a node that is cut off does not close
    const { value, done } = await reader.read().finally(() => clearTimeout(silent));
    if (done) return;
    text += value;
    const lines = text.split('\n');
    text = lines.pop();
    for (const each of lines) {
      const line = withMap(JSON.parse(each));
      postMessage({ line }, { transfer: owned(line) });
    }
  }
}
