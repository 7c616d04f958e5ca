// Curves and bars: shares and SQNR along depth, scale bias, the corrections' gain, the paper's figures.

const depthAxis = (extra = {}) => ({
  type: "category", data: placeLabels, name: "depth", ...axisLook({ splitLine: { show: false }, ...extra }),
});
const valueAxis = (name, extra = {}) => ({ type: "value", name, ...axisLook({ nameGap: 38, ...extra }) });
const curveGrid = { left: 56, right: 16, top: 34, bottom: 44 };
const percentLabel = { formatter: (value) => `${Math.round(100 * value)} %` };
const shareNames = ["reducible", "recoverable", "irreducible"];

/** The stacked bars of the three shares, of an array of `together` results or nulls. */
function shareSeries(sums) {
  const colours = componentColours();
  return shareNames.map((name) => ({
    type: "bar", name, stack: "shares", barCategoryGap: sums.length > 40 ? "8%" : "22%", barMaxWidth: 40,
    itemStyle: { color: colours[name] }, emphasis: { disabled: true },
    data: sums.map((sum) => (sum ? sum[name] : null)),
  }));
}

function sharePairs(sum) {
  return [
    ...shareNames.map((name) => [titleOf(name), shown(name, sum[name])]),
    ["SQNR", shown("sqnr_db", sum.sqnr_db)], ["rows", String(sum.rows)],
  ];
}

const axisTip = (content) => tooltipLook((params) => content(params[0].dataIndex, params), { trigger: "axis", axisPointer: { type: "shadow", shadowStyle: { color: colour("shade") } } });
const lineTip = (content) => tooltipLook((params) => content(params[0].dataIndex, params), { trigger: "axis", axisPointer: { lineStyle: { color: colour("line-strong") } } });

function sharesOptions() {
  const groups = byPlace(select(byId("depth-cell").value, byId("depth-role").value));
  const sums = groups.map((rows) => together(rows));
  if (!sums.some(Boolean)) return null;
  return {
    grid: { ...curveGrid, top: 10 },
    xAxis: depthAxis(),
    yAxis: valueAxis("", { min: Math.min(0, ...sums.map((s) => (s ? s.reducible : 0))), max: (range) => Math.max(1, range.max), axisLabel: percentLabel }),
    tooltip: axisTip((at) => sums[at] && [`layer ${placeLabels[at]}`, sharePairs(sums[at])]),
    series: shareSeries(sums),
  };
}

function sqnrOptions() {
  const role = byId("depth-role").value;
  const lines = cells.map((cell) => [cell, byPlace(select(cell, role)).map((rows) => together(rows))]);
  if (!lines.some(([, sums]) => sums.some(Boolean))) return null;
  return {
    grid: { ...curveGrid, top: lines.length > 4 ? 54 : 34 },
    legend: legendLook(),
    xAxis: depthAxis({ boundaryGap: false }),
    yAxis: valueAxis("SQNR, dB", { scale: true }),
    tooltip: lineTip((at) => [
      `layer ${placeLabels[at]}`, lines.filter(([, sums]) => sums[at]).map(([cell, sums]) => [cell, shown("sqnr_db", sums[at].sqnr_db)]),
    ]),
    series: lines.map(([cell, sums]) => line(cell, sums.map((sum) => (sum ? sum.sqnr_db : null)), cellLook(cell))),
  };
}

function line(name, data, { color, type = "solid", width = 2, symbol = "circle" }) {
  const few = data.length <= 40;
  return {
    type: "line", name, data, symbol: few ? symbol : "none", symbolSize: 5, connectNulls: false,
    color, lineStyle: { color, type, width }, itemStyle: { color }, emphasis: { disabled: true },
  };
}

// ---- scale bias

function deltaOptions() {
  const [operand, gemm] = byId("scale-cell").value.split("·");
  const role = byId("scale-role").value;
  const bins = new Array(32).fill(0);
  for (const group of encoded.delta) {
    if (group.operand !== operand || group.gemm !== gemm || (role !== "all" && group.role !== role)) continue;
    group.bins.forEach((count, b) => { bins[b] += count; });
  }
  const blocks = bins.reduce((sum, count) => sum + count, 0);
  if (!blocks) return null;
  const density = bins.map((count) => (32 * count) / blocks);
  const low = page.deltaLow;
  return {
    grid: curveGrid,
    xAxis: { type: "category", data: bins.map((_, b) => (low + (b + 0.5) / 32).toFixed(2)), name: "δ, octaves", ...axisLook({ splitLine: { show: false } }) },
    yAxis: valueAxis("density", { min: 0 }),
    tooltip: axisTip((b) => [
      `δ from ${(low + b / 32).toFixed(3)} to ${(low + (b + 1) / 32).toFixed(3)}`,
      [["density", density[b].toFixed(3)], ["blocks", grouped.format(bins[b])]],
    ]),
    series: [{
      type: "bar", barCategoryGap: "8%", data: density, itemStyle: { color: colour("reducible") }, emphasis: { disabled: true },
      markLine: reference(1, "uniform"),
    }],
  };
}

function reference(value, label, axis = "yAxis") {
  return {
    silent: true, symbol: "none", data: [{ [axis]: value }], lineStyle: { color: colour("muted"), type: "dashed", width: 1 },
    label: { formatter: label, color: colour("muted"), fontSize: 11, position: "insideEndTop", textBorderColor: colour("surface"), textBorderWidth: 3 },
  };
}

/** Mean over a place's rows of δ's variance and mean, in the order in which a signal meets the layers. */
function deltaByPlace(cell, role) {
  const groups = byPlace(select(cell, role)).map((rows) => {
    const kept = rows.filter((i) => Number.isFinite(measure("delta_std", i)));
    const mean = (of) => kept.reduce((sum, i) => sum + of(i), 0) / kept.length;
    return kept.length ? { variance: mean((i) => measure("delta_std", i) ** 2), mean: mean((i) => measure("delta_mean", i)) } : null;
  }).filter(Boolean);
  return cell.startsWith("G") ? groups.reverse() : groups;
}

function running(values) {
  let sum = 0;
  return values.map((value) => (sum += value));
}

function sigmaOptions() {
  const role = byId("scale-role").value;
  const lines = cells.map((cell) => [cell, running(deltaByPlace(cell, role).map((d) => d.variance)).map(Math.sqrt)]).filter(([, data]) => data.length);
  if (!lines.length) return null;
  const longest = Math.max(...lines.map(([, data]) => data.length));
  const predicted = Array.from({ length: longest }, (_, i) => Math.sqrt((i + 1) / 12));
  return {
    grid: { ...curveGrid, top: lines.length > 3 ? 54 : 34 },
    legend: legendLook({ data: ["√(L/12), predicted", ...lines.map(([cell]) => cell)] }),
    xAxis: { type: "category", data: predicted.map((_, i) => i + 1), name: "layers L passed (G: from the last)", ...axisLook({ splitLine: { show: false }, boundaryGap: false }) },
    yAxis: valueAxis("σ(Σδ), octaves", { min: 0 }),
    tooltip: lineTip((i) => [`${i + 1} layers`, [["√(L/12)", predicted[i].toFixed(3)], ...lines.filter(([, data]) => i < data.length).map(([cell, data]) => [cell, data[i].toFixed(3)])]]),
    series: [
      ...lines.map(([cell, data]) => line(cell, data, cellLook(cell))),
      line("√(L/12), predicted", predicted, { color: colour("muted"), type: "dotted", width: 2, symbol: "none" }),
    ],
  };
}

function sumOptions() {
  const cell = byId("paper-cell").value;
  const found = deltaByPlace(cell, "all");
  if (!found.length) return null;
  const measured = running(found.map((d) => d.mean));
  const middle = measured.map((_, i) => (i + 1) / 2);
  const spread = measured.map((_, i) => Math.sqrt((i + 1) / 12));
  const muted = { color: colour("muted"), type: "dotted", symbol: "none" };
  const band = { type: "line", stack: "band", symbol: "none", lineStyle: { opacity: 0 }, emphasis: { disabled: true }, tooltip: { show: false } };
  return {
    grid: curveGrid,
    legend: legendLook({ data: ["measured Σδ", "L/2 ± √(L/12)"] }),
    xAxis: { type: "category", data: measured.map((_, i) => i + 1), name: "layers L", ...axisLook({ splitLine: { show: false }, boundaryGap: false }) },
    yAxis: valueAxis("Σδ, octaves"),
    tooltip: lineTip((i) => [`${i + 1} layers`, [["measured", measured[i].toFixed(3)], ["expected", `${middle[i].toFixed(1)} ± ${spread[i].toFixed(2)}`]]]),
    series: [
      { ...band, name: "low", data: middle.map((m, i) => m - spread[i]) },
      { ...band, name: "high", data: spread.map((s) => 2 * s), areaStyle: { color: colour("shade") } },
      line("L/2 ± √(L/12)", middle, muted),
      line("measured Σδ", measured, { color: colour("reducible") }),
    ],
  };
}

// ---- corrections: gain against cost

function costOptions() {
  const cell = byId("corrections-cell").value;
  const ratios = fixes.map((name) => `mse_ratio:${name}`);
  const all = together(select(cell), ratios);
  if (!all) return null;
  const used = fixes.filter((name) => bitsOf(name) !== null && Number.isFinite(all[`mse_ratio:${name}`]));
  const costs = distinct(used.map(bitsOf)).sort((a, b) => a - b);
  if (!costs.length) return null;
  const gain = (ratio) => -10 * Math.log10(ratio);
  const point = (name, sums, label) => ({
    value: [costs.indexOf(bitsOf(name)), gain(sums[`mse_ratio:${name}`])], name,
    title: `${name} · ${label}`, pairs: [["gain", shown("sqnr_db", gain(sums[`mse_ratio:${name}`]))], ["cost", costText(name)]],
  });
  const single = roles.flatMap((role) => {
    const sums = together(select(cell, role), ratios);
    return sums ? used.filter((name) => Number.isFinite(sums[`mse_ratio:${name}`])).map((name) => point(name, sums, role)) : [];
  });
  const limit = all.reducible < 1 ? reference(gain(1 - all.reducible), "ideal scale") : undefined;
  return {
    grid: { ...curveGrid, top: 16, right: 24 },
    xAxis: { type: "category", data: costs.map((bits) => exact(bits)), name: "extra bits per element (steps not to scale)", ...axisLook({ splitLine: { show: false } }) },
    yAxis: valueAxis("gain in SQNR, dB"),
    tooltip: tooltipLook((params) => [params.data.title, params.data.pairs]),
    series: [
      { type: "scatter", z: 3, data: single, symbolSize: 4, itemStyle: { color: colour("line-strong") } },
      {
        type: "scatter", data: used.map((name) => point(name, all, "all roles")), symbolSize: 11, itemStyle: { color: colour("accent") },
        label: { show: true, position: "top", formatter: "{b}", color: colour("ink"), fontSize: 11, textBorderColor: colour("surface"), textBorderWidth: 3 }, labelLayout: { hideOverlap: false, moveOverlap: "shiftY" }, markLine: limit,
      },
    ],
  };
}

// ---- the paper's figures

function cosineOptions() {
  const rows = select(byId("paper-cell").value);
  const bins = 50;
  const counts = { "scale · grid": new Array(bins).fill(0), "scale · deadzone": new Array(bins).fill(0), "deadzone · grid": new Array(bins).fill(0) };
  const add = (name, value) => {
    if (!Number.isFinite(value)) return;
    counts[name][Math.min(bins - 1, Math.max(0, Math.floor(((value + 1) / 2) * bins)))] += 1;
  };
  for (const i of rows) {
    add("scale · grid", measure("cos_scale_grid", i));
    const norms = Math.sqrt(measure("scale_energy", i) * measure("deadzone_energy", i));
    add("scale · deadzone", norms > 0 ? measure("cross_scale_deadzone", i) / 2 / norms : NaN);
    // Deadzone and grid error never share an element, so their cosine is 0 by definition.
    if (measure("deadzone_energy", i) > 0 && measure("grid_energy", i) > 0) add("deadzone · grid", 0);
  }
  if (!Object.values(counts).some((list) => list.some(Boolean))) return null;
  const hues = [colour("reducible"), colour("recoverable"), colour("irreducible")];
  const edge = (b) => ((2 * b) / bins - 1).toFixed(2);
  return {
    grid: curveGrid,
    legend: legendLook(),
    xAxis: { type: "category", data: Array.from({ length: bins }, (_, b) => ((2 * (b + 0.5)) / bins - 1).toFixed(2)), name: "cosine", ...axisLook({ splitLine: { show: false } }) },
    yAxis: valueAxis("layers", { min: 0, minInterval: 1 }),
    tooltip: axisTip((b) => [`cosine from ${edge(b)} to ${edge(b + 1)}`, Object.entries(counts).map(([name, list]) => [name, String(list[b])])]),
    series: Object.entries(counts).map(([name, data], k) => ({
      type: "bar", name, data, barGap: "0%", barCategoryGap: "0%", itemStyle: { color: hues[k] }, emphasis: { disabled: true },
    })),
  };
}

function typesOptions() {
  const cell = byId("paper-cell").value;
  const found = roles.map((role) => [role, together(select(cell, role))]).filter(([, sums]) => sums);
  if (!found.length) return null;
  return {
    grid: { left: leftFor(found.map(([role]) => role)), right: 20, top: 8, bottom: 30 },
    xAxis: valueAxis("", { min: Math.min(0, ...found.map(([, s]) => s.reducible)), max: (range) => Math.max(1, range.max), axisLabel: percentLabel }),
    yAxis: { type: "category", inverse: true, data: found.map(([role]) => role), ...axisLook({ splitLine: { show: false } }) },
    tooltip: axisTip((at) => [found[at][0], sharePairs(found[at][1])]),
    series: shareSeries(found.map(([, sums]) => sums)),
  };
}

function sweepOptions() {
  const names = sweep.map(([, name]) => name);
  const lines = cells.map((cell) => [cell, together(select(cell), names)]).filter(([, sums]) => sums);
  if (!lines.length) return null;
  return {
    grid: { ...curveGrid, top: lines.length > 4 ? 54 : 34 },
    legend: legendLook({ data: lines.map(([cell]) => cell) }),
    xAxis: { type: "category", data: sweep.map(([k]) => String(k)), name: "mantissa bits of the scale", ...axisLook({ splitLine: { show: false }, boundaryGap: false }) },
    yAxis: valueAxis("MSE ratio", { scale: true }),
    tooltip: lineTip((k) => [`${sweep[k][0]} mantissa bits`, lines.flatMap(([cell, sums]) => [[cell, shown(names[k], sums[names[k]])], [`${cell} floor`, shown(names[k], 1 - sums.reducible)]])]),
    series: lines.map(([cell, sums]) => ({
      ...line(cell, names.map((name) => sums[name]), cellLook(cell)),
      markLine: {
        ...reference(1 - sums.reducible, ""), label: { show: false },
        lineStyle: { color: cellLook(cell).color, type: [2, 4], width: 1 },
      },
    })),
  };
}

// ---- wiring

function startCurves() {
  const roleOptions = [["all", "all roles"], ...roles.map((role) => [role, role])];
  const groups = [
    ["depth", ["shares-chart", "sqnr-chart"]], ["scale", ["delta-chart", "sigma-chart"]],
    ["corrections", ["buys-chart", "cost-chart"]], ["paper", ["cosine-chart", "types-chart", "sum-chart"]],
  ];
  for (const [name, ids] of groups) {
    if (byId(`${name}-cell`)) fill(byId(`${name}-cell`), cells.map((cell) => [cell, cell]));
    if (byId(`${name}-role`)) fill(byId(`${name}-role`), roleOptions);
    for (const id of [`${name}-cell`, `${name}-role`]) if (byId(id)) byId(id).addEventListener("change", () => redraw(...ids));
  }
  chart("shares-chart", sharesOptions);
  chart("sqnr-chart", sqnrOptions);
  chart("delta-chart", deltaOptions);
  chart("sigma-chart", sigmaOptions);
  chart("buys-chart", buysOptions, navigable("buys-chart"));
  chart("cost-chart", costOptions);
  chart("cosine-chart", cosineOptions);
  chart("types-chart", typesOptions);
  chart("sweep-chart", sweepOptions);
  chart("sum-chart", sumOptions);
}
