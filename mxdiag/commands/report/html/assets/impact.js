// The section on impact: attribution, gradients along depth, entropy against temperature, rollouts.

const impact = JSON.parse(document.getElementById("impact-data").textContent);
const componentNames = [["scale", "reducible"], ["deadzone", "recoverable"], ["grid", "irreducible"]];

/** The colour of a configuration: a component's own; ink for everything together; others by rank. */
function configLook(config, rank) {
  const own = Object.fromEntries(componentNames.map(([name, colourName]) => [name, colour(colourName)]));
  if (own[config]) return { color: own[config], width: 2.5 };
  if (config === "all") return { color: colour("ink"), width: 2.5 };
  const others = [colour("operand-a"), colour("operand-g"), colour("muted")];
  return { color: others[rank % others.length], type: ["dashed", "dotted"][Math.floor(rank / 3) % 2], width: 1.5 };
}

/** Bars of parts over |total|, so that measures of different units share one axis; hover has the numbers. */
function attributionOptions() {
  const entries = impact.attribution.filter((entry) => Number.isFinite(entry.total) && entry.total !== 0);
  if (!entries.length) return null;
  const colours = componentColours();
  const labels = entries.map((entry) => `${entry.measure} · ${entry.operands} · ${entry.pass}`);
  const share = (entry, name) => (Number.isFinite(entry[name]) ? entry[name] / entry.total : null);
  return {
    height: 60 + 34 * entries.length,
    grid: { left: leftFor(labels), right: 34, top: 6, bottom: 28 },
    xAxis: valueAxis("", { axisLabel: percentLabel }),
    yAxis: { type: "category", inverse: true, data: labels, ...axisLook({ splitLine: { show: false }, axisLabel: { interval: 0 } }) },
    tooltip: axisTip((at) => [
      labels[at],
      [...componentNames.map(([name]) => [name, `${exactShort(entries[at][name])} (${shown("reducible", share(entries[at], name))})`]), ["total", exactShort(entries[at].total)]],
    ]),
    series: componentNames.map(([name, colourName]) => ({
      type: "bar", stack: "parts", name, barMaxWidth: 22, itemStyle: { color: colours[colourName] }, emphasis: { disabled: true },
      data: entries.map((entry) => share(entry, name)),
    })),
  };
}

function exactShort(value) {
  return typeof value === "number" ? String(Number(value.toPrecision(3))) : "n/a";
}

/** What the menu offers along depth: name, field of a point, and how its number becomes the chart's. */
const gradientMeasures = {
  cosine: ["cosine", "cosine"],
  norm_ratio: ["norm ratio", "norm_ratio"],
  log2_norm: ["norm ratio, predicted and measured", "norm_ratio", Math.log2, "log₂ of the norm ratio"],
  snr_db: ["SNR, dB", "snr_db"],
};

function gradientOptions() {
  const operands = byId("gradient-operands").value;
  const choice = byId("gradient-measure").value;
  const [label, field, change = (value) => value, axis = label] = gradientMeasures[choice];
  const entries = impact.backward.filter((entry) => `${entry.pass} ${entry.operands}` === operands && entry.depth.length);
  if (!entries.length) return null;
  const depths = distinct(entries.flatMap((entry) => entry.depth.map((point) => point.depth)));
  const valueAt = (entry, depth) => {
    const point = entry.depth.find((p) => p.depth === depth);
    return point && point[field] !== null ? change(point[field]) : null;
  };
  const expected = choice === "log2_norm" ? depths.map((depth) => impact.predictor.find((p) => p.depth === depth) || null) : null;
  let rank = 0;
  const looks = entries.map(({ config }) => {
    const known = config === "all" || componentNames.some(([component]) => component === config);
    return configLook(config, known ? 0 : rank++);
  });
  const lines = entries.map((entry, k) => line(entry.config, depths.map((depth) => valueAt(entry, depth)), looks[k]));
  const names = [...(expected ? [predictedName] : []), ...entries.map((entry) => entry.config)];
  const tip = (at) => entries.map((entry) => [entry.config, exactShort(valueAt(entry, depths[at]))]);
  return {
    height: 360,
    grid: { ...curveGrid, top: 24 + 20 * legendRows(names, byId("gradient-chart").clientWidth) },
    legend: legendLook({ type: "plain", right: 0, data: names }),
    xAxis: { type: "category", data: depths.map(String), name: "depth", ...axisLook({ splitLine: { show: false }, boundaryGap: false }) },
    yAxis: valueAxis(axis, { scale: true }),
    tooltip: lineTip((at) => [`layer ${depths[at]}`, [...(expected ? [[predictedName, predictedText(expected[at])]] : []), ...tip(at)]]),
    series: expected ? [...predictedSeries(expected), ...lines] : lines,
  };
}

/** Rows that a legend of these names takes: 11 px text is about 6.2 px wide a letter, 45 px go to its sign. */
function legendRows(names, width) {
  let rows = 1;
  let used = 0;
  for (const name of names) {
    const wanted = 45 + 6.2 * name.length;
    if (used && used + wanted > width) [rows, used] = [rows + 1, 0];
    used += wanted;
  }
  return rows;
}

const predictedName = "Σδ ± √(L/12), predicted";

function predictedText(point) {
  return point ? `${exactShort(point.log2_norm_ratio)} ± ${exactShort(point.spread)}` : "n/a";
}

/** The predicted line, in a band of its spread. */
function predictedSeries(points) {
  const band = { type: "line", stack: "band", stackStrategy: "all", symbol: "none", lineStyle: { opacity: 0 }, emphasis: { disabled: true } };
  const at = (value) => points.map((point) => (point && Number.isFinite(point.log2_norm_ratio) ? value(point) : null));
  return [
    { ...band, name: "low", data: at((point) => point.log2_norm_ratio - point.spread) },
    { ...band, name: "high", data: at((point) => 2 * point.spread), areaStyle: { color: colour("shade") } },
    line(predictedName, at((point) => point.log2_norm_ratio), { color: colour("muted"), type: "dotted", symbol: "none" }),
  ];
}

function temperatureOptions() {
  const entries = impact.forward.filter((entry) => Number.isFinite(entry.entropy) && Number.isFinite(entry.t_eff_measured));
  if (!entries.length) return null;
  const points = (name) => entries.filter((entry) => Number.isFinite(entry[name])).map((entry) => ({
    value: [entry[name], entry.entropy], name: entry.config,
    title: `${entry.config} · ${entry.operands}`,
    pairs: [["entropy", exactShort(entry.entropy)], ["T measured", exactShort(entry.t_eff_measured)], ["T predicted", exactShort(entry.t_eff_predicted)]],
  }));
  return {
    grid: curveGrid,
    legend: legendLook(),
    xAxis: { type: "value", scale: true, name: "effective temperature", ...axisLook() },
    yAxis: valueAxis("entropy, nats", { scale: true }),
    tooltip: tooltipLook((params) => [params.data.title, params.data.pairs]),
    series: [
      {
        type: "scatter", name: "T measured", symbolSize: 9, itemStyle: { color: colour("accent") }, data: points("t_eff_measured"),
        markLine: Number.isFinite(impact.reference.entropy) ? reference(impact.reference.entropy, "reference") : undefined,
      },
      { type: "scatter", name: "T predicted", symbolSize: 8, itemStyle: { color: "transparent", borderColor: colour("muted"), borderWidth: 1.5 }, data: points("t_eff_predicted") },
    ],
  };
}

function withDeviation(entry, field) {
  const deviation = entry[`${field}_sd`];
  return exactShort(entry[field]) + (typeof deviation === "number" ? ` ± ${Number(deviation.toPrecision(1))}` : "");
}

function rolloutOptions() {
  const name = byId("rollout-measure").value;
  const [, label] = impact.rolloutMeasures.find(([field]) => field === name);
  const entries = impact.rollout.filter((entry) => Number.isFinite(entry[name]));
  if (!entries.length) return null;
  const labels = entries.map((entry) => [entry.config, entry.operands, entry.mode].filter(Boolean).join(" · "));
  return {
    height: 70 + 24 * entries.length,
    grid: { left: leftFor(labels), right: 56, top: 6, bottom: 44 },
    xAxis: valueAxis(label, { nameGap: 26 }),
    yAxis: { type: "category", inverse: true, data: labels, ...axisLook({ splitLine: { show: false }, axisLabel: { interval: 0 } }) },
    tooltip: axisTip((at) => [labels[at], impact.rolloutMeasures.filter(([field]) => typeof entries[at][field] === "number").map(([field, text]) => [text, withDeviation(entries[at], field)])]),
    series: [{
      type: "bar", barMaxWidth: 16, emphasis: { disabled: true },
      data: entries.map((entry) => ({ value: entry[name], itemStyle: { color: configLook(entry.config, 2).color } })),
      label: { show: true, position: "right", color: colour("muted"), fontSize: 11, formatter: (params) => exactShort(params.value) },
    }],
  };
}

function startImpact() {
  if (!impact || !byId("impact")) return;
  const curves = impact.backward.filter((entry) => entry.depth.length);
  fill(byId("gradient-operands"), distinct(curves.map((entry) => `${entry.pass} ${entry.operands}`)).map((text) => [text, text]));
  const along = Object.keys(gradientMeasures).filter((name) => name !== "log2_norm" || impact.predictor.length);
  fill(byId("gradient-measure"), along.map((name) => [name, gradientMeasures[name][0]]));
  fill(byId("rollout-measure"), impact.rolloutMeasures);
  const parts = [
    ["attribution", impact.attribution.length], ["cosine", curves.length],
    ["entropy", temperatureOptions() !== null], ["rollout", impact.rolloutMeasures.length],
  ];
  for (const [part, there] of parts) byId("impact").querySelector(`[data-part="${part}"]`).hidden = !there;
  const wired = [
    ["gradient-operands", "gradient-chart"],
    ["gradient-measure", "gradient-chart"], ["rollout-measure", "rollout-chart"],
  ];
  for (const [control, id] of wired) byId(control).addEventListener("change", () => redraw(id));
  if (parts[0][1]) chart("attribution-chart", attributionOptions);
  if (parts[1][1]) chart("gradient-chart", gradientOptions);
  if (parts[2][1]) chart("temperature-chart", temperatureOptions);
  if (parts[3][1]) chart("rollout-chart", rolloutOptions);
}
