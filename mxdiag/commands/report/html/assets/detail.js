// One row in depth, in a dialog.

const detailGroups = [
  ["Error", ["sqnr_db", "rel_mse", "gain", "sqnr_db_token", "top_token_share", "recoverable_token"]],
  ["Parts of ‖e‖²", ["reducible", "recoverable", "irreducible", "scale_energy", "deadzone_energy", "grid_energy", "cross_scale_grid", "cross_scale_deadzone", "cos_scale_grid", "closure_residual"]],
  ["Elements", ["deadzone_frac", "underflow_frac", "zero_frac", "saturated_frac", "nonfinite", "amax", "rms"]],
  ["Scale", ["delta_mean", "delta_std"]],
  ["Tensor", ["role", "expert", "status", "block_axis", "shape", "numel", "dtype", "calls", "tokens"]],
];

const svgSpace = "http://www.w3.org/2000/svg";

function svg(tag, attributes, ...children) {
  const element = document.createElementNS(svgSpace, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** The three shares of a row as one bar; a negative reducible share stands left of zero. */
function shareBar(row) {
  const values = ["reducible", "recoverable", "irreducible"].map((name) => [name, row[name]]);
  if (values.some(([, value]) => value === null)) return null;
  const low = Math.min(0, row.reducible);
  const high = Math.max(1, row.recoverable + row.irreducible);
  const at = (value) => (100 * (value - low)) / (high - low);
  let start = 0;
  const bars = values.map(([name, value]) => {
    const from = value < 0 ? value : start;
    if (value > 0) start += value;
    return svg("rect", { class: name, x: `${at(from)}%`, y: 0, height: 18, width: `${at(from + Math.abs(value)) - at(from)}%` });
  });
  return svg("svg", { class: "share", width: "100%", height: 18, "aria-hidden": "true" }, ...bars);
}

const histograms = encoded.hist ? new Uint8Array(bytesOf(encoded.hist)) : null;

function deltaBars(i) {
  if (!histograms) return null;
  const bins = histograms.subarray(32 * i, 32 * i + 32);
  if (!bins.some(Boolean)) return null;
  const bars = Array.from(bins, (count, b) =>
    svg("rect", { class: "reducible", x: b * 10, y: 60 - (60 * count) / 255, width: 9, height: (60 * count) / 255 }),
  );
  const drawn = svg("svg", { class: "bins", viewBox: "0 0 320 60", preserveAspectRatio: "none", "aria-hidden": "true" }, ...bars);
  return make("figure", "", make("figcaption", "", `δ of its blocks, ${page.deltaLow} to ${page.deltaLow + 1} octaves`), drawn);
}

function termLabel(metric) {
  const label = make("dt", "", titleOf(metric));
  if (termOf(metric)) label.dataset.term = metric.startsWith("mse_ratio:") ? "mse_ratio" : metric;
  return label;
}

function detailList(row, [title, names]) {
  const pairs = names.flatMap((name) => {
    const value = row[name];
    if (value === null || value === undefined) return [];
    const text = typeof value === "number" && name !== "expert" ? shown(name, value) : String(value);
    return [termLabel(name), make("dd", "", text)];
  });
  return pairs.length ? make("section", "", make("h3", "", title), make("dl", "", ...pairs)) : null;
}

function correctionTable(row) {
  const lines = [...fixes, ...sweep.map(([k]) => `scale:m${k}`)]
    .filter((name) => row[`mse_ratio:${name}`] !== null && row[`mse_ratio:${name}`] !== undefined)
    .map((name) => {
      const ratio = row[`mse_ratio:${name}`];
      const after = row.sqnr_db === null ? null : row.sqnr_db - 10 * Math.log10(ratio);
      const numbers = [shown("mse_ratio:", ratio), shown("sqnr_db", after), costText(name)].map((text) => make("td", "num", text));
      return make("tr", name === row.recommended ? "chosen" : "", make("td", "", name), ...numbers);
    });
  if (!lines.length) return null;
  const heads = ["Correction", "MSE ratio", "SQNR after", "Cost"].map((text, k) => make("th", k ? "num" : "", text));
  const table = make("table", "plain", make("thead", "", make("tr", "", ...heads)), make("tbody", "", ...lines));
  return make("section", "whole", make("h3", "", "Corrections, measured on this tensor"), table);
}

function openDetail(i) {
  const row = new Row(i);
  const dialog = byId("detail");
  const close = make("button", "quiet", "Close");
  close.type = "button";
  close.addEventListener("click", () => dialog.close());
  const title = make("h2", "name", row.layer);
  title.id = "detail-title";
  const lists = detailGroups.map((group) => detailList(row, group));
  dialog.replaceChildren(
    make("header", "", title, close),
    make("p", "measure", `${row.operand}·${row.gemm}`),
    ...[row.reason ? make("p", "", row.reason) : null, shareBar(row)].filter(Boolean),
    make("div", "lists", ...[...lists, deltaBars(i), correctionTable(row)].filter(Boolean)),
  );
  dialog.showModal();
  dialog.scrollTop = 0;
}

function startDetail() {
  byId("detail").addEventListener("click", (event) => {
    if (event.target === byId("detail")) byId("detail").close();
  });
}
