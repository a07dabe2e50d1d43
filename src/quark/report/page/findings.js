// Nodes that stayed in float, by reason; and what the NPU's rules have to say, by rule.
const LINT_SHOWN = 5;

function groupedBy(items, keyOf) {
  const groups = new Map();
  for (const each of items) {
    if (!groups.has(keyOf(each))) groups.set(keyOf(each), []);
    groups.get(keyOf(each)).push(each);
  }
  return [...groups].sort((a, b) => b[1].length - a[1].length);
}

function operatorCounts(nodes) {
  return groupedBy(nodes, (each) => each.op_type).map(([name, some]) => `${some.length} ${name}`).join(", ");
}

function showSkipped() {
  const place = byId("skipped-content");
  if (!report.skipped.length) {
    place.append(element("p", { class: "empty" }, "Every node that can be quantized is quantized."));
    return;
  }
  place.append(element("p", { class: "lead" }, `${countOf(report.skipped.length, "node")}, by reason.`));
  // a reason that names the operator is the same reason for another operator
  for (const [shared, nodes] of groupedBy(report.skipped, (each) => each.reason.replaceAll(` ${each.op_type}`, ""))) {
    const reason = nodes.every((each) => each.reason === nodes[0].reason) ? nodes[0].reason : shared;
    place.append(element("details", { class: "opens-on-paper" },
      element("summary", {}, element("strong", {}, capitalized(reason)), element("span", { class: "muted" }, `: ${operatorCounts(nodes)}`)),
      element("ul", { class: "names" }, nodes.map((each) => element("li", {}, each.node || "(no name)", element("span", { class: "muted" }, ` ${each.op_type}`))))));
  }
}

function lintItem(remark) {
  return element("li", {}, remark.where ? element("strong", {}, `${remark.where}: `) : "", remark.text, remark.fix ? element("span", { class: "muted" }, ` ${remark.fix}`) : "");
}

function lintGroup(rule, remarks) {
  const { level } = remarks[0];
  const rest = remarks.slice(LINT_SHOWN);
  return element("details", { class: level === "error" ? "is-collapsed opens-on-paper" : "is-degraded opens-on-paper" },
    element("summary", {}, element("span", { class: "level" }, capitalized(level)), element("strong", {}, rule), element("span", { class: "muted" }, `, ${countOf(remarks.length, "finding")}`)),
    element("ul", { class: "causes" }, remarks.slice(0, LINT_SHOWN).map(lintItem)),
    rest.length ? element("details", {}, element("summary", {}, `${rest.length} more`), element("ul", { class: "causes" }, rest.map(lintItem))) : null);
}

function showLint() {
  const place = byId("lint-content");
  if (report.lint === null) {
    place.append(element("p", { class: "empty" }, "Not checked: this file does not use the number formats of AMD's NPU for convolutional networks (8-bit integers, power-of-two scales). 'quark lint' checks it anyway."));
    return;
  }
  if (!report.lint.length) {
    place.append(element("p", { class: "empty" }, "No findings: the NPU accepts this file."));
    return;
  }
  const errors = report.lint.filter((each) => each.level === "error");
  const others = report.lint.filter((each) => each.level !== "error");
  place.append(element("p", { class: "lead" }, `${countOf(errors.length, "error")} and ${countOf(others.length, "warning")} by the rules of AMD's NPU for convolutional networks.`));
  for (const some of [errors, others]) place.append(...groupedBy(some, (each) => each.rule).map(([rule, remarks]) => lintGroup(rule, remarks)));
}
