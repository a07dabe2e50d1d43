// Numbers as people read them. JSON has no infinities: there they are text.
function numberOf(value) {
  if (value === null || value === undefined) return null;
  if (typeof value === "number") return value;
  return { inf: Infinity, "-inf": -Infinity }[value] ?? NaN;
}

function decibels(value) {
  const number = numberOf(value);
  if (number === null) return "–";
  if (Number.isNaN(number)) return "NaN";
  if (!Number.isFinite(number)) return number > 0 ? "exact" : "−∞";
  return minus(number.toFixed(1));
}

function withUnit(value) {
  const text = decibels(value);
  return /\d/.test(text) ? `${text} dB` : text;
}

function cosine(value) {
  const number = numberOf(value);
  if (number === null || Number.isNaN(number)) return number === null ? "–" : "NaN";
  // 0.99998 must not read as 1
  return number > 0.9995 && number < 1 ? Math.min(number, 0.99999).toFixed(5) : minus(number.toFixed(4));
}

// Counts, where a percentage would be about a few samples.
function agreementText(output) {
  const count = output.predictions;
  if (!(count > 0 && count < 100)) return percent(output.agreement);
  const ties = output.near_ties ? `, ${output.near_ties} near tie${output.near_ties > 1 ? "s" : ""}` : "";
  return `${Math.round(output.agreement * count)} of ${count}${ties}`;
}

function percent(share, digits = 1) {
  const number = numberOf(share);
  if (number === null) return "–";
  if (number === 0) return "0 %";
  if (number > 0 && 100 * number < 10 ** -digits / 2) return `< ${(10 ** -digits).toFixed(digits)} %`;
  return `${minus((100 * number).toFixed(digits))} %`;
}

function significant(value, digits = 3) {
  const number = numberOf(value);
  if (number === null) return "–";
  if (!Number.isFinite(number)) return Number.isNaN(number) ? "NaN" : minus(number > 0 ? "∞" : "-∞");
  if (number !== 0 && (Math.abs(number) >= 1e5 || Math.abs(number) < 1e-3)) return minus(number.toExponential(digits - 1));
  return minus(String(Number(number.toPrecision(digits))));
}

function whole(count) {
  return count === null || count === undefined ? "–" : String(count).replace(/\B(?=(\d{3})+$)/g, ",");
}

function short(count) {
  const [size, unit] = [[1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]].find(([least]) => count >= least) ?? [1, ""];
  return `${Number((count / size).toPrecision(3))}${unit ? ` ${unit}` : ""}`;
}

function bitsText(bits) {
  return bits === null || bits === undefined ? "–" : String(Number(bits.toFixed(2)));
}

function sizeText(bytes) {
  const units = ["B", "KB", "MB", "GB"];
  let [size, place] = [bytes, 0];
  while (size >= 1000 && place < 3) [size, place] = [size / 1000, place + 1];
  return [place ? size.toFixed(1) : String(size), units[place]];
}

function countOf(count, noun) {
  return `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
}

function minus(text) {
  return text.replace("-", "−");
}

function capitalized(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
