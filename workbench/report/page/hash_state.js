// What a link to the page says: which plan, which part of its timelines, what is filtered and selected.

// Shown kinds and modules are null where all are; a span is "<trace> <number in its file>".
export const PLAIN = {
  plan: null, from: null, to: null, ranks: "", kinds: null, modules: null, span: null, path: false, each: false,
};

const DIGITS = 9; // of seconds: a billionth of the window is finer than a pixel

export function readHash(hash) {
  const said = new URLSearchParams(hash.replace(/^#/, ""));
  const number = name => {
    const value = Number(said.get(name));
    return said.has(name) && Number.isFinite(value) ? value : null;
  };
  const list = name => (said.has(name) ? said.get(name).split(",").filter(Boolean) : null);
  return {
    plan: said.get("plan"),
    from: number("from"),
    to: number("to"),
    ranks: said.get("ranks") ?? "",
    kinds: list("kinds"),
    modules: list("modules"),
    span: said.get("span"),
    path: said.get("path") === "1",
    each: said.get("each") === "1",
  };
}

export function writeHash(state) {
  const said = new URLSearchParams();
  if (state.plan !== null) said.set("plan", state.plan);
  for (const name of ["from", "to"]) {
    if (state[name] !== null) said.set(name, String(Number(state[name].toPrecision(DIGITS))));
  }
  if (state.ranks) said.set("ranks", state.ranks);
  for (const name of ["kinds", "modules"]) {
    if (state[name] !== null) said.set(name, state[name].join(","));
  }
  if (state.span !== null) said.set("span", state.span);
  if (state.path) said.set("path", "1");
  if (state.each) said.set("each", "1");
  return `#${said}`;
}

// "0-3, 8" as a test of a rank; null where nothing is said. Throws on other words.
export function rankTest(text) {
  const parts = text.split(",").map(part => part.trim()).filter(Boolean);
  if (!parts.length) return null;
  const runs = parts.map(part => {
    const found = /^(\d+)(?:\s*-\s*(\d+))?$/.exec(part);
    if (!found) throw new Error(`ranks: want numbers and runs, e.g. 0-3, 8; got "${part}"`);
    return [Number(found[1]), Number(found[2] ?? found[1])];
  });
  return rank => runs.some(([first, last]) => first <= rank && rank <= last);
}
