// Elements are made of text nodes and attributes, never of markup: a layer's name can hold anything.
const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((each) => each !== null && each !== undefined && each !== ""));
  return node;
}

function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function shape(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function contentOf(id) {
  return JSON.parse(byId(id).textContent);
}

// A bar of a share between 0 and 1. By a property: the page's policy forbids style attributes.
function bar(share, className) {
  const inner = element("div", { class: "fill" });
  inner.style.width = `${Math.min(100, Math.max(0, 100 * share))}%`;
  return element("div", { class: className, "aria-hidden": "true" }, inner);
}

function factList(pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return element("dl", { class: "facts" }, shown.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = element("textarea", { class: "visually-hidden", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    const isCopied = document.execCommand("copy"); // where pages from a disk have no clipboard
    area.remove();
    return isCopied;
  }
}

// Text in a box with a button that copies it.
function copyable(text, what) {
  const button = element("button", { type: "button", "aria-label": `Copy ${what}` }, "Copy");
  button.addEventListener("click", async () => {
    button.textContent = (await copyText(text)) ? "Copied" : "Select it";
    button.focus();
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return element("div", { class: "copy" }, element("code", { tabindex: "-1" }, text), button);
}
