// The table of all layers. A row opens into what is known of its layer; a heading sorts by its column.
const sqnrOf = (which) => (layer) => layerFigure(layer, which);
// `first` is the direction of the first click: 1 where low is what one looks for, -1 where high is
const COLUMNS = [
  { key: "order", title: "#", value: (l) => l.order, text: (l) => String(l.order), first: 1, kind: "number medium" },
  { key: "name", title: "Layer", value: (l) => l.name, first: 1, kind: "name" },
  { key: "op", title: "Operator", value: (l) => l.op_type, text: (l) => l.op_type, first: 1, kind: "op medium" },
  { key: "weights", title: "Weights", value: (l) => l.weights || null, text: (l) => l.weights || "–", first: 1, kind: "format wide" },
  { key: "inputs", title: "Inputs", value: (l) => l.inputs || null, text: (l) => l.inputs || "–", first: 1, kind: "format wide" },
  { key: "parameters", title: "Params", value: (l) => l.parameters, text: (l) => (l.parameters ? short(l.parameters) : "–"), first: -1, kind: "number wide" },
  { key: "bits", title: "Bits", value: (l) => l.bits, text: (l) => bitsText(l.bits), first: 1, kind: "number wide" },
  { key: "local", title: "Local dB", value: sqnrOf("local"), text: (l) => decibels(l.local?.sqnr_db), first: 1, kind: "number", tone: sqnrOf("local") },
  { key: "accumulated", title: "Accum. dB", value: sqnrOf("accumulated"), text: (l) => decibels(l.accumulated?.sqnr_db), first: 1, kind: "number", tone: sqnrOf("accumulated") },
  { key: "cosine", title: "Accum. cosine", value: (l) => numberOf(l.accumulated?.cosine), text: (l) => cosine(l.accumulated?.cosine), first: 1, kind: "number medium" },
  { key: "clipped", title: "Clipped", value: (l) => l.clipped, text: (l) => percent(l.clipped, 2), first: -1, kind: "number medium" },
  { key: "share", title: "Sensitivity", value: (l) => l.share, text: (l) => percent(l.share), first: -1, kind: "number" },
];
const rows = []; // by the layer's index: the row, and its detail once opened
let sorting = { key: "order", direction: 1 };

function toneOf(value) {
  if (value === null || Number.isNaN(value)) return "";
  return value < facts.collapsed.sqnr_db ? "very-low" : value < facts.ok.sqnr_db ? "low" : "";
}

function openerOf(layer) {
  const button = element("button", { type: "button", class: "opener", "aria-expanded": "false", title: layer.name },
    element("span", { class: "turn", "aria-hidden": "true" }), element("span", { class: "text" }, element("bdi", { dir: "ltr" }, layer.name)));
  button.addEventListener("click", () => toggleLayer(layer.index));
  return button;
}

function cellOf(layer, column) {
  if (column.key === "name") return element("td", { class: "name" }, openerOf(layer));
  const tone = column.tone ? toneOf(column.tone(layer)) : "";
  const hasBar = column.key === "share" && layer.share !== null;
  return element("td", { class: `${column.kind} ${tone}`.trim(), title: /format|op /.test(column.kind) ? column.text(layer) : null }, hasBar ? bar(layer.share / mostShare, "in-cell") : null, column.text(layer));
}

function rowOf(layer) {
  const row = element("tr", { class: "layer", id: `layer-${layer.index}` }, COLUMNS.map((column) => cellOf(layer, column)));
  row.addEventListener("click", (event) => { if (!event.target.closest("button") && !getSelection().toString()) toggleLayer(layer.index); });
  return { layer, row, detail: null };
}

function fidelityText(found) {
  if (!found) return "";
  const agreement = found.agreement === null ? "" : `, same class ${agreementText(found)}`;
  return `${withUnit(found.sqnr_db)}, cosine ${cosine(found.cosine)}, largest error ${significant(found.max_error)}${agreement}`;
}

function detailOf(layer) {
  const heading = (text) => element("h3", {}, text);
  const sensitivity = layer.sensitivity === null ? "" : `${significant(layer.sensitivity)}, ${percent(layer.share)} of all, rank ${layer.rank} of ${ranked.length}`;
  const left = element("div", {},
    element("p", { class: "full-name" }, layer.name),
    factList([
      ["Operator", layer.op_type], ["Output", layer.tensor === layer.name ? "" : layer.tensor], ["Weights", layer.weights || "float"], ["Inputs", layer.inputs || "float"],
      ["Parameters", layer.parameters ? `${whole(layer.parameters)}${layer.bits === null ? "" : ` of ${bitsText(layer.bits)} bits`}` : ""],
      ["Local", fidelityText(layer.local)], ["Accumulated", fidelityText(layer.accumulated)], ["Sensitivity", sensitivity],
      ["Clipped inputs", layer.clipped === null ? "" : percent(layer.clipped, 2)],
    ]),
    layer.causes.length ? [heading("Why"), causeList(layer)] : null,
    layer.remedies.length ? [heading("What to do (not tried)"), remedyList(layer)] : null);
  return element("tr", { class: "detail" }, element("td", { colspan: COLUMNS.length }, element("div", { class: "detail-inner" }, left, element("div", {}, histogramsOf(layer)))));
}

function toggleLayer(index, isOpen = !rows[index].row.classList.contains("is-open")) {
  const entry = rows[index];
  entry.row.classList.toggle("is-open", isOpen);
  entry.row.querySelector(".opener").setAttribute("aria-expanded", String(isOpen));
  if (isOpen) entry.row.after((entry.detail ??= detailOf(entry.layer)));
  else entry.detail?.remove();
}

// From the chart or the ranking: the row is found, whatever is filtered, opened and focused.
function revealLayer(index) {
  if (rows[index].row.hidden) clearFilters();
  toggleLayer(index, true);
  const { row } = rows[index];
  row.classList.remove("is-found");
  void row.offsetWidth; // so that the same row can be found twice
  row.classList.add("is-found");
  row.querySelector(".opener").focus({ preventScroll: true });
  row.scrollIntoView({ block: "center" });
}

function compareBy(column, direction) {
  return (a, b) => compareValues(column.value(a.layer), column.value(b.layer), direction) || a.layer.index - b.layer.index;
}

function sortBy(key, direction) {
  const column = COLUMNS.find((each) => each.key === key);
  sorting = { key, direction };
  const ordered = [...rows].sort(compareBy(column, direction));
  const isOpen = (entry) => entry.row.classList.contains("is-open");
  byId("layer-table").tBodies[0].replaceChildren(...ordered.flatMap((entry) => (isOpen(entry) ? [entry.row, entry.detail] : [entry.row])));
  markSorted(byId("layer-table"), COLUMNS.indexOf(column), direction);
}

function headingOf(column) {
  const toggle = () => sortBy(column.key, sorting.key === column.key ? -sorting.direction : column.first);
  return element("th", { scope: "col", class: column.kind, "data-key": column.key }, sortButton(column.title, toggle));
}

function showLayers() {
  const table = byId("layer-table");
  table.tHead.append(element("tr", {}, COLUMNS.map(headingOf)));
  rows.push(...layers.map(rowOf));
  sortBy("order", 1);
}
