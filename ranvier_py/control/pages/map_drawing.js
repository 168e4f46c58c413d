// The picture of a prefix map: colour by how many engines hold a prefix, a frame around the chosen one.
import { visitBoxes } from './map_boxes.js';

const THIN = 0.6, FRAMED = 3; // pixels: narrower ones are left out, and have no line around them

export function drawn({ map, size, ratio, chosen, colours, holders, line, mark }) {
  const canvas = new OffscreenCanvas(Math.max(1, size.width * ratio), size.height * ratio), context = canvas.getContext('2d');
  context.scale(ratio, ratio);
  context.strokeStyle = line;
  let around = null;
  visitBoxes(map, size, THIN, (place, box) => {
    context.fillStyle = colours[holders.findLastIndex((least) => map.holders[place] >= least)];
    context.fillRect(box.x, box.y, box.width, box.height);
    if (box.width > FRAMED) context.strokeRect(box.x, box.y, box.width, box.height);
    if (place === chosen) around = box;
  });
  if (around) {
    context.strokeStyle = mark;
    context.lineWidth = 3;
    context.strokeRect(around.x + 1.5, around.y + 1.5, around.width - 3, around.height - 3);
  }
  return canvas.transferToImageBitmap();
}
