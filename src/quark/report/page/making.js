// How the quantized file came about: what is needed to make it again.
function valueText(value) {
  if (Array.isArray(value) && value.every((each) => typeof each !== "object" || each === null)) return value.join(", ") || "none";
  return typeof value === "object" && value !== null ? JSON.stringify(value) : String(value);
}

function isFilled(value) {
  return value !== null && value !== undefined && value !== "" && !(typeof value === "object" && !Object.keys(value).length);
}

function factsOf(mapping) {
  return factList(Object.entries(mapping).filter(([, value]) => value !== false).map(([name, value]) => [name.replaceAll("_", " "), valueText(value)]));
}

function block(title, ...content) {
  return element("div", {}, element("h3", {}, title), content);
}

function changesTable(changes) {
  const cells = (texts, tag) => texts.map((text) => element(tag, tag === "th" ? { scope: "col" } : {}, text));
  return element("table", { class: "plain" },
    element("thead", {}, element("tr", {}, cells(["Option", "Preset", "Here"], "th"))),
    element("tbody", {}, changes.map((each) => element("tr", {}, element("td", { class: "mono" }, each.option), cells([valueText(each.preset), valueText(each.here)], "td")))));
}

function configurationNote(making, changes) {
  if (!Array.isArray(changes)) return "";
  if (making.nearest_preset) return changes.length ? `; the nearest preset is ${making.nearest_preset}:` : `: the same as ${making.nearest_preset}`;
  return changes.length ? ", changed:" : ", as in the preset";
}

function configurationOf(making) {
  const parts = [];
  const changes = making.config_changes;
  if (making.config_name) parts.push(element("p", {}, element("strong", {}, making.config_name), configurationNote(making, changes)));
  if (Array.isArray(changes) && changes.length) parts.push(changesTable(changes));
  if (isFilled(making.config)) parts.push(element("details", {}, element("summary", {}, "The whole configuration"), element("pre", { tabindex: "0" }, JSON.stringify(making.config, null, 2))));
  return parts.length ? block("Configuration", parts) : null;
}

function hashList(making) {
  const hashes = [[report.source.name, report.source.sha256], [report.result.name, report.result.sha256], ...Object.entries(making.hashes ?? {})];
  return block("Hashes (SHA-256)", factList(hashes.filter(([, hash]) => hash).map(([name, hash]) => [name, element("code", { class: "break small" }, valueText(hash))])));
}

const MAKING_BLOCKS = [["calibration", "Calibration"], ["seeds", "Seeds"], ["versions", "Versions"]];
const MAKING_SHOWN = new Set(["command", "report_command", "config_name", "config", "config_changes", "nearest_preset", "hashes", "algorithms", "notes", ...MAKING_BLOCKS.map(([key]) => key)]);

function listOf(title, texts) {
  return Array.isArray(texts) && texts.length ? block(title, element("ul", { class: "causes" }, texts.map((text) => element("li", {}, valueText(text))))) : null;
}

function showMaking() {
  const place = byId("making-content");
  const { making } = report;
  if (making.command) place.append(element("p", { class: "label" }, "To rebuild the file"), copyable(valueText(making.command), "the command that rebuilds the file"));
  if (making.report_command) place.append(element("p", { class: "label" }, "To rebuild this page"), copyable(valueText(making.report_command), "the command that rebuilds this page"));
  for (const text of making.notes ?? []) place.append(element("p", { class: "muted" }, valueText(text)));
  const rest = Object.fromEntries(Object.entries(making).filter(([key, value]) => !MAKING_SHOWN.has(key) && isFilled(value)));
  const blocks = [
    configurationOf(making),
    ...MAKING_BLOCKS.map(([key, title]) => {
      if (!isFilled(making[key])) return null;
      return block(title, typeof making[key] === "object" ? factsOf(making[key]) : element("p", {}, valueText(making[key])));
    }),
    listOf("Algorithms", making.algorithms),
    isFilled(rest) ? block("More", factsOf(rest)) : null,
    hashList(making),
  ];
  if (!Object.keys(making).length) place.append(element("p", { class: "empty" }, "The file does not say how it was made."));
  place.append(element("div", { class: "making-grid" }, blocks.filter(Boolean)));
}
