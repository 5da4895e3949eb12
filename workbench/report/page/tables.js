// Tables that a click on a header sorts, group by group; a second click turns the order round.

export function makeSortable(table) {
  [...table.querySelectorAll("thead th")].forEach((header, column) => {
    const button = header.querySelector("button");
    button?.addEventListener("click", () => sortBy(table, header, column));
  });
}

function sortBy(table, header, column) {
  const isDown = header.getAttribute("aria-sort") === "ascending";
  for (const other of table.querySelectorAll("th[aria-sort]")) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", isDown ? "descending" : "ascending");
  for (const body of table.tBodies) {
    const rows = [...body.rows].filter(row => !row.classList.contains("group"));
    const order = rows.map(row => [keyOf(row.cells[column]), row]).sort((a, b) => compared(a[0], b[0], isDown));
    body.append(...order.map(([, row]) => row));
  }
}

// Numbers stand in `data-value`; a cell without a value is last either way.
function keyOf(cell) {
  const text = cell.dataset.value ?? cell.textContent.trim();
  if (text === "" || text === "-") return null;
  const number = Number(text);
  return Number.isNaN(number) ? text : number;
}

function compared(a, b, isDown) {
  if (a === null || b === null) return (a === null) - (b === null);
  const isNumbers = typeof a === "number" && typeof b === "number";
  const sign = isNumbers ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  return isDown ? -sign : sign;
}
