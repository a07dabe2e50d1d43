// What is the matter with a layer, and what to do about it; and the list of the worst.
const FIRST_SHOWN = 5;

function remedyItem(remedy) {
  const label = facts.actions[remedy.action] ?? remedy.action;
  return element("li", {}, element("strong", {}, `${label}: `), remedy.text, remedy.arguments ? copyable(remedy.arguments, `the option for: ${label}`) : null);
}

function causeList(layer) {
  return element("ul", { class: "causes" }, layer.causes.map((text) => element("li", {}, text)));
}

function remedyList(layer) {
  return element("ul", { class: "remedies" }, layer.remedies.map(remedyItem));
}

function rankingItem(layer, place) {
  const chips = [layer.op_type, layer.weights && `weights ${layer.weights}`, layer.inputs && `inputs ${layer.inputs}`].filter(Boolean);
  const figures = `local ${withUnit(layer.local?.sqnr_db)}, accumulated ${withUnit(layer.accumulated?.sqnr_db)}`;
  const link = element("a", { href: `#layer-${layer.index}`, title: layer.name }, layer.name);
  link.addEventListener("click", (event) => { event.preventDefault(); revealLayer(layer.index); });
  const hasShare = layer.share !== null;
  const more = layer.causes.length || layer.remedies.length;
  return element("li", {},
    element("span", { class: "place" }, String(place)),
    element("div", {},
      element("div", { class: "headline" }, link, chips.map((text) => element("span", { class: "chip" }, text))),
      hasShare ? element("div", { class: "share-line" }, bar(layer.share, "track"), element("span", {}, element("strong", {}, percent(layer.share)), " of all sensitivity")) : null,
      element("p", { class: "muted small" }, figures),
      more ? element("div", { class: "columns" },
        element("div", {}, element("p", { class: "label" }, "Why"), layer.causes.length ? causeList(layer) : element("p", { class: "muted" }, "No single cause stands out.")),
        element("div", {}, element("p", { class: "label" }, "What to do (not tried)"), layer.remedies.length ? remedyList(layer) : element("p", { class: "muted" }, "Nothing in particular."))) : null));
}

function worstLayers() {
  if (ranked.length) return ranked;
  const compared = layers.filter((each) => each.local && !Number.isNaN(numberOf(each.local.sqnr_db)));
  return compared.sort((a, b) => numberOf(a.local.sqnr_db) - numberOf(b.local.sqnr_db));
}

function rankingText() {
  const { sensitivity_samples: samples, measure } = report.basis;
  if (!ranked.length) return "Sensitivities were not measured. These layers have the lowest local SQNR.";
  const how = measure === "kl" ? "by the divergence of its predictions" : "by the squared error of all parts of all outputs";
  return `Ranked by how far the network's output moves when only that layer is quantized, ${how}, on ${countOf(samples, "sample")}.`;
}

function showRanking() {
  const worst = worstLayers();
  if (!worst.length) {
    byId("ranking-lead").replaceWith(element("p", { class: "empty" }, "No layer has figures to rank by."));
    return;
  }
  byId("ranking-lead").textContent = rankingText();
  const list = byId("ranking-list");
  const add = (count) => {
    const start = list.children.length;
    list.append(...worst.slice(start, start + count).map((layer, index) => rankingItem(layer, start + index + 1)));
    const left = worst.length - list.children.length;
    byId("ranking-more").replaceChildren(...(left > 0 ? [element("button", { type: "button", class: "quiet", onclick: () => add(10) }, `Show ${Math.min(10, left)} more of ${left}`)] : []));
    if (start) list.children[start].querySelector("a").focus();
  };
  add(FIRST_SHOWN);
}
