// Small helpers: elements from text only (never from markup), numbers, the theme, hover explanations.

const page = JSON.parse(document.getElementById("page-data").textContent);

function byId(id) {
  return document.getElementById(id);
}

/** An element with a class and children; strings become text nodes, so no name can become markup. */
function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Fill a select with [value, text] pairs, keeping its value where it still exists. */
function fill(select, options) {
  const before = select.value;
  select.replaceChildren(
    ...options.map(([value, text]) => {
      const option = make("option", "", text);
      option.value = value;
      return option;
    }),
  );
  if (options.some(([value]) => value === before)) select.value = before;
  const field = select.closest(".field");
  if (field) field.hidden = options.length < 2;
}

/** A number to at most six significant digits, without trailing zeros. */
function exact(value) {
  return value === null || Number.isNaN(value) ? "" : String(Number(value.toPrecision(6)));
}

/** The unit of a metric's term, corrections included. */
function unitOf(metric) {
  return (termOf(metric) || { unit: "" }).unit;
}

function termOf(metric) {
  return page.terms[metric.startsWith("mse_ratio:") ? "mse_ratio" : metric];
}

/** A metric's title: "SQNR", "MSE ratio · mbs+of". */
function titleOf(metric) {
  const term = termOf(metric);
  if (metric.startsWith("mse_ratio:")) return `${term.title} · ${metric.slice("mse_ratio:".length)}`;
  return term ? term.title : metric;
}

const grouped = new Intl.NumberFormat("en-US");

/** A value for reading: percent for shares, dB and octaves with their digits, few digits else. */
function shown(metric, value, withUnit = true) {
  if (value === null || value === undefined || Number.isNaN(value)) return "n/a";
  const unit = unitOf(metric);
  if (unit === "share") return `${(100 * value).toFixed(1)}${withUnit ? "\u00a0%" : ""}`;
  if (unit === "dB") return `${value.toFixed(2)}${withUnit ? "\u00a0dB" : ""}`;
  if (unit === "octaves") return value.toFixed(3);
  if (unit === "count") return grouped.format(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(2);
  return value.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : 4);
}

/** A colour of the style sheet by its custom property. */
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// ---- theme: follows the system until the button pins it

const themes = ["auto", "light", "dark"];
const themeListeners = [];

function isDark() {
  const pinned = document.documentElement.dataset.theme;
  if (pinned) return pinned === "dark";
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  byId("theme").textContent = `Theme: ${name}`;
  try {
    localStorage.setItem("mxdiag-theme", name);
  } catch {
    // Storage may be off for local files: the choice then lasts as long as the page.
  }
  themeListeners.forEach((listener) => listener());
}

function startTheme() {
  let stored = null;
  try {
    stored = localStorage.getItem("mxdiag-theme");
  } catch {
    stored = null;
  }
  if (stored && stored !== "auto" && themes.includes(stored)) setTheme(stored);
  byId("theme").addEventListener("click", () => {
    const now = document.documentElement.dataset.theme || "auto";
    setTheme(themes[(themes.indexOf(now) + 1) % themes.length]);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    themeListeners.forEach((listener) => listener());
  });
}

// ---- explanations: one tip, shown on hover and on focus of anything with data-term

function termContent(name) {
  const term = page.terms[name];
  if (!term) return null;
  const unit = term.unit && !["share", "ratio", "count"].includes(term.unit) ? ` (${term.unit})` : "";
  return [
    make("strong", "", term.title + unit),
    make("p", "", term.meaning),
    term.formula ? make("p", "formula", term.formula) : null,
    make("p", "source", `Source: ${term.source}`),
  ].filter(Boolean);
}

function showTip(anchor) {
  const content = termContent(anchor.dataset.term);
  if (!content) return;
  const tip = byId("tip");
  tip.replaceChildren(...content);
  tip.hidden = false;
  const box = anchor.getBoundingClientRect();
  const left = Math.min(Math.max(8, box.left), innerWidth - tip.offsetWidth - 8);
  const below = box.bottom + 8 + tip.offsetHeight < innerHeight;
  tip.style.left = `${left}px`;
  tip.style.top = `${below ? box.bottom + 6 : box.top - tip.offsetHeight - 6}px`;
}

function startTips() {
  const hide = () => {
    byId("tip").hidden = true;
  };
  const anchorOf = (event) => (event.target instanceof Element ? event.target.closest("[data-term]") : null);
  for (const kind of ["mouseover", "focusin"]) {
    document.addEventListener(kind, (event) => {
      const anchor = anchorOf(event);
      if (anchor) showTip(anchor);
      else if (kind === "mouseover") hide();
    });
  }
  document.addEventListener("focusout", hide);
  document.addEventListener("scroll", hide, { passive: true, capture: true });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
  });
}
