// Light or dark: as the system has it until somebody chooses; the choice is kept where the browser lets a page keep any.
const THEME_KEY = "quark-report-theme";

function keptTheme() {
  try {
    const kept = localStorage.getItem(THEME_KEY);
    return kept === "light" || kept === "dark" ? kept : null;
  } catch {
    return null; // pages from a disk may have no storage
  }
}

function currentTheme() {
  return document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

function setUpTheme() {
  const button = byId("theme");
  const show = () => { button.textContent = currentTheme() === "dark" ? "☀ Light" : "☾ Dark"; };
  if (keptTheme()) document.documentElement.dataset.theme = keptTheme();
  button.addEventListener("click", () => {
    const next = currentTheme() === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    try { localStorage.setItem(THEME_KEY, next); } catch { /* it lasts as long as the page */ }
    show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  show();
}
