// Numbers as they are shown.

// Three digits, as the commands print them.
export function milliseconds(seconds) {
  return `${digits(1e3 * seconds, 3)} ms`;
}

// Six digits, for a single span.
export function exactMilliseconds(seconds) {
  return `${digits(1e3 * seconds, 6)} ms`;
}

function digits(value, count) {
  const isWhole = Math.abs(value) >= 10 ** count;
  return isWhole ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(count)));
}

export function byteText(bytes) {
  if (bytes >= 2 ** 30) return `${(bytes / 2 ** 30).toPrecision(4)} GiB`;
  return bytes >= 2 ** 20 ? `${(bytes / 2 ** 20).toPrecision(4)} MiB` : `${bytes.toLocaleString("en")} bytes`;
}

export function signedPercent(fraction) {
  return `${fraction < 0 ? "−" : "+"}${Math.abs(100 * fraction).toFixed(1)} %`;
}

// 1, 2 or 5 times a power of ten, the smallest that gives at most so many steps.
export function niceStep(span, most) {
  const power = 10 ** Math.floor(Math.log10(span / most));
  return [1, 2, 5, 10, 20].map(step => step * power).find(step => span / step <= most);
}

// The unit in which ticks of a window are short: [seconds in it, its name].
export function timeUnit(span) {
  if (span >= 20) return [1, "s"];
  return span >= 2e-4 ? [1e-3, "ms"] : [1e-6, "µs"];
}

// "0-3, 8" of ascending numbers.
export function runsText(numbers) {
  const runs = [];
  for (const number of numbers) {
    const last = runs.at(-1);
    if (last && number === last[1] + 1) last[1] = number;
    else runs.push([number, number]);
  }
  return runs.map(([a, b]) => (a === b ? `${a}` : `${a}-${b}`)).join(", ");
}
