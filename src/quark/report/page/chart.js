// Signal to noise over the layers in graph order: accumulated as a line, local as dots, sensitivity as bars beneath.
const CHART = { height: 250, strip: 54, left: 40, right: 14, top: 16, gap: 30, bottom: 26, most_db: 80 };

function layerFigure(layer, which) {
  return layer[which] ? numberOf(layer[which].sqnr_db) : null;
}

// From 0, or below it, to the highest finite figure; what is beyond is drawn at the edge.
function decibelSpan() {
  const figures = layers.flatMap((each) => [layerFigure(each, "local"), layerFigure(each, "accumulated")]).filter(Number.isFinite);
  const highest = Math.min(CHART.most_db, Math.max(20, ...figures));
  const lowest = Math.max(-20, Math.min(0, ...figures));
  return [10 * Math.floor(lowest / 10), 10 * Math.ceil((highest + 1) / 10)];
}

function chartScales(width) {
  const [lowest, highest] = decibelSpan();
  const inner = width - CHART.left - CHART.right;
  const step = inner / Math.max(layers.length, 1);
  const bottom = CHART.top + CHART.height;
  const x = (index) => CHART.left + step * (index + 0.5);
  const y = (value) => bottom - (CHART.height * (Math.min(highest, Math.max(lowest, value)) - lowest)) / (highest - lowest);
  const at = (position) => Math.min(layers.length - 1, Math.max(0, Math.floor((position - CHART.left) / step)));
  return { width, lowest, highest, step, bottom, x, y, at };
}

function chartGrid(scales) {
  const { x, y, lowest, highest, width, bottom } = scales;
  const right = width - CHART.right;
  const parts = [];
  for (let value = lowest; value <= highest; value += highest - lowest > 50 ? 20 : 10) {
    parts.push(shape("line", { class: value === lowest ? "base" : "grid", x1: CHART.left, x2: right, y1: y(value), y2: y(value) }));
    parts.push(shape("text", { x: CHART.left - 7, y: y(value) + 4, "text-anchor": "end" }, minus(String(value))));
  }
  parts.push(shape("text", { x: 0, y: CHART.top - 6 }, "dB"));
  for (const [name, limit] of [["ok", facts.ok.sqnr_db], ["collapsed", facts.collapsed.sqnr_db]]) {
    parts.push(shape("line", { class: `limit ${name}`, x1: CHART.left, x2: right, y1: y(limit), y2: y(limit) }));
  }
  const every = Math.max(1, Math.ceil(layers.length / Math.max(2, Math.floor(width / 90))));
  for (let index = 0; index < layers.length; index += every) {
    parts.push(shape("text", { x: x(index), y: bottom + 17, "text-anchor": "middle" }, String(layers[index].order)));
  }
  return parts;
}

// Over the lines, so that they can be read.
function limitLabels({ y, width }) {
  const label = (name, limit, side, text) => shape("text", { class: name, x: width - CHART.right, y: y(limit) + side, "text-anchor": "end" }, `${text} below ${limit} dB`);
  return [label("ok", facts.ok.sqnr_db, -5, "degraded"), label("collapsed", facts.collapsed.sqnr_db, 13, "collapsed")];
}

// Pieces of a line: it has a gap where a layer has no figure.
function chartRuns(which, scales) {
  const runs = [[]];
  layers.forEach((layer, index) => {
    const value = layerFigure(layer, which);
    if (value === null || Number.isNaN(value)) runs.push([]);
    else runs.at(-1).push(`${scales.x(index).toFixed(1)},${scales.y(value).toFixed(1)}`);
  });
  return runs.filter((run) => run.length);
}

function chartSeries(scales) {
  const radius = Math.max(1.6, Math.min(4, scales.step / 3));
  const parts = [];
  for (const run of chartRuns("accumulated", scales)) {
    const [first, last] = [run[0].split(",")[0], run.at(-1).split(",")[0]];
    parts.push(shape("path", { class: "area", d: `M${first},${scales.bottom} L${run.join(" ")} L${last},${scales.bottom} Z` }));
    parts.push(shape("polyline", { class: "line", points: run.join(" ") }));
    if (run.length === 1) parts.push(shape("rect", { class: "lone", x: first - 9, y: run[0].split(",")[1] - 1, width: 18, height: 2 }));
  }
  for (const run of chartRuns("local", scales)) parts.push(shape("polyline", { class: "thread", points: run.join(" ") }));
  layers.forEach((layer, index) => {
    const value = layerFigure(layer, "local");
    if (value === null || Number.isNaN(value)) return;
    parts.push(shape("circle", { class: value === Infinity ? "dot exact" : "dot", cx: scales.x(index), cy: scales.y(value), r: radius }));
  });
  return parts;
}

function chartStrip(scales) {
  const most = Math.max(...layers.map((each) => each.share ?? 0));
  if (!(most > 0)) return [];
  const floor = scales.bottom + CHART.gap + CHART.strip;
  const width = Math.max(1, Math.min(18, scales.step * 0.66));
  const parts = [shape("line", { class: "base", x1: CHART.left, x2: scales.width - CHART.right, y1: floor, y2: floor }),
    shape("text", { x: CHART.left - 7, y: floor - CHART.strip + 10, "text-anchor": "end" }, percent(most, 0)),
    shape("text", { x: CHART.left - 7, y: floor + 1, "text-anchor": "end" }, "0")];
  layers.forEach((layer, index) => {
    if (!(layer.share > 0)) return;
    const height = Math.max(1, (CHART.strip * layer.share) / most);
    parts.push(shape("rect", { class: "bar", x: scales.x(index) - width / 2, y: floor - height, width, height }));
  });
  return parts;
}

function chartTip(layer) {
  const figures = [["local", withUnit(layer.local?.sqnr_db)], ["accumulated", withUnit(layer.accumulated?.sqnr_db)]];
  if (layer.share !== null) figures.push(["sensitivity", `${percent(layer.share)} (rank ${layer.rank})`]);
  if (layer.clipped) figures.push(["clipped", percent(layer.clipped, 2)]);
  return [element("strong", {}, layer.name), `${layer.op_type}, layer ${layer.order}`,
    element("dl", {}, figures.flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]))];
}

function drawChart(width) {
  const scales = chartScales(width);
  const hasShares = layers.some((each) => each.share > 0);
  const end = scales.bottom + (hasShares ? CHART.gap + CHART.strip : CHART.bottom);
  const label = `SQNR of ${countOf(layers.length, "layer")}. Left and right keys move along it, Enter opens the layer's row.`;
  const picture = shape("svg", { viewBox: `0 0 ${width} ${end + 4}`, tabindex: "0", role: "img", "aria-label": label },
    chartGrid(scales), chartSeries(scales), chartStrip(scales), limitLabels(scales));
  return { picture, scales, end };
}

function legend(hasShares) {
  const entry = (name, text) => element("span", { class: name }, element("i", { "aria-hidden": "true" }), text);
  return element("div", { class: "legend" }, entry("accumulated", "accumulated"), entry("local", "local"), hasShares ? entry("share", "share of all sensitivity") : null);
}

function showChart() {
  const place = byId("chart");
  if (!layers.some((each) => each.local || each.accumulated)) {
    place.append(element("p", { class: "empty" }, "No layer of the quantized network could be compared with the float network."));
    return;
  }
  byId("course-lead").textContent = "Local is the layer's own error: only it is quantized, with inputs from the float network. Accumulated is the error of its output in the quantized network, including all earlier layers. Where the line falls faster than the dots, errors of earlier layers add up.";
  const frame = element("div", { class: "chart" });
  place.append(legend(layers.some((each) => each.share > 0)), frame);
  let at = -1;
  const redraw = () => { frame.replaceChildren(); watchChart(frame, drawChart(Math.max(300, frame.clientWidth - 28)), () => at, (index) => { at = index; }); };
  redraw();
  addEventListener("resize", () => requestAnimationFrame(redraw));
}

// The guide and the tip follow the pointer, or the keys.
function watchChart(frame, { picture, scales, end }, position, remember) {
  const guide = shape("line", { class: "guide", y1: CHART.top, y2: end, visibility: "hidden" });
  const here = shape("circle", { class: "here", r: 4.5, visibility: "hidden" });
  const tip = element("div", { class: "tip", role: "status", hidden: true });
  picture.append(guide, here);
  frame.append(picture, tip);
  const hide = () => { tip.hidden = true; [guide, here].forEach((each) => each.setAttribute("visibility", "hidden")); };
  const show = (index) => {
    remember(index);
    const x = scales.x(index);
    const value = layerFigure(layers[index], "accumulated");
    fill(guide, { x1: x, x2: x, visibility: "visible" }, []);
    fill(here, { cx: x, cy: scales.y(value ?? 0), visibility: value === null || Number.isNaN(value) ? "hidden" : "visible" }, []);
    tip.replaceChildren(...chartTip(layers[index]));
    tip.hidden = false;
    const room = frame.clientWidth;
    tip.style.left = `${Math.max(6, x + 28 + tip.offsetWidth > room ? x - tip.offsetWidth : x + 28)}px`;
    tip.style.top = "1.6rem";
  };
  const indexOf = (event) => {
    const box = picture.getBoundingClientRect();
    return scales.at(((event.clientX - box.left) * scales.width) / box.width);
  };
  picture.addEventListener("pointermove", (event) => show(indexOf(event)));
  picture.addEventListener("pointerleave", () => { if (document.activeElement !== picture) hide(); });
  picture.addEventListener("blur", hide);
  picture.addEventListener("click", (event) => revealLayer(indexOf(event)));
  picture.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: Math.max(0, position() - 1), ArrowRight: Math.min(layers.length - 1, position() + 1), Home: 0, End: layers.length - 1 };
    if (event.key in moves) { event.preventDefault(); show(moves[event.key]); }
    if (event.key === "Enter" && position() >= 0) {
      event.preventDefault(); // or it would go on to the button that gets the focus, and close the row again
      revealLayer(position());
    }
    if (event.key === "Escape") hide();
  });
}
