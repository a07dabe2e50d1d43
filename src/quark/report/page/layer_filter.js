// Which layers are shown: words that all occur, and quick filters that all hold.
const MOST_WORST = 10;
const MUCH_CLIPPED = 0.01;
const isBelow = (layer) => [layerFigure(layer, "local"), layerFigure(layer, "accumulated")].some((value) => value !== null && value < facts.ok.sqnr_db);
const QUICK = [
  { title: `Worst ${MOST_WORST}`, keeps: (layer) => worstIndices.has(layer.index) },
  { title: "Clipped > 1 %", keeps: (layer) => layer.clipped > MUCH_CLIPPED },
  { title: () => `Below ${facts.ok.sqnr_db} dB`, keeps: isBelow },
];
let worstIndices = new Set();

function textOf(layer) {
  return [layer.name, layer.op_type, layer.weights, layer.inputs, layer.tensor].join("\n").toLowerCase();
}

function applyFilters() {
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const chosen = QUICK.filter((each) => each.button.getAttribute("aria-pressed") === "true");
  let shown = 0;
  for (const { layer, row, detail } of rows) {
    const text = textOf(layer);
    const isShown = words.every((word) => text.includes(word)) && chosen.every((each) => each.keeps(layer));
    row.hidden = !isShown;
    if (detail) detail.hidden = !isShown;
    shown += isShown;
  }
  const isAll = shown === rows.length;
  byId("count").textContent = isAll ? countOf(rows.length, "layer") : `${shown} of ${countOf(rows.length, "layer")}`;
  byId("table-frame").hidden = !shown;
  byId("no-layers").hidden = shown > 0;
}

function clearFilters() {
  byId("filter").value = "";
  for (const each of QUICK) each.button.setAttribute("aria-pressed", "false");
  applyFilters();
}

function quickButton(quick) {
  const title = typeof quick.title === "function" ? quick.title() : quick.title;
  const isUseless = !layers.some(quick.keeps);
  quick.button = element("button", { type: "button", "aria-pressed": "false", disabled: isUseless, title: isUseless ? "No such layer" : null }, title);
  quick.button.addEventListener("click", () => {
    quick.button.setAttribute("aria-pressed", String(quick.button.getAttribute("aria-pressed") !== "true"));
    applyFilters();
  });
  return quick.button;
}

function setUpFilters() {
  worstIndices = new Set(worstLayers().slice(0, MOST_WORST).map((each) => each.index));
  byId("quick").append(...QUICK.map(quickButton));
  byId("filter").addEventListener("input", applyFilters);
  byId("no-layers").append(rows.length ? "No layer matches. " : "The quantized network has no layer that could be compared.",
    rows.length ? element("button", { type: "button", class: "as-link", onclick: () => { clearFilters(); byId("filter").focus(); } }, "Clear the filter") : "");
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target instanceof HTMLInputElement || event.target instanceof HTMLTextAreaElement;
    if (event.key === "/" && !isTyping && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      byId("filter").focus();
      byId("filter").select();
    }
    if (event.key === "Escape" && (event.target === byId("filter") || event.target.closest?.("#layers"))) clearFilters();
  });
  applyFilters();
}
