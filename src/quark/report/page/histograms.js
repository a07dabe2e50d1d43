// Values of a tensor: float as an area, what they became as a line over it, and where the format ends.
const PICTURE = { width: 520, height: 130, left: 4, right: 4, top: 16, bottom: 18 };
let isLogarithmic = false;

function histogramPaths(histogram) {
  const counts = [histogram.counts, histogram.quantized ?? []];
  const scaled = (count) => (isLogarithmic ? Math.log10(1 + count) : count);
  const most = Math.max(1e-9, ...counts.flat().map(scaled));
  const floor = PICTURE.top + PICTURE.height;
  const width = (PICTURE.width - PICTURE.left - PICTURE.right) / Math.max(1, histogram.counts.length);
  const steps = (numbers) => numbers.map((count, index) => {
    const [x, y] = [PICTURE.left + index * width, floor - (PICTURE.height * scaled(count)) / most];
    return `L${x.toFixed(1)},${y.toFixed(1)} L${(x + width).toFixed(1)},${y.toFixed(1)}`;
  }).join(" ");
  const outline = (numbers) => `M${PICTURE.left},${floor} ${steps(numbers)} L${PICTURE.width - PICTURE.right},${floor}`;
  return [
    shape("path", { class: "before", d: `${outline(counts[0])} Z` }),
    histogram.quantized ? shape("path", { class: "after", d: outline(counts[1]) }) : null,
  ];
}

function clipLines(histogram, x) {
  const floor = PICTURE.top + PICTURE.height;
  return (histogram.clip ?? []).flatMap((limit) => {
    const value = numberOf(limit);
    if (!(value >= numberOf(histogram.lowest) && value <= numberOf(histogram.highest))) return []; // nothing is clipped there
    const anchor = x(value) < 50 ? "start" : x(value) > PICTURE.width - 50 ? "end" : "middle";
    return [shape("line", { class: "clip", x1: x(value), x2: x(value), y1: PICTURE.top, y2: floor }),
      shape("text", { class: "clip-text", x: x(value), y: PICTURE.top - 4, "text-anchor": anchor }, significant(value))];
  });
}

function histogramPicture(histogram, title) {
  const [lowest, highest] = [numberOf(histogram.lowest), numberOf(histogram.highest)];
  const span = highest - lowest || 1;
  const inner = PICTURE.width - PICTURE.left - PICTURE.right;
  const x = (value) => PICTURE.left + (inner * (value - lowest)) / span;
  const floor = PICTURE.top + PICTURE.height;
  const zero = lowest < -0.08 * span && highest > 0.08 * span ? [shape("text", { x: x(0), y: floor + 14, "text-anchor": "middle" }, "0")] : [];
  const label = `${title}: values from ${significant(lowest)} to ${significant(highest)}`;
  return shape("svg", { viewBox: `0 0 ${PICTURE.width} ${floor + PICTURE.bottom}`, role: "img", "aria-label": label },
    histogramPaths(histogram),
    shape("line", { class: "base", x1: PICTURE.left, x2: PICTURE.width - PICTURE.right, y1: floor, y2: floor }),
    clipLines(histogram, x), zero,
    shape("text", { x: PICTURE.left, y: floor + 14 }, significant(lowest)),
    shape("text", { x: PICTURE.width - PICTURE.right, y: floor + 14, "text-anchor": "end" }, significant(highest)));
}

function histogramFigure(histogram, title) {
  const caption = element("figcaption", {}, element("strong", {}, title), element("span", { class: "muted" }, ` ${histogram.tensor}`));
  const figure = element("figure", { class: "histogram" }, caption, histogramPicture(histogram, title));
  figure.addEventListener("scale", () => figure.lastChild.replaceWith(histogramPicture(histogram, title)));
  return figure;
}

function changeScale() {
  isLogarithmic = !isLogarithmic;
  for (const each of document.querySelectorAll(".log-scale")) each.setAttribute("aria-pressed", String(isLogarithmic));
  for (const each of document.querySelectorAll("figure.histogram")) each.dispatchEvent(new Event("scale"));
}

function histogramsOf(layer) {
  const figures = [];
  if (layer.weight_histogram) figures.push(histogramFigure(layer.weight_histogram, "Weights"));
  if (layer.input_histogram) figures.push(histogramFigure(layer.input_histogram, "Inputs"));
  if (!figures.length) return element("p", { class: "muted small" }, "There are histograms of the worst layers only.");
  const key = (name, text) => element("span", { class: `key ${name}` }, element("i", { "aria-hidden": "true" }), text);
  const toggle = element("button", { type: "button", class: "quiet log-scale", "aria-pressed": String(isLogarithmic), onclick: changeScale }, "Log scale");
  return element("div", { class: "pictures" },
    element("div", { class: "pictures-head" }, key("before", "float"), key("after", "quantized"), key("clip", "clipped beyond"), toggle), figures);
}
