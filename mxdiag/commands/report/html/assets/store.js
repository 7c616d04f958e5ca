// The rows: columns decoded from base64, row objects that read them lazily, and sums over rows.

const encoded = JSON.parse(document.getElementById("rows-data").textContent);

function bytesOf(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i += 1) bytes[i] = binary.charCodeAt(i);
  return bytes.buffer;
}

const indexArrays = { 1: Uint8Array, 2: Uint16Array, 4: Uint32Array };

function namesOf(column) {
  const names = [];
  let before = "";
  column.rest.forEach((rest, i) => {
    before = before.slice(0, column.shared[i]) + rest;
    names.push(before);
  });
  return names;
}

/** One column as {at(i), numbers?, values?, index?}: `at` gives a value or null. */
function decodeColumn(column) {
  if (column.kind === "same") return decodeColumn(encoded.columns[column.as]);
  if (column.kind === "constant") {
    const value = column.value;
    const numbers = new Float32Array(encoded.count).fill(value === null ? NaN : value);
    return { at: () => value, numbers };
  }
  const buffer = bytesOf(column.data);
  if (column.kind === "float") {
    const numbers = column.bytes === 8 ? new Float64Array(buffer) : new Float32Array(buffer);
    return { at: (i) => (Number.isNaN(numbers[i]) ? null : numbers[i]), numbers };
  }
  const index = new indexArrays[column.bytes](buffer);
  const values = column.kind === "names" ? namesOf(column) : column.values;
  return { at: (i) => values[index[i]], values, index };
}

const columns = {};
for (const [name, column] of Object.entries(encoded.columns)) columns[name] = decodeColumn(column);
const placeColumn = decodeColumn(encoded.place);
const rowCount = encoded.count;

/** A metric's number for a row, NaN where it is null. */
function measure(metric, i) {
  const column = columns[metric];
  if (!column) return NaN;
  if (column.numbers) return column.numbers[i];
  const value = column.at(i);
  return value === null ? NaN : value;
}

/** A row as the table sees it: every column is a getter, so 60,000 of them cost next to nothing. */
class Row {
  constructor(id) {
    this.id = id;
  }
}
for (const [name, column] of Object.entries(columns)) {
  Object.defineProperty(Row.prototype, name, {
    enumerable: true,
    get() {
      return column.at(this.id);
    },
    set() {
      // A cell of the table writes the value it read back to its row; rows only read.
    },
  });
}

/** Names of places along depth; the stack is named only where there are several. */
const severalStacks = new Set(encoded.places.map((place) => place.stack)).size > 1;
const placeLabels = encoded.places.map((place) =>
  severalStacks ? `${place.stack.replace(/^model\./, "")} ${place.depth}` : String(place.depth),
);

// ---- operand and GEMM pairs: "W·fprop", ...

const cellOrder = ["W·fprop", "A·fprop", "G·dgrad", "W·dgrad", "A·wgrad", "G·wgrad"];
const cellOf = (() => {
  const operand = columns.operand;
  const gemm = columns.gemm;
  const table = operand.values.map((o) => gemm.values.map((g) => `${o}·${g}`));
  return (i) => table[operand.index[i]][gemm.index[i]];
})();

function distinct(values) {
  return [...new Set(values)];
}

const rowCells = Array.from({ length: rowCount }, (_, i) => cellOf(i));
const cells = distinct(rowCells).sort((a, b) => cellOrder.indexOf(a) - cellOrder.indexOf(b));
const rowsOfCell = new Map(cells.map((cell) => [cell, []]));
rowCells.forEach((cell, i) => rowsOfCell.get(cell).push(i));

const roleOrder = [
  "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj",
];
/** Roles in the order of a transformer block, others after them as they come. */
const roles = columns.role.values
  .filter((role) => role !== null)
  .map((role, i) => [role, i])
  .sort(([a, i], [b, j]) => rankOf(a) - rankOf(b) || i - j)
  .map(([role]) => role);

function rankOf(role) {
  const known = roleOrder.indexOf(role.split(".").pop());
  const base = known < 0 ? roleOrder.length : known;
  return role.startsWith("expert.") ? 100 + base : base;
}

const corrections = encoded.measures.filter((name) => name.startsWith("mse_ratio:")).map((name) => name.slice(10));

function bitsOf(correction) {
  const cost = page.corrections[correction];
  return cost && typeof cost.bits === "number" ? cost.bits : null;
}

/** Corrections without the scale sweep, cheapest first. */
const fixes = corrections
  .filter((name) => !/^scale:m\d+$/.test(name))
  .sort((a, b) => (bitsOf(a) ?? 99) - (bitsOf(b) ?? 99));
/** The scale sweep as [mantissa bits, column name]. */
const sweep = corrections
  .filter((name) => /^scale:m\d+$/.test(name))
  .map((name) => [Number(name.slice(7)), `mse_ratio:${name}`])
  .sort((a, b) => a[0] - b[0]);

// ---- sums over rows. Energies are relative to one tensor's own numbers: ‖x‖² = numel rms².

function signalOf(i) {
  const rms = measure("rms", i);
  return columns.numel.at(i) * rms * rms;
}

/** The energy-weighted shares, SQNR and correction ratios of a set of rows; null if none is defined. */
function together(rows, ratios = []) {
  let signal = 0;
  let error = 0;
  let used = 0;
  const sums = { reducible: 0, recoverable: 0, irreducible: 0 };
  const after = Object.fromEntries(ratios.map((name) => [name, [0, 0]]));
  for (const i of rows) {
    const x2 = signalOf(i);
    const e2 = x2 * measure("rel_mse", i);
    if (!Number.isFinite(e2)) continue;
    signal += x2;
    used += 1;
    if (e2 === 0) continue;
    error += e2;
    for (const name of Object.keys(sums)) sums[name] += e2 * measure(name, i);
    for (const name of ratios) {
      const ratio = measure(name, i);
      if (Number.isNaN(ratio)) continue;
      after[name][0] += e2 * ratio;
      after[name][1] += e2;
    }
  }
  if (!used || error === 0) return null;
  const result = { rows: used, sqnr_db: 10 * Math.log10(signal / error) };
  for (const name of Object.keys(sums)) result[name] = sums[name] / error;
  for (const name of ratios) result[name] = after[name][1] ? after[name][0] / after[name][1] : NaN;
  return result;
}

/** Rows of a cell, and of a role unless it is "all". */
function select(cell, role = "all") {
  const rows = rowsOfCell.get(cell) || [];
  if (role === "all") return rows;
  const wanted = columns.role.values.indexOf(role);
  return rows.filter((i) => columns.role.index[i] === wanted);
}

/** Rows by place along depth: an array of arrays, in the order of the places. */
function byPlace(rows) {
  const groups = encoded.places.map(() => []);
  for (const i of rows) {
    const place = placeColumn.at(i);
    if (place !== null) groups[place].push(i);
  }
  return groups;
}
