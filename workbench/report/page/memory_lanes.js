// Memory that ranks hold over time, simulated and executed over each other, on the timelines' clock.

import { byteText } from "./numbers.js";
import { heldAt } from "./trace_columns.js";

const HEIGHT = 48, GAP = 8; // pixels
const PEAK = 55; // pixels of its text at most
const AREA = 0.14; // opacity below a curve

export class MemoryLanes {
  rowHeight = HEIGHT + GAP;
  name = "Memory held by ranks over time; the cursor of the timelines is here too";

  // traces: [{key, trace}], the key of one of the page's colours
  constructor(view, traces) {
    this.view = view;
    this.traces = traces;
    this.peaks = traces.map(({ trace }) => peaksOf(trace));
    this.most = Math.max(1, ...this.peaks.flatMap(peaks => [...peaks.values()]));
  }

  drawRow(context, row, y, scale, ink) {
    context.fillStyle = ink.line;
    context.fillRect(scale.left, y + HEIGHT, scale.right - scale.left, 1);
    context.font = ink.font(11);
    context.textBaseline = "middle";
    context.fillStyle = ink.soft;
    context.textAlign = "right";
    const isNarrow = scale.left < 100;
    context.fillText(isNarrow ? `${row.rank}` : `rank ${row.rank}`, scale.left - 7, y + HEIGHT / 2, scale.left - 10);
    for (const { key, trace } of this.traces) {
      const memory = trace.ofRank.get(row.rank)?.memory;
      if (memory?.time.length) this.#curve(context, memory, trace.end, y, scale, ink[key]);
    }
    if (!isNarrow) this.#peaks(context, row, y, scale, ink);
    if (this.view.cursor !== null) this.#held(context, row, y, scale, ink);
  }

  #curve(context, memory, end, y, scale, colour) {
    const level = bytes => y + HEIGHT * (1 - bytes / this.most);
    const left = scale.x(memory.time[0]), right = Math.min(scale.x(end), scale.right);
    context.save();
    context.beginPath();
    context.rect(scale.left, y - 2, scale.right - scale.left, HEIGHT + 3);
    context.clip();
    const line = new Path2D();
    line.moveTo(left, level(memory.bytes[0]));
    for (let k = 1; k < memory.time.length; k++) {
      const x = scale.x(memory.time[k]);
      line.lineTo(x, level(memory.bytes[k - 1]));
      line.lineTo(x, level(memory.bytes[k]));
    }
    line.lineTo(right, level(memory.bytes.at(-1)));
    context.strokeStyle = colour;
    context.lineWidth = 1.4;
    context.stroke(line);
    line.lineTo(right, y + HEIGHT);
    line.lineTo(left, y + HEIGHT);
    context.fillStyle = colour;
    context.globalAlpha = AREA;
    context.fill(line);
    context.restore();
  }

  // What the rank holds at its peak, in the colour of the curve.
  #peaks(context, row, y, scale, ink) {
    context.textAlign = "left";
    this.traces.forEach(({ key }, place) => {
      const bytes = this.peaks[place].get(row.rank);
      context.fillStyle = ink[key];
      if (bytes) context.fillText(byteText(bytes), scale.right + 5, y + 7 + 14 * place, PEAK);
    });
  }

  // At the cursor: on its right, or where the picture ends on its left.
  #held(context, row, y, scale, ink) {
    const x = scale.x(this.view.cursor);
    if (x < scale.left || x > scale.right) return;
    const isRight = x < (scale.left + scale.right) / 2;
    context.textAlign = isRight ? "left" : "right";
    this.traces.forEach(({ key, trace }, place) => {
      const memory = trace.ofRank.get(row.rank)?.memory;
      const bytes = memory && this.view.cursor <= trace.end ? heldAt(memory, this.view.cursor) : null;
      if (bytes === null) return;
      const text = `${key} ${byteText(bytes)}`;
      const at = x + (isRight ? 6 : -6), width = context.measureText(text).width;
      context.fillStyle = ink.paper;
      context.globalAlpha = 0.85;
      context.fillRect(isRight ? at - 2 : at - width - 2, y + 2 + 14 * place, width + 4, 14);
      context.globalAlpha = 1;
      context.fillStyle = ink.ink;
      context.fillText(text, at, y + 9 + 14 * place);
    });
  }
}

// rank -> most bytes that it holds
function peaksOf(trace) {
  const peak = ({ memory }) => memory.bytes.reduce((most, bytes) => Math.max(most, bytes), 0);
  return new Map([...trace.ofRank].map(([rank, lanes]) => [rank, peak(lanes)]));
}
