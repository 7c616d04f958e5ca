// Heat maps: depth × role, expert × depth, and role × correction.

/** Groups rows into cells of a map: mean, range, and the worst row to go to. */
function gather(rows, keyOf, metric) {
  const term = termOf(metric);
  const lowIsWorse = term && term.worse === "low";
  const groups = new Map();
  for (const i of rows) {
    const key = keyOf(i);
    if (key === null) continue;
    let group = groups.get(key);
    if (!group) {
      group = { sum: 0, count: 0, low: Infinity, high: -Infinity, worst: i, worstValue: NaN, silent: 0, rows: 0 };
      groups.set(key, group);
    }
    group.rows += 1;
    if (columns.status.at(i) === "not_observed") group.silent += 1;
    const value = measure(metric, i);
    if (!Number.isFinite(value)) continue;
    group.sum += value;
    group.count += 1;
    group.low = Math.min(group.low, value);
    group.high = Math.max(group.high, value);
    const worse = lowIsWorse ? value < group.worstValue : value > group.worstValue;
    if (Number.isNaN(group.worstValue) || worse) {
      group.worst = i;
      group.worstValue = value;
    }
  }
  return groups;
}

function blend(steps, share) {
  const at = Math.min(Math.max(share, 0), 1) * (steps.length - 1);
  const left = Math.min(Math.floor(at), steps.length - 2);
  const mix = at - left;
  const parts = [1, 3, 5].map((k) => {
    const a = parseInt(steps[left].slice(k, k + 2), 16);
    const b = parseInt(steps[left + 1].slice(k, k + 2), 16);
    return Math.round(a + (b - a) * mix).toString(16).padStart(2, "0");
  });
  return `#${parts.join("")}`;
}

/**
 * Options of a heat map.
 * `cells` are {x, y, value, title, pairs, row}; `missing` the same without a value: drawn as crosses.
 */
function heatOptions({ xs, ys, xName, cells: filled, missing, metric, domain, gridLeft, rowHeight = 27, labels, xLabel }) {
  const steps = ramp(metric);
  const values = filled.map((cell) => cell.value);
  let [low, high] = domain || [Math.min(...finite(values)), Math.max(...finite(values))];
  [low, high] = widened(metric, low, high);
  const look = { axisLine: { show: false }, splitLine: { show: false }, splitArea: { show: false } };
  const crowded = xs.length > 40;
  return {
    height: ys.length * rowHeight + (xLabel ? 88 : 80),
    grid: { left: gridLeft || leftFor(ys), right: 12, top: 6, bottom: xLabel ? 74 : 66 },
    xAxis: { type: "category", data: xs, name: xName, ...axisLook({ ...look, nameGap: xLabel ? 40 : 26, axisLabel: { interval: xLabel ? 0 : "auto", ...(xLabel || {}) } }) },
    yAxis: { type: "category", data: ys, inverse: true, ...axisLook({ ...look, axisLabel: { interval: 0, hideOverlap: true } }) },
    visualMap: {
      type: "continuous", seriesIndex: 0, min: low, max: high, dimension: 2,
      orient: "horizontal", left: gridLeft || leftFor(ys), bottom: 0, itemWidth: 10, itemHeight: 160,
      inRange: { color: steps }, text: [endText(metric, high), endText(metric, low)],
      textStyle: { color: colour("muted"), fontSize: 11 }, calculable: false, hoverLink: true,
    },
    tooltip: tooltipLook((params) => [params.data.title, params.data.pairs, params.data.note]),
    series: [
      {
        type: "heatmap",
        progressive: 0,
        label: { show: Boolean(labels), fontSize: 10.5, formatter: (params) => labelText(metric, params.value[2]) },
        itemStyle: { borderColor: colour("surface"), borderWidth: crowded ? 0.5 : 1.5 },
        emphasis: { itemStyle: { borderColor: colour("ink"), borderWidth: 2 } },
        data: filled.map((cell) => ({
          ...cell,
          value: [cell.x, cell.y, cell.value],
          label: { color: inkOn(blend(steps, (cell.value - low) / (high - low))) },
        })),
      },
      {
        type: "scatter",
        symbol: "path://M0,0 L10,10 M10,0 L0,10",
        symbolSize: crowded ? 4 : 7,
        itemStyle: { color: "transparent", borderColor: colour("muted"), borderWidth: 1 },
        data: missing.map((cell) => ({ ...cell, value: [cell.x, cell.y] })),
      },
    ],
  };
}

/** A range no narrower than differences that matter, so that mere noise stays pale. */
function widened(metric, low, high) {
  const least = { dB: 3, share: 0.1, octaves: 0.1, ratio: 0.1 }[unitOf(metric)] || Math.max(1e-9, Math.abs(high) * 0.01);
  if (high - low >= least) return [low, high];
  const term = termOf(metric);
  return term && term.worse === "low" ? [high - least, high] : [low, low + least];
}

function endText(metric, value) {
  return ["share", "dB", "count"].includes(unitOf(metric)) ? shown(metric, value) : String(Number(value.toPrecision(3)));
}

function labelText(metric, value) {
  return unitOf(metric) === "share" ? (100 * value).toFixed(0) : value.toFixed(unitOf(metric) === "dB" ? 1 : 2);
}

function finite(values) {
  const kept = values.filter(Number.isFinite);
  return kept.length ? kept : [0, 1];
}

/** Room for the longest label of the y axis. */
function leftFor(labels) {
  return Math.min(200, 26 + 6.3 * Math.max(4, ...labels.map((label) => label.length)));
}

/** Arrow keys move over the cells of a map, Enter and a click go to the cell's row. */
function navigable(id) {
  return (instance, element) => {
    element.tabIndex = 0;
    const go = (data) => data && data.row !== undefined && goToRow(data.row);
    instance.on("click", (params) => go(params.data));
    let at = null;
    element.addEventListener("keydown", (event) => {
      const series = instance.getOption().series;
      const all = series.flatMap((s, seriesIndex) => s.data.map((data, dataIndex) => ({ seriesIndex, dataIndex, data })));
      if (!all.length) return;
      const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
      if (event.key === "Enter" && at) go(at.data);
      if (!moves[event.key]) return;
      event.preventDefault();
      const [dx, dy] = moves[event.key];
      at = at ? neighbour(all, at, dx, dy) : all[0];
      instance.dispatchAction({ type: "downplay" });
      instance.dispatchAction({ type: "highlight", seriesIndex: at.seriesIndex, dataIndex: at.dataIndex });
      instance.dispatchAction({ type: "showTip", seriesIndex: at.seriesIndex, dataIndex: at.dataIndex });
      element.dataset.at = `${at.data.title}: ${at.data.pairs.map((pair) => pair.join(" ")).join(", ")}`;
      byId("announce").textContent = element.dataset.at;
    });
    element.addEventListener("blur", () => {
      instance.dispatchAction({ type: "downplay" });
      instance.dispatchAction({ type: "hideTip" });
    });
  };
}

/** The nearest cell in a direction, the same one at the edge. */
function neighbour(all, from, dx, dy) {
  const [x, y] = from.data.value;
  let best = from;
  let distance = Infinity;
  for (const item of all) {
    const [u, v] = item.data.value;
    const along = (u - x) * dx + (v - y) * dy;
    const across = Math.abs((u - x) * dy) + Math.abs((v - y) * dx);
    if (along <= 0 || (across > 0 && dx !== 0)) continue;
    if (along + 10 * across < distance) {
      distance = along + 10 * across;
      best = item;
    }
  }
  return best;
}

function cellPairs(metric, group, what) {
  const pairs = [[titleOf(metric), shown(metric, group.sum / group.count)]];
  if (group.rows > 1) {
    pairs.push(["range", `${shown(metric, group.low, false)} to ${shown(metric, group.high)}`]);
    pairs.push([what, `${group.count} of ${group.rows}`]);
  }
  if (group.silent) pairs.push(["not observed", String(group.silent)]);
  return pairs;
}

function splitCells(groups, metric, place, what) {
  const filled = [];
  const missing = [];
  for (const [key, group] of groups) {
    const { x, y, title, more = [] } = place(key, group);
    const note = columns.layer.at(group.worst);
    if (group.count) {
      const pairs = [...cellPairs(metric, group, what), ...more];
      filled.push({ x, y, value: group.sum / group.count, title, pairs, note, row: group.worst });
    } else {
      const why = group.silent ? "not observed" : columns.status.at(group.worst);
      missing.push({ x, y, title, pairs: [[titleOf(metric), why], ...more], note, row: group.worst });
    }
  }
  return [filled, missing];
}

// ---- depth × role

function mapMetrics() {
  const measured = page.mapMetrics.filter((name) => columns[name] && hasValues(name));
  return [...measured, ...[...fixes, ...sweep.map(([k]) => `scale:m${k}`)].map((name) => `mse_ratio:${name}`)];
}

function hasValues(metric) {
  for (let i = 0; i < rowCount; i += 1) if (Number.isFinite(measure(metric, i))) return true;
  return false;
}

function mapOptions() {
  const metric = byId("map-metric").value;
  const rows = select(byId("map-cell").value);
  const width = roles.length;
  const roleAt = columns.role.values.map((role) => roles.indexOf(role));
  const keyOf = (i) => (placeColumn.at(i) === null ? null : placeColumn.at(i) * width + roleAt[columns.role.index[i]]);
  const groups = gather(rows, keyOf, metric);
  const usedRoles = roles.filter((_, y) => [...groups.keys()].some((key) => key % width === y));
  const place = (key) => {
    const role = roles[key % width];
    const x = Math.floor(key / width);
    return { x, y: usedRoles.indexOf(role), title: `layer ${placeLabels[x]} · ${role}` };
  };
  const [filled, missing] = splitCells(groups, metric, place, "experts measured");
  if (!filled.length && !missing.length) return null;
  return heatOptions({
    xs: placeLabels, ys: usedRoles, xName: "depth", cells: filled, missing, metric, labels: placeLabels.length <= 26,
  });
}

/** The operand and GEMM of least SQNR over all layers: the map opens on it. */
function worstCell() {
  const found = cells.map((cell) => [cell, together(rowsOfCell.get(cell))]).filter(([, sums]) => sums);
  found.sort((a, b) => a[1].sqnr_db - b[1].sqnr_db);
  return found.length ? found[0][0] : cells[0];
}

function explain(id, metric) {
  const term = termOf(metric);
  byId(id).replaceChildren(
    `${titleOf(metric)}: ${term ? term.meaning : ""} `,
    term && term.formula ? make("span", "formula", term.formula) : "",
  );
}

function startMap() {
  if (!byId("map")) return;
  fill(byId("map-metric"), mapMetrics().map((name) => [name, titleOf(name)]));
  fill(byId("map-cell"), cells.map((cell) => [cell, cell]));
  byId("map-cell").value = worstCell();
  const update = () => {
    explain("map-lead", byId("map-metric").value);
    redraw("map-chart");
  };
  byId("map-metric").addEventListener("change", update);
  byId("map-cell").addEventListener("change", update);
  explain("map-lead", byId("map-metric").value);
  chart("map-chart", mapOptions, navigable("map-chart"));
}

// ---- expert × depth

function expertOptions() {
  const metric = byId("experts-metric").value;
  const rows = select(byId("experts-cell").value, byId("experts-role").value).filter((i) => columns.expert.at(i) !== null);
  const experts = distinct(rows.map((i) => columns.expert.at(i))).sort((a, b) => a - b);
  const placesUsed = distinct(rows.map((i) => placeColumn.at(i)).filter((place) => place !== null)).sort((a, b) => a - b);
  const column = new Map(experts.map((expert, x) => [expert, x]));
  const line = new Map(placesUsed.map((place, y) => [place, y]));
  const keyOf = (i) => (placeColumn.at(i) === null ? null : placeColumn.at(i) * 65536 + columns.expert.at(i));
  const groups = gather(rows, keyOf, metric);
  const routed = tokensRouted();
  const place = (key) => {
    const expert = key % 65536;
    const at = Math.floor(key / 65536);
    const tokens = routed.get(key);
    return {
      x: column.get(expert), y: line.get(at), title: `layer ${placeLabels[at]} · expert ${expert}`,
      more: metric === "tokens" || tokens === undefined ? [] : [["tokens routed", shown("tokens", tokens)]],
    };
  };
  const [filled, missing] = splitCells(groups, metric, place, "projections measured");
  if (!filled.length && !missing.length) return null;
  const tall = placesUsed.length > 20;
  return heatOptions({
    xs: experts.map(String), ys: placesUsed.map((at) => `layer ${placeLabels[at]}`), xName: "expert", cells: filled, missing, metric,
    rowHeight: tall ? 12 : 27, labels: experts.length <= 26 && metric !== "tokens",
  });
}

/** Tokens that each expert of each layer got, from any activation row. */
function tokensRouted() {
  const routed = new Map();
  for (let i = 0; i < rowCount; i += 1) {
    const expert = columns.expert.at(i);
    const place = placeColumn.at(i);
    const tokens = columns.tokens.at(i);
    if (expert === null || place === null || tokens === null) continue;
    const key = place * 65536 + expert;
    if (!(routed.get(key) >= tokens)) routed.set(key, tokens);
  }
  return routed;
}

function startExperts() {
  if (!byId("experts")) return;
  const counted = columns.tokens.values.some((value) => value !== null);
  const metrics = [...mapMetrics(), ...(counted ? ["tokens"] : [])];
  fill(byId("experts-metric"), metrics.map((name) => [name, titleOf(name)]));
  fill(byId("experts-cell"), cells.map((cell) => [cell, cell]));
  if (counted && cells.includes("A·fprop")) byId("experts-cell").value = "A·fprop";
  fill(byId("experts-role"), roles.filter((role) => role.startsWith("expert.")).map((role) => [role, role.slice(7)]));
  const update = () => {
    explain("experts-lead", byId("experts-metric").value);
    redraw("experts-chart");
  };
  for (const id of ["experts-metric", "experts-cell", "experts-role"]) byId(id).addEventListener("change", update);
  explain("experts-lead", byId("experts-metric").value);
  chart("experts-chart", expertOptions, navigable("experts-chart"));
}

// ---- role × correction

function buysOptions() {
  const cell = byId("corrections-cell").value;
  const names = fixes.filter((name) => select(cell).some((i) => Number.isFinite(measure(`mse_ratio:${name}`, i))));
  if (!names.length) return null;
  const lines = [["all", "all roles"], ...roles.map((role) => [role, role])];
  const filled = [];
  const ys = [];
  for (const [role, label] of lines) {
    const sums = together(select(cell, role), names.map((name) => `mse_ratio:${name}`));
    if (!sums) continue;
    names.forEach((name, x) => {
      const ratio = sums[`mse_ratio:${name}`];
      if (Number.isNaN(ratio)) return;
      const pairs = [
        ["MSE ratio", shown("mse_ratio:", ratio)], ["floor of an ideal scale", shown("mse_ratio:", 1 - sums.reducible)],
        ["SQNR", `${shown("sqnr_db", sums.sqnr_db)} → ${shown("sqnr_db", sums.sqnr_db - 10 * Math.log10(ratio))}`],
        ["cost", costText(name)],
      ];
      filled.push({ x, y: ys.length, value: ratio, title: `${name} · ${label}`, pairs });
    });
    ys.push(label);
  }
  return heatOptions({
    xs: names.map((name) => `${name}\n${bitsLabel(name)}`), ys, xName: "", cells: filled, missing: [],
    metric: "mse_ratio:", domain: [0, Math.max(1, ...filled.map((item) => item.value))], labels: true,
    xLabel: { lineHeight: 15 },
  });
}

function bitsLabel(name) {
  const bits = bitsOf(name);
  return bits === null ? "" : `${bits > 0 ? "+" : ""}${Number(bits.toFixed(2))} bit`;
}

function costText(name) {
  const cost = page.corrections[name] || {};
  const parts = [bitsOf(name) === null ? "not declared" : `${exact(bitsOf(name))} bits`];
  if (cost.gemm_passes) parts.push(`${cost.gemm_passes} more GEMM pass${cost.gemm_passes > 1 ? "es" : ""}`);
  if (cost.transforms) parts.push(`${cost.transforms} rotation${cost.transforms > 1 ? "s" : ""}`);
  return parts.join(", ");
}
