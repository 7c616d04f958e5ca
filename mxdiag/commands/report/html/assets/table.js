// The full table: sort, filter, columns, copy and export, keyboard, and going to a row.

// The vertical buffer is more than half of the table's 70vh: a row that is scrolled to the middle then has
// its neighbours drawn.

/** Above this many rows the table shows pages; every row stays in it. */
const pagedAbove = 60000;
const pageSize = 20000;
let rowsTable = null;
let current = null;

const filterState = { words: [], cell: "all", role: "all", status: "all", waiting: 0 };

/** Which values of a dictionary column hold each of the words, one lookup per distinct value. */
function matchesOf(name, word) {
  const column = columns[name];
  return column && column.values ? column.values.map((value) => value !== null && value.toLowerCase().includes(word)) : [];
}

/** A test of row numbers for the present filters, or null if there are none. */
function filterTest() {
  const { words, cell, role, status } = filterState;
  if (!words.length && cell === "all" && role === "all" && status === "all") return null;
  const searched = ["layer", "role", "recommended", "reason"].filter((name) => columns[name] && columns[name].index);
  const found = words.map((word) => searched.map((name) => [columns[name].index, matchesOf(name, word)]));
  return (row) => {
    const i = row.id;
    if (cell !== "all" && rowCells[i] !== cell) return false;
    if (role !== "all" && columns.role.at(i) !== role) return false;
    if (status !== "all" && columns.status.at(i) !== status) return false;
    return found.every((places) => places.some(([index, hits]) => hits[index[i]]));
  };
}

function applyFilters() {
  const test = filterTest();
  if (test) rowsTable.setFilter(test);
  else rowsTable.clearFilter();
}

/** Numbers in order, texts by their characters, nulls last whichever way it is sorted. */
function compare(a, b, aRow, bRow, column, direction) {
  if (a === null || b === null) {
    const sign = direction === "asc" ? 1 : -1;
    return a === b ? 0 : a === null ? sign : -sign;
  }
  if (typeof a === "number") return a - b;
  return a < b ? -1 : a > b ? 1 : 0;
}

function cellFormatter(name) {
  const numeric = encoded.measures.includes(name) || ["numel", "calls", "tokens"].includes(name);
  return (cell) => {
    const value = cell.getValue();
    if (value === null || value === undefined) return make("span", "absent", "–");
    if (numeric) return document.createTextNode(shown(name, value, false));
    return document.createTextNode(String(value));
  };
}

function headText(name) {
  const unit = unitOf(name);
  const suffix = unit === "share" ? ", %" : unit === "dB" ? ", dB" : "";
  const title = name.startsWith("mse_ratio:") ? `MSE ${name.slice(10)}` : titleOf(name);
  return title + suffix;
}

/** Columns shown at first; the table holds only what is shown, which keeps its rows light. */
const chosen = new Set([
  "layer", "operand", "gemm", "sqnr_db", "reducible", "recoverable", "irreducible", "deadzone_frac", "delta_mean",
  ...fixes.slice(0, 3).map((name) => `mse_ratio:${name}`),
  ...(columns.recommended.values && columns.recommended.values.some(Boolean) ? ["recommended"] : []),
  ...(columns.status.values.some((value) => value !== "ok") ? ["status"] : []),
]);

function definitions() {
  const numeric = (name) => encoded.measures.includes(name) || ["expert", "numel", "calls", "tokens"].includes(name);
  return Object.keys(columns).filter((name) => chosen.has(name)).map((name) => ({
    title: name, field: name, resizable: "header", sorter: compare, formatter: cellFormatter(name),
    titleFormatter: () => {
      const head = make("span", "", headText(name));
      if (termOf(name)) head.dataset.term = name.startsWith("mse_ratio:") ? "mse_ratio" : name;
      return head;
    },
    hozAlign: numeric(name) ? "right" : "left", headerHozAlign: numeric(name) ? "right" : "left",
    headerSortStartingDir: (termOf(name) || {}).worse === "high" ? "desc" : "asc",
    frozen: name === "layer", cssClass: name === "layer" ? "layer-name" : "", widthGrow: 1,
    minWidth: name === "layer" ? 220 : 64,
    ...(name === "layer" ? { width: 330 } : name === "reason" ? { width: 420 } : { width: widthFor(name) }),
  }));
}

function widthFor(name) {
  const content = { status: 106, role: 150, recommended: 120, block_axis: 110, shape: 110 };
  return Math.max(content[name] || 64, 28 + 6.7 * headText(name).length);
}

function startTable() {
  const started = performance.now();
  const paged = rowCount > pagedAbove;
  rowsTable = new mxdiagVendor.Tabulator("#rows-table", {
    data: Array.from({ length: rowCount }, (_, i) => new Row(i)),
    index: "id", nestedFieldSeparator: false, columns: definitions(), layout: "fitDataFill", height: "70vh", rowHeight: 29,
    renderVerticalBuffer: Math.round(0.45 * innerHeight), columnHeaderSortMulti: true, placeholder: "No row matches the filter.",
    pagination: paged, paginationSize: pageSize, paginationCounter: paged ? "rows" : undefined,
    rowFormatter: (row) => row.getElement().classList.toggle("current", row.getData().id === current),
  });
  rowsTable.on("tableBuilt", () => {
    wireHeads();
    wireKeys();
    wireColumns();
    document.documentElement.dataset.tableMs = String(Math.round(performance.now() - started));
  });
  rowsTable.on("dataFiltered", (filters, rows) => showCount(rows.length));
  rowsTable.on("rowClick", (event, row) => {
    setCurrent(row);
    openDetail(row.getData().id);
  });
  wireFilters();
  let waiting = 0;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => rowsTable.redraw(), 200);
  });
  byId("copy").addEventListener("click", copyShown);
  byId("export").addEventListener("click", exportShown);
  byId("reset").addEventListener("click", resetTable);
}

function showCount(count) {
  const all = grouped.format(rowCount);
  byId("shown").textContent = count === rowCount ? `${all} rows.` : `${grouped.format(count)} of ${all} rows.`;
}

// ---- keyboard

function wireHeads() {
  for (const column of rowsTable.getColumns()) {
    const head = column.getElement();
    head.tabIndex = 0;
    head.dataset.field = column.getField();
    const term = head.querySelector("[data-term]");
    if (term) head.dataset.term = term.dataset.term;
    head.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      head.click();
    });
  }
}

function wireKeys() {
  const holder = byId("rows-table").querySelector(".tabulator-tableholder");
  holder.setAttribute("aria-label", "Rows");
  holder.addEventListener("keydown", (event) => {
    const rows = rowsTable.getRows(rowCount > pagedAbove ? "display" : "active");
    if (!rows.length) return;
    const at = rows.findIndex((row) => row.getData().id === current);
    const step = Math.max(1, Math.floor(holder.clientHeight / 29) - 1);
    const targets = { ArrowDown: at + 1, ArrowUp: at < 0 ? 0 : at - 1, PageDown: at + step, PageUp: at - step, Home: 0, End: rows.length - 1 };
    if (event.key === "Enter" && at >= 0) openDetail(current);
    if (!(event.key in targets) || (event.ctrlKey && event.key.startsWith("Arrow"))) return;
    event.preventDefault();
    const row = rows[Math.min(rows.length - 1, Math.max(0, targets[event.key]))];
    setCurrent(row);
    rowsTable.scrollToRow(row, "nearest", false).catch(() => {});
    const data = row.getData();
    byId("announce").textContent = `${data.layer} ${rowCells[data.id]}, SQNR ${shown("sqnr_db", data.sqnr_db)}`;
  });
}

function setCurrent(row) {
  const before = current;
  current = row.getData().id;
  for (const id of [before, current]) {
    const found = id === null ? false : rowsTable.getRow(id);
    if (found) found.getElement().classList.toggle("current", id === current);
  }
}

/** Bring a row into view and mark it, from a chart or a list; filters that hide it are dropped. */
async function goToRow(i) {
  const test = filterTest();
  if (byId("filter-text").value || (test && !test(new Row(i)))) resetFilters();
  byId("table").scrollIntoView({ block: "start" });
  if (rowCount > pagedAbove) await rowsTable.setPageToRow(i);
  const row = rowsTable.getRow(i);
  setCurrent(row);
  await rowsTable.scrollToRow(row, "center", true);
  setCurrent(row);
  byId("rows-table").querySelector(".tabulator-tableholder").focus({ preventScroll: true });
}

/** The row of a layer, and of an operand and GEMM where they are given. */
function findRow(layer, operand, gemm) {
  for (let i = 0; i < rowCount; i += 1) {
    const fits = (!operand || columns.operand.at(i) === operand) && (!gemm || columns.gemm.at(i) === gemm);
    if (fits && columns.layer.at(i) === layer) return i;
  }
  return null;
}

// ---- filters and columns

function wireFilters() {
  fill(byId("filter-cell"), [["all", "all operands"], ...cells.map((cell) => [cell, cell])]);
  fill(byId("filter-role"), [["all", "all roles"], ...roles.map((role) => [role, role])]);
  fill(byId("filter-status"), [["all", "any status"], ...columns.status.values.map((status) => [status, status])]);
  byId("filter-status").closest(".field").hidden = columns.status.values.length < 2;
  byId("filter-text").addEventListener("input", () => {
    clearTimeout(filterState.waiting);
    filterState.waiting = setTimeout(() => {
      filterState.words = byId("filter-text").value.toLowerCase().split(/\s+/).filter(Boolean);
      applyFilters();
    }, 120);
  });
  for (const name of ["cell", "role", "status"]) {
    byId(`filter-${name}`).addEventListener("change", (event) => {
      filterState[name] = event.target.value;
      applyFilters();
    });
  }
}

function resetFilters() {
  clearTimeout(filterState.waiting);
  Object.assign(filterState, { words: [], cell: "all", role: "all", status: "all" });
  byId("filter-text").value = "";
  for (const name of ["cell", "role", "status"]) byId(`filter-${name}`).value = "all";
  applyFilters();
}

function resetTable() {
  resetFilters();
  rowsTable.clearSort();
  rowsTable.setSort([]);
}

function showColumn(name, wanted) {
  if (wanted) chosen.add(name);
  else chosen.delete(name);
  const sorters = rowsTable.getSorters().filter(({ field }) => chosen.has(field)).map(({ field, dir }) => ({ column: field, dir }));
  rowsTable.setColumns(definitions());
  rowsTable.setSort(sorters);
  wireHeads();
}

function wireColumns() {
  const choices = byId("columns").querySelector(".choices");
  choices.replaceChildren(
    ...Object.keys(columns).filter((name) => name !== "layer").map((name) => {
      const box = make("input");
      box.type = "checkbox";
      box.value = name;
      box.checked = chosen.has(name);
      box.addEventListener("change", () => showColumn(name, box.checked));
      return make("label", "", box, headText(name));
    }),
  );
  const menu = byId("columns");
  document.addEventListener("click", (event) => {
    if (!menu.contains(event.target)) menu.open = false;
  });
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    menu.open = false;
    menu.querySelector("summary").focus();
  });
}

// ---- what is shown, out of the page: the rows that pass the filters, sorted, in the shown columns

function shownLines(join, quote) {
  const names = rowsTable.getColumns().map((column) => column.getField());
  const text = (value) => quote(typeof value === "number" ? exact(value) : value === null || value === undefined ? "" : String(value));
  const lines = rowsTable.getRows("active").map((row) => {
    const data = row.getData();
    return names.map((name) => text(data[name])).join(join);
  });
  return [names.map(quote).join(join), ...lines].join("\n") + "\n";
}

async function copyShown() {
  const text = shownLines("\t", (value) => (/[\t\n\r"]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value));
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // The clipboard interface needs a permission that a local file may lack; the old way does not.
    const area = make("textarea", "visually-hidden", text);
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  byId("announce").textContent = "Copied.";
  flash(byId("copy"), "Copied");
}

function flash(button, text) {
  const before = button.textContent;
  button.textContent = text;
  setTimeout(() => { button.textContent = before; }, 1200);
}

function exportShown() {
  const csv = shownLines(",", (value) => (/[",\n\r]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value));
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([csv], { type: "text/csv" }));
  link.download = "tensors.csv";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
