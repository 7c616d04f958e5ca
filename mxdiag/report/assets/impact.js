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
  const labels = entries.map((entry) => `${entry.measure.replaceAll("_", " ")} · ${entry.operands} · ${entry.pass}`);
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

function gradientOptions() {
  const operands = byId("gradient-operands").value;
  const name = byId("gradient-measure").value;
  const entries = impact.backward.filter((entry) => `${entry.pass} ${entry.operands}` === operands && entry.depth.length);
  if (!entries.length) return null;
  const depths = distinct(entries.flatMap((entry) => entry.depth.map((point) => point.depth)));
  const valueAt = (entry, depth) => {
    const point = entry.depth.find((p) => p.depth === depth);
    return point ? point[name] : null;
  };
  let rank = 0;
  const looks = entries.map(({ config }) => {
    const known = config === "all" || componentNames.some(([component]) => component === config);
    return configLook(config, known ? 0 : rank++);
  });
  return {
    height: 360,
    grid: { ...curveGrid, top: 64 },
    legend: legendLook({ type: "plain", right: 0 }),
    xAxis: { type: "category", data: depths.map(String), name: "depth", ...axisLook({ splitLine: { show: false }, boundaryGap: false }) },
    yAxis: valueAxis(name.replaceAll("_", " "), { scale: true }),
    tooltip: lineTip((at) => [`layer ${depths[at]}`, entries.map((entry) => [entry.config, exactShort(valueAt(entry, depths[at]))])]),
    series: entries.map((entry, k) => line(entry.config, depths.map((depth) => valueAt(entry, depth)), looks[k])),
  };
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

function rolloutMeasures() {
  const names = new Set();
  for (const entry of impact.rollout) {
    for (const [name, value] of Object.entries(entry)) if (typeof value === "number" && !name.endsWith("_sd")) names.add(name);
  }
  return [...names];
}

function rolloutOptions() {
  const name = byId("rollout-measure").value;
  const entries = impact.rollout.filter((entry) => Number.isFinite(entry[name]));
  if (!entries.length) return null;
  const labels = entries.map((entry) => [entry.config, entry.operands, entry.mode].filter(Boolean).join(" · "));
  return {
    height: 70 + 24 * entries.length,
    grid: { left: leftFor(labels), right: 56, top: 6, bottom: 44 },
    xAxis: valueAxis(name.replaceAll("_", " "), { nameGap: 26 }),
    yAxis: { type: "category", inverse: true, data: labels, ...axisLook({ splitLine: { show: false }, axisLabel: { interval: 0 } }) },
    tooltip: axisTip((at) => [labels[at], Object.entries(entries[at]).filter(([, v]) => typeof v === "number").map(([k, v]) => [k.replaceAll("_", " "), exactShort(v)])]),
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
  fill(byId("gradient-measure"), [["cosine", "cosine"], ["norm_ratio", "norm ratio"], ["snr_db", "SNR, dB"]]);
  fill(byId("rollout-measure"), rolloutMeasures().map((name) => [name, name.replaceAll("_", " ")]));
  const parts = [
    ["attribution", impact.attribution.length], ["cosine", curves.length],
    ["entropy", temperatureOptions() !== null], ["rollout", impact.rollout.length && rolloutMeasures().length],
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
