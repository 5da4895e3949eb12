// One plan's part of the page: its timelines and memory, what filters them, and what is selected.

import { MemoryLanes } from "./memory_lanes.js";
import { exactMilliseconds } from "./numbers.js";
import { Panel } from "./panel.js";
import { download, openInPerfetto } from "./perfetto.js";
import { Timeline } from "./timeline.js";
import { columnsOf, unpacked } from "./trace_columns.js";
import { View } from "./view.js";

const PAPER_PIXELS = 1000; // width of a picture on paper

export class PlanSection {
  constructor(element, plan, tip) {
    this.element = element;
    this.plan = plan;
    this.tip = tip;
    this.buffers = {};
    for (const button of element.querySelectorAll("[data-perfetto]")) {
      button.addEventListener("click", () => this.#hand(button));
    }
    for (const button of element.querySelectorAll("[data-download]")) {
      button.addEventListener("click", () => download(this.#buffer(button.dataset.download), this.#file(button.dataset.download)));
    }
  }

  // Reads the traces on first use; null where the plan has none.
  open() {
    this.ready ??= this.#build();
    return this.ready;
  }

  #buffer(key) {
    this.buffers[key] ??= unpacked(document.getElementById(`trace-${this.plan.id}-${key}`).textContent);
    return this.buffers[key];
  }

  #file(key) {
    return this.plan.traces.find(trace => trace.key === key).file;
  }

  #hand(button) {
    const key = button.dataset.perfetto;
    const said = this.element.querySelector(".handed");
    openInPerfetto(this.#buffer(key), this.#file(key), text => (said.textContent = text));
  }

  async #build() {
    const { traces } = this.plan;
    if (!traces.length) return null;
    const read = await Promise.all(traces.map(async ({ key }) => columnsOf(await this.#buffer(key), this.plan.lanes)));
    this.traces = Object.fromEntries(traces.map(({ key }, place) => [key, read[place]]));
    const shown = read.filter((_, place) => traces[place].isDrawn);
    const endOf = of => Math.max(...of.map(trace => trace.end));
    this.view = new View(this.plan, endOf(shown), endOf(read));
    this.timelines = traces.filter(({ isDrawn }) => isDrawn).map(({ key, title, critical }) => {
      return new Timeline(this.view, key, title, this.traces[key], critical);
    });
    this.panels = this.timelines.map(timeline => {
      return new Panel(this.element.querySelector(`[data-timeline="${timeline.key}"]`), this.view, timeline, this.tip);
    });
    const lanes = this.element.querySelector("[data-memory]");
    if (lanes) {
      const held = this.plan.memory.map(({ key, shown }) => ({ key: shown, trace: this.traces[key] }));
      this.panels.push(new Panel(lanes, this.view, new MemoryLanes(this.view, held), this.tip));
    }
    this.#toolbar();
    this.view.listen(() => this.#tell());
    this.#tell();
    return this.view;
  }

  #toolbar() {
    const { element, view } = this;
    const on = (selector, event, action) => element.querySelector(selector)?.addEventListener(event, action);
    on(".zoom-in", "click", () => view.zoom(0.6));
    on(".zoom-out", "click", () => view.zoom(1 / 0.6));
    on(".fit", "click", () => view.fit());
    on(".path", "click", () => {
      view.showsPath = !view.showsPath;
      view.changed("filter");
    });
    on(".each", "change", event => {
      view.isEach = event.target.checked;
      view.filtered();
    });
    on(".ranks", "input", event => this.#filterRanks(event.target));
    for (const box of element.querySelectorAll("[data-kind]")) {
      box.addEventListener("change", () => view.show(view.kinds, box.dataset.kind, box.checked));
    }
    for (const box of element.querySelectorAll("[data-module]")) {
      box.addEventListener("change", () => view.show(view.modules, box.dataset.module, box.checked));
    }
  }

  #filterRanks(input) {
    try {
      this.view.onlyRanks(input.value);
      input.setCustomValidity("");
    } catch (error) {
      input.setCustomValidity(error.message);
    }
    input.reportValidity();
  }

  // What the controls say, after any change: a link may have set them.
  #tell() {
    const { element, view } = this;
    const text = `${exactMilliseconds(view.from)} to ${exactMilliseconds(view.to)}`;
    const shown = this.timelines.map(timeline => timeline.shownSpans()).reduce((a, b) => a + b, 0);
    element.querySelector(".window").textContent = text;
    element.querySelector(".shown").textContent = `${shown.toLocaleString("en")} spans in ${view.rows.length} rows`;
    element.querySelector(".path")?.setAttribute("aria-pressed", String(view.showsPath));
    element.querySelector(".each").checked = view.isEach;
    const ranks = element.querySelector(".ranks");
    if (document.activeElement !== ranks) ranks.value = view.ranks;
    for (const box of element.querySelectorAll("[data-kind]")) box.checked = view.kinds.has(box.dataset.kind);
    for (const box of element.querySelectorAll("[data-module]")) box.checked = view.modules.has(box.dataset.module);
    const timeline = this.timelines.find(each => each.key === view.selected?.trace);
    const span = timeline?.trace.spans[view.selected.index];
    const hint = "Click a span to keep it here.";
    element.querySelector(".selected").textContent = span ? timeline.spanText(span) : hint;
  }

  redraw() {
    for (const panel of this.panels ?? []) panel.draw();
  }

  print() {
    for (const panel of this.panels ?? []) panel.print(PAPER_PIXELS);
  }

  unprint() {
    for (const panel of this.panels ?? []) panel.unprint();
  }
}
