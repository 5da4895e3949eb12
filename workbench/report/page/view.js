// What all pictures of one plan share: the window of time, filters, cursor, selection. Whoever shows it listens.

import { PLAIN, rankTest } from "./hash_state.js";

const LEAST_WINDOW = 1e-6; // of the whole

export class View {
  // `end` of what is shown at first; `limit`: of all that can be shown, memory of slower runs among it.
  constructor(plan, end, limit = end) {
    this.plan = plan;
    this.end = end;
    this.limit = limit;
    this.from = 0;
    this.to = end;
    this.cursor = null; // seconds
    this.selected = null; // {trace, index}
    this.isEach = false; // a row for every rank, not for every group
    this.showsPath = false;
    this.ranks = "";
    this.kinds = new Set(plan.kinds);
    this.modules = new Set(plan.modules);
    this.rows = this.#rows();
    this.listeners = [];
    this.isTold = false;
  }

  listen(listener) {
    this.listeners.push(listener);
  }

  // Everyone draws once, however often something changes before the next frame.
  changed(what) {
    this.pending = (this.pending ?? new Set()).add(what);
    if (this.isTold) return;
    this.isTold = true;
    requestAnimationFrame(() => this.tellNow());
  }

  tellNow() {
    const what = this.pending ?? new Set();
    this.pending = null;
    this.isTold = false;
    for (const listener of this.listeners) listener(what);
  }

  window(from, to) {
    const least = this.end * LEAST_WINDOW;
    const span = Math.min(Math.max(to - from, least), this.limit);
    const start = Math.min(Math.max((from + to - span) / 2, 0), this.limit - span);
    this.from = start;
    this.to = start + span;
    this.changed("window");
  }

  zoom(factor, about = (this.from + this.to) / 2) {
    const span = Math.min(Math.max((this.to - this.from) * factor, this.end * LEAST_WINDOW), this.limit);
    const share = (about - this.from) / (this.to - this.from);
    this.window(about - share * span, about + (1 - share) * span);
  }

  pan(seconds) {
    const moved = Math.min(Math.max(seconds, -this.from), this.limit - this.to);
    this.window(this.from + moved, this.to + moved);
  }

  fit() {
    this.window(0, this.end);
  }

  point(time) {
    this.cursor = time;
    this.changed("cursor");
  }

  select(selected) {
    this.selected = selected;
    this.changed("selection");
  }

  show(set, name, isShown) {
    if (isShown) set.add(name);
    else set.delete(name);
    this.filtered();
  }

  // Throws on words that are no ranks.
  onlyRanks(text) {
    rankTest(text);
    this.ranks = text.trim();
    this.filtered();
  }

  filtered() {
    this.rows = this.#rows();
    this.changed("filter");
  }

  // Whether a span is drawn, wherever it stands. Kinds without a stage belong to every module.
  has(span) {
    if (!this.kinds.has(span.kind)) return false;
    return span.stage === null || this.modules.has(this.plan.stages[span.stage].module);
  }

  // Of the groups of ranks, those with a stage that is shown; a row shows its first rank that is asked for.
  #rows() {
    const wanted = rankTest(this.ranks) ?? (() => true);
    const rows = [];
    for (const group of this.plan.rows) {
      if (!group.stages.some(stage => this.modules.has(this.plan.stages[stage].module))) continue;
      const ranks = group.ranks.filter(wanted);
      if (!ranks.length) continue;
      if (this.isEach) rows.push(...ranks.map(rank => ({ rank, ranks: [rank], stages: group.stages })));
      else rows.push({ rank: ranks[0], ranks, stages: group.stages });
    }
    return rows;
  }

  state() {
    const shown = (set, all) => (set.size === all.length ? null : all.filter(name => set.has(name)));
    const isWhole = this.from === 0 && this.to === this.end;
    return {
      plan: this.plan.id,
      from: isWhole ? null : this.from,
      to: isWhole ? null : this.to,
      ranks: this.ranks,
      kinds: shown(this.kinds, this.plan.kinds),
      modules: shown(this.modules, this.plan.modules),
      span: this.selected && `${this.selected.trace} ${this.selected.index}`,
      path: this.showsPath,
      each: this.isEach,
    };
  }

  // What a link says, as far as this plan has it; words that it does not know change nothing.
  restore(said, traces) {
    const state = { ...PLAIN, ...said };
    const known = (names, all) => new Set(names === null ? all : names.filter(name => all.includes(name)));
    this.kinds = known(state.kinds, this.plan.kinds);
    this.modules = known(state.modules, this.plan.modules);
    this.isEach = state.each;
    this.showsPath = state.path;
    try {
      this.ranks = rankTest(state.ranks) ? state.ranks : "";
    } catch {
      this.ranks = "";
    }
    const [, trace, index] = /^(\w+) (\d+)$/.exec(state.span ?? "") ?? [];
    const isThere = trace !== undefined && traces[trace]?.spans[Number(index)] !== undefined;
    this.selected = isThere ? { trace, index: Number(index) } : null;
    this.filtered();
    if (state.from !== null && state.to !== null && state.from < state.to) this.window(state.from, state.to);
    else this.fit();
  }
}
