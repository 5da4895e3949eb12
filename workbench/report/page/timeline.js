// A trace as rows of ranks: passes, below them exchanges and messages; idle time is hatched.

import { byteText, exactMilliseconds, milliseconds, runsText } from "./numbers.js";
import { firstAfter } from "./trace_columns.js";

const COMPUTE = 20, LANE = 5, GAP = 7; // pixels
const LABEL_PIXELS = 6; // of a character
const DIMMED = 0.22;

export class Timeline {
  rowHeight = COMPUTE + 2 * (LANE + 1) + GAP;

  constructor(view, key, title, trace, path) {
    this.view = view;
    this.key = key;
    this.trace = trace;
    this.name = `${title}: timeline of ranks; keys + and - zoom, arrows pan, Shift and arrows step from span to span`;
    this.path = path;
    this.critical = new Set(path?.spans);
    this.criticalRows = new Set(path?.rows);
  }

  // Of a whole picture whose rows are drawn: where the path goes from one row to another.
  drawOver(context, yOf, scale, ink) {
    if (!this.#showsPath) return;
    const index = new Map(this.view.rows.flatMap((row, place) => row.ranks.map(rank => [rank, place])));
    context.save();
    context.beginPath();
    context.rect(scale.left, 0, scale.right - scale.left, yOf(this.view.rows.length));
    context.clip();
    context.strokeStyle = ink.accent;
    context.lineWidth = 1.2;
    context.beginPath();
    for (let k = 1; k < this.path.steps.length; k++) {
      const [before, , leaves] = this.path.steps[k - 1], [after, arrives] = this.path.steps[k];
      const from = index.get(before), to = index.get(after);
      if (from === undefined || to === undefined || from === to) continue;
      if (arrives < scale.from || leaves > scale.to) continue;
      context.moveTo(scale.x(leaves), yOf(from) + COMPUTE / 2);
      context.lineTo(scale.x(arrives), yOf(to) + COMPUTE / 2);
    }
    context.stroke();
    context.restore();
  }

  get #showsPath() {
    return this.view.showsPath && this.path !== null;
  }

  drawRow(context, row, y, scale, ink) {
    const lanes = this.trace.ofRank.get(row.rank);
    this.#rowName(context, row, y, scale, ink, lanes);
    this.#idle(context, y, scale, ink);
    if (!lanes) return;
    context.save();
    context.beginPath();
    context.rect(scale.left, y - 1, scale.right - scale.left, this.rowHeight);
    context.clip();
    this.#lane(context, lanes.compute, y, COMPUTE, scale, ink);
    this.#lane(context, lanes.reduce, y + COMPUTE + 1, LANE, scale, ink);
    this.#messages(context, lanes.send, y + COMPUTE + LANE + 2, scale, ink);
    context.restore();
  }

  #rowName(context, row, y, scale, ink, lanes) {
    const isNarrow = scale.left < 100;
    const several = row.ranks.length > 1;
    const word = isNarrow ? "" : several ? "ranks " : "rank ";
    context.font = ink.font(11);
    context.textBaseline = "middle";
    context.textAlign = "right";
    context.fillStyle = ink.soft;
    let text = word + runsText(row.ranks);
    const room = scale.left - 10;
    if (context.measureText(text).width > room) text = `${word}${row.ranks[0]} +${row.ranks.length - 1}`;
    context.fillText(text, scale.left - 7, y + COMPUTE / 2, room);
    if (!isNarrow && lanes) {
      context.textAlign = "left";
      context.fillText(`${Math.round(100 * this.#idleShare(lanes))}% idle`, scale.right + 7, y + COMPUTE / 2);
    }
  }

  // Of the shown window.
  #idleShare(lanes) {
    const { spans } = this.trace;
    const from = this.view.from, to = Math.min(this.view.to, this.trace.end);
    if (to <= from) return 1;
    let busy = 0;
    for (let k = firstAfter(lanes.compute, i => spans[i].end, from); k < lanes.compute.length; k++) {
      const span = spans[lanes.compute[k]];
      if (span.start >= to) break;
      busy += Math.min(span.end, to) - Math.max(span.start, from);
    }
    return Math.max(0, 1 - busy / (to - from));
  }

  #idle(context, y, scale, ink) {
    const end = Math.min(scale.x(this.trace.end), scale.right);
    if (end <= scale.left) return;
    context.fillStyle = ink.wash;
    context.fillRect(scale.left, y, end - scale.left, COMPUTE);
    context.fillStyle = hatching(context, ink.idle);
    context.fillRect(scale.left, y, end - scale.left, COMPUTE);
  }

  #lane(context, order, y, height, scale, ink) {
    const { spans } = this.trace;
    let drawnTo = -Infinity;
    for (let k = firstAfter(order, i => spans[i].end, scale.from); k < order.length; k++) {
      const span = spans[order[k]];
      if (span.start > scale.to) break;
      if (!this.view.has(span)) continue;
      const right = scale.x(span.end);
      const isMarked = this.#isSelected(order[k]) || (this.#showsPath && this.critical.has(order[k]));
      if (right < drawnTo + 0.35 && !isMarked) continue; // narrower than can be seen, beside one that was drawn
      this.#span(context, order[k], y, height, scale, ink);
      drawnTo = right;
    }
  }

  #span(context, index, y, height, scale, ink) {
    const span = this.trace.spans[index];
    const left = scale.x(span.start);
    const width = Math.max(scale.x(span.end) - left, 0.6);
    const [fill, text] = this.#fill(span, ink);
    const isDimmed = this.#showsPath && !this.critical.has(index);
    context.globalAlpha = isDimmed ? DIMMED : 1;
    context.fillStyle = fill;
    context.fillRect(left, y, width > 2 ? width - 0.5 : width, height);
    if (height === COMPUTE && width >= LABEL_PIXELS * span.name.length + 4) {
      context.fillStyle = text;
      context.font = ink.font(10);
      context.textAlign = "center";
      context.fillText(span.name, middleOf(left, width, scale), y + height / 2 + 0.5);
    }
    context.globalAlpha = 1;
    if (this.#showsPath && !isDimmed) {
      context.fillStyle = ink.accent;
      context.fillRect(left, y + height - 2.5, width, 2.5);
    }
    if (this.#isSelected(index)) {
      context.strokeStyle = ink.ink;
      context.lineWidth = 2;
      context.strokeRect(left, y, Math.max(width, 2), height);
    }
  }

  #fill(span, ink) {
    const module = span.stage === null ? null : this.view.plan.stages[span.stage].module;
    return this.view.plan.fills[module]?.[span.kind] ?? [ink.neutral, ink.paper];
  }

  #messages(context, order, y, scale, ink) {
    let drawnTo = -Infinity;
    for (const index of order) {
      const message = this.trace.messages[index];
      if (message.start_s > scale.to) break;
      const left = scale.x(message.start_s);
      const right = Math.max(scale.x(message.end_s), left + 0.6);
      const isCritical = this.#showsPath && this.criticalRows.has(message.row);
      if (right < scale.left || (right < drawnTo + 0.35 && !isCritical)) continue;
      context.fillStyle = isCritical ? ink.accent : ink.neutral;
      context.globalAlpha = isCritical ? 1 : this.#showsPath ? DIMMED : 0.6;
      context.fillRect(left, y, right - left, LANE);
      drawnTo = right;
    }
    context.globalAlpha = 1;
  }

  #isSelected(index) {
    const { selected } = this.view;
    return selected !== null && selected.trace === this.key && selected.index === index;
  }

  hit(row, y, time, reach) {
    const lanes = this.trace.ofRank.get(row.rank);
    if (!lanes) return null;
    if (y < COMPUTE) return this.#hitSpan(lanes.compute, time, reach);
    if (y < COMPUTE + LANE + 1) return this.#hitSpan(lanes.reduce, time, reach);
    return this.#hitMessage(lanes.send, time, reach);
  }

  #hitSpan(order, time, reach) {
    const { spans } = this.trace;
    const near = [];
    for (let k = firstAfter(order, i => spans[i].end, time - reach); k < order.length; k++) {
      const span = spans[order[k]];
      if (span.start > time + reach) break;
      if (this.view.has(span)) near.push({ index: order[k], ...span, away: Math.max(span.start - time, time - span.end, 0) });
    }
    return near.sort((a, b) => a.away - b.away)[0] ?? null;
  }

  #hitMessage(order, time, reach) {
    const found = order.find(index => {
      const message = this.trace.messages[index];
      return message.start_s - reach <= time && time <= message.end_s + reach;
    });
    if (found === undefined) return null;
    const message = this.trace.messages[found];
    return { message, start: message.start_s, end: message.end_s };
  }

  onPick(hit) {
    this.view.select(hit?.index === undefined ? null : { trace: this.key, index: hit.index });
  }

  describe(hit) {
    return hit.message ? messageText(hit.message) : this.spanText(hit);
  }

  spanText(span) {
    const stage = span.stage === null ? null : this.view.plan.stages[span.stage];
    const head = stage ? `${span.name}  ${stage.module} layers ${stage.first}..${stage.last}` : span.name;
    const about = this.view.plan.about[span.kind];
    return (
      `${head}\n${about}\n${exactMilliseconds(span.start)} to ${exactMilliseconds(span.end)}\n` +
      `took ${exactMilliseconds(span.end - span.start)} on rank ${span.rank}`
    );
  }

  // From the selected span to the one before or behind it on its rank.
  step(by) {
    const { view } = this;
    const selected = this.#selectedSpan();
    const rank = selected?.rank ?? view.rows[0]?.rank;
    const order = (this.trace.ofRank.get(rank)?.compute ?? []).filter(index => view.has(this.trace.spans[index]));
    if (!order.length) return;
    const inView = order.findIndex(index => this.trace.spans[index].end >= view.from);
    const place = selected ? order.indexOf(view.selected.index) + by : Math.max(inView, 0);
    this.#choose(order[Math.min(Math.max(place, 0), order.length - 1)]);
  }

  // To the row above or below, at about the same time.
  stepRow(by) {
    const { view } = this;
    const selected = this.#selectedSpan();
    if (!selected) return this.step(0);
    const here = view.rows.findIndex(row => row.ranks.includes(selected.rank));
    const index = Math.min(Math.max(here + by, 0), view.rows.length - 1);
    const time = (selected.start + selected.end) / 2;
    const hit = this.#hitSpan(this.trace.ofRank.get(view.rows[index].rank)?.compute ?? [], time, view.end);
    if (hit) this.#choose(hit.index);
    this.panel.reveal(index);
  }

  #choose(index) {
    const { view } = this;
    const span = this.trace.spans[index];
    view.select({ trace: this.key, index });
    if (span.start < view.from) view.pan(span.start - view.from);
    else if (span.end > view.to) view.pan(Math.min(span.end - view.to, span.start - view.from));
  }

  #selectedSpan() {
    const { selected } = this.view;
    return selected?.trace === this.key ? this.trace.spans[selected.index] : null;
  }

  zoomToSelected() {
    const span = this.#selectedSpan();
    if (span) this.view.window(span.start - 0.2 * (span.end - span.start), span.end + 0.2 * (span.end - span.start));
  }

  // How many spans of the rows that are shown pass the filters.
  shownSpans() {
    let count = 0;
    for (const { rank } of this.view.rows) {
      const lanes = this.trace.ofRank.get(rank);
      if (!lanes) continue;
      for (const order of [lanes.compute, lanes.reduce]) {
        for (const index of order) count += this.view.has(this.trace.spans[index]) ? 1 : 0;
      }
    }
    return count;
  }
}

function messageText(message) {
  return (
    `row ${message.row}, ${message.edge}\nrank ${message.source_rank} to ${message.destination_rank}, ` +
    `${byteText(message.num_bytes)}\nwaited ${milliseconds(message.start_s - message.ready_s)}, ` +
    `took ${milliseconds(message.end_s - message.start_s)}`
  );
}

// Of the part that is in sight, so that a label does not leave it.
function middleOf(left, width, scale) {
  return (Math.max(left, scale.left) + Math.min(left + width, scale.right)) / 2;
}

const hatchings = new Map();

function hatching(context, colour) {
  if (!hatchings.has(colour)) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const on = tile.getContext("2d");
    on.strokeStyle = colour;
    on.lineWidth = 1;
    for (const shift of [-6, 0, 6]) {
      on.moveTo(shift - 1, 7);
      on.lineTo(shift + 7, -1);
    }
    on.stroke();
    hatchings.set(colour, context.createPattern(tile, "repeat"));
  }
  return hatchings.get(colour);
}
