// What is to be seen first: the verdict and why, what to do, and the figures of the whole network.
const MOST_STEPS = 3;
const MOST_BLAMED = 10;
const SIGNS = { ok: "✓", degraded: "!", collapsed: "✕", unchecked: "?" };

function worstOutput() {
  return [...report.outputs].sort((a, b) => b.severity - a.severity || numberOf(a.sqnr_db) - numberOf(b.sqnr_db))[0];
}

function worstPart(output) {
  return [...output.parts].sort((a, b) => b.severity - a.severity)[0];
}

function partFigure(part, value) {
  return part.measure.startsWith("SQNR") ? withUnit(value) : Number(value).toFixed(2);
}

function partText(part) {
  const where = [part.name, part.kind ? `(${part.kind})` : ""].filter(Boolean).join(" ");
  const worst = part.is_sample_worse ? `, and ${partFigure(part, part.worst_figure)} on sample ${part.worst_sample}` : "";
  return `${where}: ${part.measure} ${partFigure(part, part.figure)}${worst}`;
}

function basisText() {
  const { samples, data, is_random: isRandom } = report.basis;
  return isRandom ? countOf(samples, "random sample") : `${countOf(samples, "sample")} of ${data}`;
}

function reasonText() {
  const worst = worstOutput();
  if (!worst) return "";
  const agreement = worst.agreement === null ? "" : `, the same class for ${agreementText(worst)}`;
  const part = worstPart(worst);
  const whole = `Output '${worst.name}' has an SQNR of ${withUnit(worst.sqnr_db)} and a cosine of ${cosine(worst.cosine)}${agreement}, on ${basisText()}.`;
  const sentence = part ? `${report.verdict === "ok" ? "Worst part" : "What fails"}: output '${worst.name}' ${partText(part)}. ${whole}` : whole;
  const first = ranked[0];
  const isBlamed = report.verdict !== "ok" && first && first.share > 0;
  return isBlamed ? `${sentence} The most sensitive layer, '${first.name}', has ${percent(first.share, 0)} of all sensitivity.` : sentence;
}

// What was tried and helped, or that nothing did. Without trials: what is said of the network as a whole, then, up to
// three, the first remedies of the worst layers, each kind once. Arguments can be copied; they come quoted for a shell.
function firstSteps() {
  const steps = report.steps.slice(0, MOST_STEPS).map(({ text, arguments: option }) => {
    return { action: option.includes("nodes_to_exclude=") ? "exclude" : "", words: capitalized(text), option };
  });
  if (report.verdict === "ok" || triedSuggestions().length) return steps;
  const named = report.steps.map((each) => each.arguments).join("\n");
  for (const layer of worstLayers().slice(0, MOST_BLAMED)) {
    for (const { action, text, option, arguments: quoted } of layer.remedies) {
      const isKnown = steps.some((each) => each.action === action) || (quoted && named.includes(quoted));
      if (steps.length < MOST_STEPS && quoted && !isKnown) steps.push({ action, words: `${capitalized(text)}; not tried`, option: quoted, layer: isOfOneLayer(option) ? layer.name : "" });
    }
  }
  return steps;
}

function triedSuggestions() {
  return (report.suggestions ?? []).filter((each) => each.outcome !== "not tried");
}

// All that was considered, with what was measured.
function suggestionDetails() {
  if (!triedSuggestions().length) return null;
  return element("details", { class: "tried" },
    element("summary", {}, `${countOf(triedSuggestions().length, "change")} tried`),
    element("ul", {}, report.suggestions.map((each) => element("li", {}, `${capitalized(each.text)}: `, element("span", { class: "muted" }, each.result)))));
}

function isOfOneLayer(option) {
  return /^(nodes_to_exclude|TensorQuantOverrides)=/.test(option);
}

function stepItem({ words, option, layer }) {
  return element("li", {}, words, layer ? element("span", { class: "muted" }, ` (${layer})`) : null, option ? copyable(option, "the option") : null);
}

function showVerdict() {
  const verdict = report.verdict;
  const isDoubtful = verdict === "ok" && report.basis.is_random;
  const tone = isDoubtful ? "unchecked" : verdict;
  const meaning = isDoubtful ? "Outputs agree with the float network on random numbers, which says little." : capitalized(facts.meanings[verdict]);
  const steps = firstSteps();
  const place = byId("verdict");
  place.classList.add(`is-${tone}`);
  place.append(
    element("p", { class: "verdict-files" }, `${report.source.name} → `, element("strong", {}, report.result.name)),
    element("div", { class: "verdict-grid" },
      element("div", {},
        element("h1", { id: "verdict-word" }, element("span", { class: "sign", "aria-hidden": "true" }, SIGNS[tone]), verdict === "ok" ? `OK${isDoubtful ? ", perhaps" : ""}` : capitalized(verdict)),
        element("p", { class: "meaning" }, meaning.replace(/([^.])$/, "$1.")),
        element("p", { class: "why" }, reasonText())),
      steps.length
        ? element("div", { class: "first-steps" },
          element("h2", {}, verdict === "ok" ? "Possible improvements" : "Do first"),
          element("ol", {}, steps.map(stepItem)),
          suggestionDetails())
        : null),
  );
}

function card(title, figure, change, notes) {
  return element("div", { class: "card" },
    element("h3", {}, title),
    element("p", { class: "figure" }, figure),
    change ? element("p", { class: "change" }, change) : null,
    notes.filter(Boolean).map((text) => element("p", { class: "note" }, text)));
}

function fromTo(before, after, unit = "") {
  return [element("span", { class: "from" }, `${before} → `), after, unit ? element("span", { class: "unit" }, ` ${unit}`) : null];
}

function accuracyCard() {
  const found = report.accuracy;
  if (found) {
    const drop = 100 * (found.quantized_top1 - found.float_top1);
    const change = `${drop > 0 ? "+" : ""}${minus(drop.toFixed(2))} ± ${(100 * found.standard_error).toFixed(2)} points`;
    const topFive = `Top-5 ${percent(found.float_top5)} → ${percent(found.quantized_top5)}`;
    const figure = fromTo((100 * found.float_top1).toFixed(1), (100 * found.quantized_top1).toFixed(1), "%");
    return card("Top-1 accuracy", figure, change, [topFive, `${countOf(found.samples, "sample")} of ${found.data}`]);
  }
  const worst = worstOutput();
  if (!worst) return card("Accuracy", "–", "", ["Nothing was compared: no samples."]);
  const closeness = `SQNR ${withUnit(worst.sqnr_db)}, cosine ${cosine(worst.cosine)}`;
  const unknown = "No labels were given, so accuracy itself is not known.";
  if (worst.agreement === null) return card("Closeness to float", withUnit(worst.sqnr_db), "", [`Cosine ${cosine(worst.cosine)} on ${basisText()}`, unknown]);
  return card("Same class as float", percent(worst.agreement), "", [`${closeness}, ${basisText()}`, unknown]);
}

function measureCard() {
  const found = report.measure;
  if (!found) return null;
  const drop = 100 * numberOf(found.drop);
  const word = found.is_higher_better ? (drop < 0 ? "% gained" : "% lost") : (drop < 0 ? "points less" : "points more");
  const figure = fromTo(significant(found.float_value, 4), significant(found.value, 4));
  return card("Measure", figure, `${significant(Math.abs(drop))} ${word}`, [found.name]);
}

function sizeCard() {
  const [before, after] = [report.source.bytes, report.result.bytes];
  const ratio = before / Math.max(after, 1);
  const change = ratio >= 1.02 ? `${ratio.toFixed(1)} times smaller` : ratio > 0.98 ? "as large as float" : `${(1 / ratio).toFixed(2)} times larger`;
  const [size, unit] = sizeText(after);
  return card("File", fromTo(sizeText(before).join(" "), size, unit), change, [report.weights ? countOf(report.weights.parameters, "parameter") : ""]);
}

function bitsCard() {
  const found = report.weights;
  if (!found) return null;
  const isUnpacked = found.stored_bits > 1.15 * found.format_bits + 0.2;
  const change = `The formats need ${bitsText(found.format_bits)}`;
  const hint = isUnpacked ? "Weights are stored wider than their formats: 'quark pack' stores them in their true width." : "Stored in the width of their formats.";
  return card("Bits per weight", fromTo(bitsText(found.float_bits), bitsText(found.stored_bits)), change, [hint]);
}

function speedCard() {
  const found = report.speed;
  if (!found) return null;
  const ratio = found.float_ms / found.quantized_ms;
  const change = ratio >= 1.02 ? `${ratio.toFixed(2)} times faster` : ratio > 0.98 ? "as fast as float" : `${(1 / ratio).toFixed(2)} times slower`;
  const how = found.threads
    ? `processor time of ${countOf(found.threads, "thread")}, because the computer was busy`
    : "all cores, on the computer that made this page";
  const figure = fromTo(significant(found.float_ms), significant(found.quantized_ms), "ms");
  return card("Time per sample", figure, change, [`Batches of ${found.batch_size}, ${how}`]);
}

function showCards() {
  byId("cards").append(...[accuracyCard(), measureCard(), sizeCard(), bitsCard(), speedCard()].filter(Boolean));
}

// With one output of one part the verdict has said it all.
function showOutputs() {
  const place = byId("outputs");
  if (report.outputs.length > 1) {
    const headings = ["Output", "SQNR", "Cosine", "Same class", "Largest error", "Verdict"];
    const rows = report.outputs.map((each) => [withUnit(each.sqnr_db), cosine(each.cosine), percent(each.agreement), significant(each.max_error), each.verdict]);
    place.append(element("table", { class: "plain" },
      element("thead", {}, element("tr", {}, headings.map((text, index) => element("th", { scope: "col", class: index ? "number" : null }, text)))),
      element("tbody", {}, report.outputs.map((each, index) => element("tr", {}, element("td", {}, each.name), rows[index].map((text) => element("td", { class: "number" }, text)))))));
  }
  const parts = report.outputs.flatMap((output) => output.parts.map((part) => ({ output, part }))).sort((a, b) => b.part.severity - a.part.severity);
  if (parts.length > 1) {
    const item = ({ output, part }) => element("li", {}, element("strong", {}, part.verdict), ` output '${output.name}' ${partText(part)}`);
    place.append(element("details", { class: "opens-on-paper", open: report.verdict === "ok" ? null : "" }, element("summary", {}, `${countOf(parts.length, "part")} of the outputs, worst first`), element("ul", { class: "causes" }, parts.map(item))));
  }
  if (report.remarks.length) {
    place.append(element("details", {}, element("summary", {}, countOf(report.remarks.length, "remark")), element("ul", { class: "causes" }, report.remarks.map((text) => element("li", {}, text)))));
  }
}
