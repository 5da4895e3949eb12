// Puts the page together: sections open as they are read, the address follows what is looked at.

import { readHash, writeHash } from "./hash_state.js";
import { PlanSection } from "./plan_section.js";
import { makeSortable } from "./tables.js";
import { followTheme } from "./theme.js";
import { Tip } from "./tip.js";
import { showWhatIf } from "./what_if.js";

const { plans, whatIf } = JSON.parse(document.getElementById("data").textContent);
const tip = new Tip(document.getElementById("tip"));
const sections = plans.map(plan => new PlanSection(document.getElementById(`plan-${plan.id}`), plan, tip));

followTheme(document.getElementById("theme"), () => sections.forEach(section => section.redraw()));
document.querySelectorAll("table.sortable").forEach(makeSortable);
if (whatIf?.points.length) showWhatIf(document.getElementById("what-if"), whatIf);

// The address names the plan whose view was changed last. Cursors are not worth a link.
async function opened(section) {
  const isFirst = !section.ready;
  const view = await section.open();
  if (!view || !isFirst) return view;
  view.listen(what => {
    if (![...what].some(each => each !== "cursor") || section.isRestoring) return;
    history.replaceState(null, "", writeHash(view.state()));
  });
  return view;
}

async function follow() {
  const said = readHash(location.hash);
  const section = sections.find(each => each.plan.id === said.plan);
  if (!section) return;
  section.element.open = true;
  const view = await opened(section);
  section.isRestoring = true;
  view?.restore(said, section.traces);
  view?.tellNow();
  section.isRestoring = false;
  section.element.scrollIntoView();
}

for (const section of sections) {
  section.element.addEventListener("toggle", () => section.element.open && opened(section));
}
addEventListener("hashchange", follow);
addEventListener("beforeprint", () => sections.forEach(section => section.print()));
addEventListener("afterprint", () => sections.forEach(section => section.unprint()));

await Promise.all(sections.filter(section => section.element.open).map(opened));
await follow();
document.documentElement.dataset.ready = "";
