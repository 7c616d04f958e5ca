// Charts: one registry that draws a chart when it comes into view and again when the theme changes.

const charts = new Map();

/** Register a chart. `build` returns ECharts options, or null for nothing to show. */
function chart(id, build, onReady) {
  const element = byId(id);
  if (!element) return;
  charts.set(id, { element, build, onReady, instance: null });
  watcher.observe(element);
}

const watcher = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      watcher.unobserve(entry.target);
      draw(entry.target.id);
    }
  },
  { rootMargin: "400px" },
);

function draw(id) {
  const item = charts.get(id);
  const options = item.build();
  item.element.classList.toggle("empty", options === null);
  if (options === null) {
    if (item.instance) item.instance.dispose();
    item.instance = null;
    item.element.replaceChildren(make("p", "note", "Nothing measured here."));
    return;
  }
  if (options.height) item.element.style.height = `${options.height}px`;
  if (!item.instance) {
    item.element.replaceChildren();
    const pixels = Math.max(2, devicePixelRatio);
    item.instance = mxdiagVendor.initChart(item.element, null, { renderer: "canvas", devicePixelRatio: pixels });
    if (item.onReady) item.onReady(item.instance, item.element);
  } else {
    item.instance.resize();
  }
  delete options.height;
  item.instance.setOption({ ...base(), ...options }, { notMerge: true });
}

/** Draw a chart again if it has been drawn; the rest waits until it is seen. */
function redraw(...ids) {
  for (const id of ids) if (charts.has(id) && charts.get(id).instance !== undefined) drawIfSeen(id);
}

function drawIfSeen(id) {
  const item = charts.get(id);
  if (item.instance || item.element.classList.contains("empty")) draw(id);
}

function drawAll() {
  for (const id of charts.keys()) draw(id);
}

function startCharts() {
  themeListeners.push(() => redraw(...charts.keys()));
  let waiting = 0;
  addEventListener("resize", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(() => {
      for (const { instance } of charts.values()) if (instance) instance.resize();
    });
  });
  let pinned;
  addEventListener("beforeprint", () => {
    pinned = document.documentElement.dataset.theme;
    document.documentElement.dataset.theme = "light";
    drawAll();
  });
  addEventListener("afterprint", () => {
    if (pinned) document.documentElement.dataset.theme = pinned;
    else delete document.documentElement.dataset.theme;
    redraw(...charts.keys());
  });
}

// ---- a common look

const font = '-apple-system, BlinkMacSystemFont, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';

function base() {
  return {
    animation: false,
    textStyle: { fontFamily: font, fontSize: 12, color: colour("ink") },
    aria: { enabled: true, label: { data: { maxCount: 0 } } },
  };
}

function axisLook(extra = {}) {
  return {
    axisLine: { lineStyle: { color: colour("line-strong") } },
    axisTick: { show: false },
    axisLabel: { color: colour("muted"), fontSize: 11, hideOverlap: true, ...(extra.axisLabel || {}) },
    splitLine: { lineStyle: { color: colour("line") } },
    nameTextStyle: { color: colour("muted"), fontSize: 11 },
    nameGap: 26,
    nameLocation: "middle",
    ...Object.fromEntries(Object.entries(extra).filter(([key]) => key !== "axisLabel")),
  };
}

function legendLook(extra = {}) {
  return {
    top: 0,
    left: 0,
    itemWidth: 26,
    itemHeight: 8,
    itemGap: 14,
    inactiveColor: colour("line-strong"),
    textStyle: { color: colour("muted"), fontSize: 11 },
    ...extra,
  };
}

/** A tooltip whose content is built from text nodes: `content(params)` gives [title, [[name, value]…]]. */
function tooltipLook(content, extra = {}) {
  return {
    confine: true,
    transitionDuration: 0,
    backgroundColor: colour("surface"),
    borderColor: colour("line-strong"),
    padding: 0,
    textStyle: { color: colour("ink"), fontSize: 12, fontFamily: font },
    formatter: (params) => {
      const made = content(params);
      return made ? tipBox(...made) : "";
    },
    ...extra,
  };
}

function tipBox(title, pairs, note) {
  const list = make("dl", "", ...pairs.flatMap(([name, value]) => [make("dt", "", name), make("dd", "", value)]));
  return make("div", "chart-tip", make("strong", "", title), list, note ? make("p", "", note) : null);
}

/** One colour for each component, the same everywhere. */
const componentColours = () => ({
  reducible: colour("reducible"),
  recoverable: colour("recoverable"),
  irreducible: colour("irreducible"),
});

/** W, A and G by hue; a second GEMM of the same operand is dashed. */
function cellLook(cell) {
  const hue = { W: colour("operand-w"), A: colour("operand-a"), G: colour("operand-g") }[cell[0]];
  const first = ["W·fprop", "A·fprop", "G·dgrad"].includes(cell);
  return { color: hue, type: first ? "solid" : "dashed" };
}

/** A sequential ramp from surface to full colour; `worse` is the end that gets the ink. */
function ramp(metric) {
  const hue = { reducible: "blue", recoverable: "orange", irreducible: "grey", deadzone_frac: "orange" }[metric] || "heat";
  const steps = [0, 1, 2, 3, 4].map((step) => colour(`${hue}-${step}`));
  const term = termOf(metric);
  return term && term.worse === "low" ? steps.reverse() : steps;
}

/** Black or white ink, whichever reads better on a colour given as #rrggbb. */
function inkOn(hex) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255);
  const light = 0.2126 * r ** 2.2 + 0.7152 * g ** 2.2 + 0.0722 * b ** 2.2;
  return light > 0.36 ? "#14171b" : "#ffffff";
}
