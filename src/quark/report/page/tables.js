// Tables that a click on a heading sorts.
function sortButton(title, sort) {
  return element("button", { type: "button", onclick: sort }, element("span", {}, title), element("span", { class: "arrow", "aria-hidden": "true" }, "▲"));
}

// Missing values come last in either direction.
function compareValues(x, y, direction) {
  const rank = (value) => (value === null || value === undefined || Number.isNaN(value) ? 1 : 0);
  if (rank(x) || rank(y)) return rank(x) - rank(y);
  return direction * (typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x < y ? -1 : x > y ? 1 : 0);
}

// Show by which column the table is sorted.
function markSorted(table, column, direction) {
  for (const heading of table.tHead.rows[0].cells) {
    const isThis = heading.cellIndex === column;
    if (isThis) heading.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
    else heading.removeAttribute("aria-sort");
    heading.querySelector(".arrow").textContent = isThis && direction < 0 ? "▼" : "▲";
  }
}
