// A picture with time to the right and rows downwards: axis, cursor, and the gestures that move both.

import { niceStep, timeUnit } from "./numbers.js";

export const AXIS = 24; // pixels
const WHEEL_STEP = 0.0016; // of the zoom's logarithm, a pixel of the wheel
const LINE_PIXELS = 16;
const KEY_ZOOM = 0.7, KEY_PAN = 0.15;
const TAP_PIXELS = 5;
const MOST_SHARE = 0.72; // of the window's height
const MOST_PRINTED_ROWS = 48;
const LEFT_OUT = 18; // pixels below printed rows, for a word about the others

// The painter says how high rows are, draws one, and what lies at a point of it:
// rowHeight, name, drawRow(context, row, y, scale, ink), and where it has them drawOver, hit, onPick, describe, step.
export class Panel {
  constructor(host, view, painter, tip) {
    this.view = view;
    this.painter = painter;
    this.tip = tip;
    this.frame = host;
    this.frame.classList.add("panel");
    this.frame.tabIndex = 0;
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("aria-hidden", "true");
    this.frame.setAttribute("role", "group");
    this.frame.setAttribute("aria-label", painter.name);
    this.spacer = document.createElement("div");
    this.frame.append(this.canvas, this.spacer);
    this.printed = null; // its size on paper, while that is drawn
    this.pointers = new Map();
    this.#listen();
    new ResizeObserver(() => this.draw()).observe(this.frame);
    view.listen(() => this.draw());
    painter.panel = this;
  }

  get gutters() {
    return this.width < 560 ? [62, 8] : [116, 62];
  }

  get width() {
    return this.printed?.width ?? this.frame.clientWidth;
  }

  get scale() {
    const [left, right] = this.gutters;
    const { from, to } = this.view;
    const pixels = Math.max(this.width - left - right, 1) / (to - from);
    return { left, right: left + (to - from) * pixels, from, to, pixels, x: time => left + (time - from) * pixels };
  }

  timeAt(x) {
    const { left, pixels, from } = this.scale;
    return from + (x - left) / pixels;
  }

  draw() {
    const { rows } = this.view;
    const height = AXIS + rows.length * this.painter.rowHeight + 4;
    const shown = this.printed
      ? AXIS + Math.min(rows.length, MOST_PRINTED_ROWS) * this.painter.rowHeight + LEFT_OUT
      : Math.min(height, Math.max(160, Math.round(innerHeight * MOST_SHARE)));
    const density = this.printed ? 3 : devicePixelRatio || 1;
    if (!this.width) return;
    this.frame.style.height = `${shown + 2}px`;
    this.spacer.style.height = `${Math.max(height - shown, 0)}px`;
    this.canvas.style.height = `${shown}px`;
    this.canvas.style.width = this.printed ? "100%" : `${this.width}px`;
    const sized = [Math.round(this.width * density), Math.round(shown * density)];
    if (this.canvas.width !== sized[0] || this.canvas.height !== sized[1]) {
      [this.canvas.width, this.canvas.height] = sized;
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(density, 0, 0, density, 0, 0);
    this.#paint(context, shown);
  }

  #paint(context, height) {
    const { rows } = this.view;
    const { rowHeight } = this.painter;
    const ink = inks(this.frame);
    const scale = this.scale;
    context.clearRect(0, 0, this.width, height);
    const top = this.printed ? 0 : this.frame.scrollTop;
    const first = Math.floor(top / rowHeight);
    const below = this.printed ? height - LEFT_OUT : height;
    const last = Math.min(rows.length, Math.ceil((top + below - AXIS) / rowHeight));
    this.#grid(context, scale, height, ink);
    for (let index = first; index < last; index++) {
      this.painter.drawRow(context, rows[index], AXIS + index * rowHeight - top, scale, ink);
    }
    this.painter.drawOver?.(context, index => AXIS + index * rowHeight - top, scale, ink);
    this.#axis(context, scale, ink);
    if (this.printed && last < rows.length) this.#leftOut(context, scale, below, rows.length - last, ink);
    this.#cursor(context, scale, height, ink);
  }

  #ticks(scale) {
    const span = scale.to - scale.from;
    const [unit, name] = timeUnit(span);
    const step = niceStep(span / unit, Math.max(2, Math.floor((scale.right - scale.left) / 90)));
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const ticks = [];
    for (let k = Math.ceil(scale.from / unit / step - 1e-9); k * step <= (scale.to / unit) * (1 + 1e-12); k++) {
      ticks.push([scale.x(k * step * unit), (k * step).toFixed(digits)]);
    }
    if (ticks.length) ticks[0][1] += ` ${name}`;
    return ticks;
  }

  #grid(context, scale, height, ink) {
    context.fillStyle = ink.line;
    for (const [x] of this.#ticks(scale)) context.fillRect(Math.round(x), AXIS - 4, 1, height - AXIS + 4);
  }

  #axis(context, scale, ink) {
    context.fillStyle = ink.paper;
    context.fillRect(0, 0, this.width, AXIS - 4);
    context.fillStyle = ink.soft;
    context.font = ink.font(11);
    context.textBaseline = "middle";
    context.textAlign = "center";
    for (const [x, text] of this.#ticks(scale)) {
      const half = context.measureText(text).width / 2;
      context.fillText(text, Math.min(Math.max(x, half), this.width - half), AXIS / 2 - 1);
    }
  }

  #leftOut(context, scale, y, count, ink) {
    context.fillStyle = ink.soft;
    context.textAlign = "left";
    context.fillText(`${count.toLocaleString("en")} more rows are not printed.`, scale.left, y + LEFT_OUT / 2);
  }

  #cursor(context, scale, height, ink) {
    const { cursor } = this.view;
    if (cursor === null || cursor < scale.from || cursor > scale.to || this.printed) return;
    context.fillStyle = ink.accent;
    context.fillRect(Math.round(scale.x(cursor)), AXIS - 4, 1, height - AXIS + 4);
  }

  // The row at a height of the canvas, and how far down in it.
  rowAt(y) {
    if (y < AXIS) return null;
    const inside = y - AXIS + this.frame.scrollTop;
    const index = Math.floor(inside / this.painter.rowHeight);
    const row = this.view.rows[index];
    return row && { row, index, y: inside - index * this.painter.rowHeight };
  }

  reveal(index) {
    const { rowHeight } = this.painter;
    const top = index * rowHeight, bottom = top + rowHeight;
    const shown = this.frame.clientHeight - AXIS - 6;
    if (top < this.frame.scrollTop) this.frame.scrollTop = top;
    else if (bottom > this.frame.scrollTop + shown) this.frame.scrollTop = bottom - shown;
  }

  #at(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  #listen() {
    const { frame } = this;
    frame.addEventListener("scroll", () => this.draw());
    frame.addEventListener("wheel", event => this.#wheel(event), { passive: false });
    this.canvas.addEventListener("pointerdown", event => this.#down(event));
    this.canvas.addEventListener("pointermove", event => this.#move(event));
    for (const name of ["pointerup", "pointercancel"]) {
      this.canvas.addEventListener(name, event => this.#up(event, name === "pointerup"));
    }
    this.canvas.addEventListener("pointerleave", () => this.#leave());
    this.canvas.addEventListener("dblclick", event => {
      const hit = this.#hit(...this.#at(event));
      if (hit) this.view.window(hit.start - 0.2 * (hit.end - hit.start), hit.end + 0.2 * (hit.end - hit.start));
    });
    frame.addEventListener("keydown", event => this.#key(event));
  }

  // With a modifier, or once the picture was clicked, the wheel zooms; sideways it pans. Else the page scrolls.
  #wheel(event) {
    const pixels = event.deltaMode === 1 ? LINE_PIXELS : 1;
    const { scale, view } = this;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
      event.preventDefault();
      view.pan(((event.deltaX || event.deltaY) * pixels) / scale.pixels);
    } else if (event.ctrlKey || event.metaKey || document.activeElement === this.frame) {
      event.preventDefault();
      const faster = event.ctrlKey && event.deltaMode === 0 ? 3 : 1; // a pinched pad sends small steps
      view.zoom(Math.exp(event.deltaY * pixels * WHEEL_STEP * faster), this.timeAt(this.#at(event)[0]));
    }
  }

  #down(event) {
    this.frame.focus({ preventScroll: true });
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, this.#at(event));
    this.moved = this.pointers.size > 1 ? Infinity : 0;
  }

  #move(event) {
    const here = this.#at(event);
    const before = this.pointers.get(event.pointerId);
    if (!before) return this.#hover(event, here);
    const others = [...this.pointers].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
    this.pointers.set(event.pointerId, here);
    if (others.length) this.#pinch(before, here, others[0]);
    else this.#drag(event, before, here);
  }

  #drag(event, before, here) {
    this.moved += Math.abs(here[0] - before[0]) + Math.abs(here[1] - before[1]);
    if (this.moved <= TAP_PIXELS) return;
    this.tip.hide();
    this.view.pan((before[0] - here[0]) / this.scale.pixels);
    if (event.pointerType === "mouse") this.frame.scrollTop += before[1] - here[1];
  }

  #pinch(before, here, other) {
    const was = Math.abs(before[0] - other[0]), is = Math.abs(here[0] - other[0]);
    const middle = this.timeAt((before[0] + other[0]) / 2);
    if (was > 4 && is > 4) this.view.zoom(was / is, middle);
    this.view.pan((before[0] - here[0]) / 2 / this.scale.pixels);
  }

  #up(event, isTap) {
    if (!this.pointers.delete(event.pointerId) || !isTap || this.moved > TAP_PIXELS) return;
    const here = this.#at(event);
    this.view.point(this.#timeOnAxis(here[0]));
    this.painter.onPick?.(this.#hit(...here));
  }

  #hover(event, here) {
    this.view.point(this.#timeOnAxis(here[0]));
    const hit = this.#hit(...here);
    if (hit && event.pointerType === "mouse") this.tip.show(this.painter.describe(hit), event.clientX, event.clientY);
    else this.tip.hide();
  }

  #leave() {
    this.tip.hide();
    if (!this.pointers.size) this.view.point(null);
  }

  #timeOnAxis(x) {
    const time = this.timeAt(x);
    return time >= this.view.from && time <= this.view.to ? time : null;
  }

  #hit(x, y) {
    const at = this.rowAt(y);
    const [left] = this.gutters;
    if (!at || x < left) return null;
    return this.painter.hit?.(at.row, at.y, this.timeAt(x), 3 / this.scale.pixels) ?? null;
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target !== this.frame) return;
    const { view } = this;
    const span = view.to - view.from;
    const steps = {
      "+": () => view.zoom(KEY_ZOOM),
      "=": () => view.zoom(KEY_ZOOM),
      "-": () => view.zoom(1 / KEY_ZOOM),
      0: () => view.fit(),
      ArrowLeft: () => (event.shiftKey ? this.painter.step?.(-1) : view.pan(-KEY_PAN * span)),
      ArrowRight: () => (event.shiftKey ? this.painter.step?.(1) : view.pan(KEY_PAN * span)),
      ArrowUp: () => (event.shiftKey ? this.painter.stepRow?.(-1) : (this.frame.scrollTop -= this.painter.rowHeight)),
      ArrowDown: () => (event.shiftKey ? this.painter.stepRow?.(1) : (this.frame.scrollTop += this.painter.rowHeight)),
      Enter: () => this.painter.zoomToSelected?.(),
      Escape: () => (view.selected ? view.select(null) : this.frame.blur()),
    };
    if (!(event.key in steps)) return;
    event.preventDefault();
    steps[event.key]();
  }

  // Before printing: all of the width of the paper, at a density that prints.
  print(width) {
    this.printed = { width };
    this.draw();
  }

  unprint() {
    this.printed = null;
    this.draw();
  }
}

// Colours of the theme, read where the picture stands.
export function inks(element) {
  const style = getComputedStyle(element);
  const of = name => style.getPropertyValue(name).trim();
  return {
    ink: of("--ink"), soft: of("--soft"), line: of("--line"), paper: of("--paper"), idle: of("--idle"),
    wash: of("--wash"), accent: of("--accent"), neutral: of("--neutral"),
    simulated: of("--simulated"), executed: of("--executed"), emulated: of("--emulated"),
    font: pixels => `${pixels}px ${style.fontFamily}`,
  };
}
