// The diagnosis is read once; then each part of the page is drawn, in the order of reading.
const facts = contentOf("facts");
const report = contentOf("diagnosis");
const layers = report.layers.map((layer, index) => ({ ...layer, index }));
const ranked = layers.filter((each) => each.rank !== null).sort((a, b) => a.rank - b.rank);
const mostShare = Math.max(1e-12, ...layers.map((each) => each.share ?? 0));

function saveJson() {
  const text = JSON.stringify(report, null, 1);
  const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const link = element("a", { href: address, download: `${report.result.name.replace(/\.onnx$/, "")}-report.json` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

// Paper has no clicks: what matters is opened before printing, and closed again.
function setUpPrinting() {
  let opened = [];
  let openedRows = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details.opens-on-paper:not([open])")];
    openedRows = worstLayers().slice(0, 3).map((each) => each.index).filter((index) => !rows[index].row.classList.contains("is-open"));
    for (const each of opened) each.open = true;
    for (const index of openedRows) toggleLayer(index, true);
  });
  addEventListener("afterprint", () => {
    for (const each of opened) each.open = false;
    for (const index of openedRows) toggleLayer(index, false);
  });
}

function start() {
  setUpTheme();
  document.title = `${report.result.name}: ${report.verdict} (quark accuracy report)`;
  showVerdict();
  showCards();
  showOutputs();
  showChart();
  showRanking();
  showLayers();
  setUpFilters();
  showSkipped();
  showLint();
  showMaking();
  setUpPrinting();
  byId("save-json").addEventListener("click", saveJson);
  const wanted = /^#layer-(\d+)$/.exec(location.hash);
  if (wanted && rows[wanted[1]]) revealLayer(Number(wanted[1]));
  document.documentElement.dataset.ready = "true";
}

start();
