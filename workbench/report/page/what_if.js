// Sliders over neighbours of the job. Each stands only where something was simulated: nothing is in between.

import { byteText, milliseconds, signedPercent } from "./numbers.js";

export function showWhatIf(host, { axes, points }) {
  const base = points.find(point => point.at.every(place => place === 0));
  const sliders = axes.map((axis, place) => slider(host, axis, place, points));
  let here = base ?? points[0];

  const show = (point, moved) => {
    here = point;
    sliders.forEach(({ steps, input, output }, place) => {
      input.value = steps.indexOf(point.at[place]);
      output.textContent = axes[place].labels[point.at[place]];
      input.setAttribute("aria-valuetext", output.textContent);
    });
    host.querySelector(".outcome").replaceChildren(...outcome(point, base));
    host.querySelector(".words").textContent = point.words;
    host.querySelector(".snapped").textContent = moved;
    for (const row of host.querySelectorAll("tbody tr")) {
      row.classList.toggle("here", row.dataset.point === String(points.indexOf(point)));
    }
  };

  sliders.forEach(({ steps, input }, place) => {
    input.addEventListener("input", () => {
      const wanted = here.at.with(place, steps[input.value]);
      const point = nearest(points, wanted, place);
      show(point, snapText(axes, wanted, point));
    });
  });
  for (const row of host.querySelectorAll("tbody tr")) {
    row.addEventListener("click", () => show(points[row.dataset.point], ""));
  }
  show(here, "");
}

// A slider with one stop for each value that was simulated at all, in the order of the values.
function slider(host, axis, place, points) {
  const values = axis.values;
  const steps = [...new Set(points.map(point => point.at[place]))].sort((a, b) => values[a] - values[b]);
  const label = host.querySelector(`[data-axis="${place}"]`);
  const input = label.querySelector("input");
  input.max = steps.length - 1;
  input.disabled = steps.length < 2;
  return { steps, input, output: label.querySelector("output") };
}

// Among the points with that value of the slider that was moved, the one with the fewest others moved.
function nearest(points, wanted, moved) {
  const away = point => point.at.reduce((sum, at, place) => sum + (at === wanted[place] ? 0 : place === moved ? 1e3 : 1), 0);
  return points.reduce((best, point) => (away(point) < away(best) ? point : best));
}

function snapText(axes, wanted, point) {
  const moved = axes.filter((_, place) => wanted[place] !== point.at[place]).map(axis => axis.name);
  if (!moved.length) return "";
  return `This combination was not simulated; moved to one that was (${moved.join(", ")}).`;
}

function outcome(point, base) {
  if (point.refusal !== null) return [card("no plan", point.refusal, "refusal")];
  const cards = [card(milliseconds(point.iteration_s), "iteration")];
  if (base && base !== point && base.refusal === null) {
    cards.push(card(signedPercent(point.iteration_s / base.iteration_s - 1), "against the job itself"));
  }
  if (point.low_s !== null) cards.push(card(`${milliseconds(point.low_s)} to ${milliseconds(point.high_s)}`, "80 % within"));
  cards.push(card(`${Number(point.samples_per_s.toPrecision(3))}`, "samples/s"));
  if (point.peak_bytes !== null) cards.push(card(byteText(point.peak_bytes), "peak memory"));
  cards.push(card(`${point.ranks}`, "ranks used"), card(point.stages, "stages"));
  return cards;
}

function card(value, name, kind = "") {
  const element = document.createElement("div");
  element.className = `card ${kind}`;
  const shown = document.createElement("b"), about = document.createElement("span");
  [shown.textContent, about.textContent] = [value, name];
  element.append(shown, about);
  return element;
}
