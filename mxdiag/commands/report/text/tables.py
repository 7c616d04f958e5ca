"""The terminal's view of a run: the worst rows first, then totals, coverage and warnings.

On a terminal the shares are drawn as a stacked bar as well; piped output has no colour, no box
drawing and whole names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from mxdiag.run.run import Run

#: The three shares, their colours and their marks: the same in every table and chart.
SHARE_LABELS = (
    ("reducible", "scale bias", "#4c78a8", "█"),
    ("recoverable", "deadzone", "#e6a03c", "▓"),
    ("irreducible", "grid noise", "#8a8f98", "░"),
)
_STATUS_ORDER = {"nonfinite": 0, "ok": 1, "exact": 2, "zero": 3, "not_observed": 4}
_BAR_WIDTH = 20


def cell_number(value: float | None, digits: int = 2) -> str:
    """A fixed-point number, or a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}"


def cell_percent(value: float | None, digits: int = 1) -> str:
    """A share as a percentage without its sign, or a dash where there is none."""
    return "–" if value is None else f"{100 * value:.{digits}f}"


def share_bar(row: Mapping[str, Any], width: int = _BAR_WIDTH) -> Text:
    """The three shares of ||e||^2 as a stacked bar; a negative share takes no room."""
    text = Text()
    values = [max(0.0, row.get(name) or 0.0) for name, *_ in SHARE_LABELS]
    whole = sum(values)
    if not whole:
        return text
    edge = 0.0
    for value, (_, _, colour, mark) in zip(values, SHARE_LABELS, strict=True):
        start, edge = round(edge * width / whole), edge + value
        text.append(mark * (round(edge * width / whole) - start), style=colour)
    return text


def worst_first(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows by severity: non-finite, then by falling relative error, then the unobserved."""

    def key(row: Mapping[str, Any]) -> tuple[int, float]:
        return _STATUS_ORDER.get(row["status"], 5), -(row.get("rel_mse") or 0.0)

    return sorted(rows, key=key)


def _table(console: Console, first: str) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="bold")
    table.add_column(first, overflow="fold", no_wrap=not console.is_terminal)
    table.add_column("operand", no_wrap=True)
    table.add_column("SQNR dB", justify="right", no_wrap=True)
    if console.is_terminal:
        table.add_column("split", no_wrap=True, width=_bar_width(console))
    for _, label, _, _ in SHARE_LABELS:
        heading = label.split()[0] if _is_narrow(console) else f"{label} %"
        table.add_column(heading, justify="right", overflow="fold")
    return table


def _is_narrow(console: Console) -> bool:
    return console.is_terminal and console.width < 100


def _bar_width(console: Console) -> int:
    return _BAR_WIDTH // 2 if _is_narrow(console) else _BAR_WIDTH


def _add(table: Table, console: Console, name: Text, row: Mapping[str, Any]) -> None:
    cells: list[RenderableType] = [name, f"{row['operand']}·{row['gemm']}"]
    if row.get("status", "ok") == "ok":
        cells.append(cell_number(row.get("sqnr_db")))
    else:
        cells.append(row["status"].replace("_", " "))
    if console.is_terminal:
        cells.append(share_bar(row, _bar_width(console)))
    digits = 0 if _is_narrow(console) else 1
    cells += [cell_percent(row.get(share), digits) for share, *_ in SHARE_LABELS]
    table.add_row(*cells)


def rows_table(run: Run, console: Console, top: int | None = 15) -> Table:
    """The `top` worst rows (all if None)."""
    table = _table(console, "layer")
    for row in worst_first(run.tensors)[:top]:
        _add(table, console, Text(printable(row["layer"])), row)
    return table


def totals_table(run: Run, console: Console) -> Table:
    """Totals by operand and GEMM, each followed by its roles."""
    table = _table(console, "total")
    for row in run.data["totals"]:
        if row["role"] is None:
            name = Text(f"all {row['rows']} rows", style="bold")
        else:
            name = Text(f"  {printable(row['role'])} ({row['rows']})")
        status = "ok" if row.get("sqnr_db") is not None else "not_observed"
        if row.get("nonfinite"):
            status = "nonfinite"
        elif status != "ok" and row["measured"]:
            unknown = row.get("rel_mse") is None and row.get("amax")  # squares that underflow
            status = "ok" if unknown else "exact"
        _add(table, console, name, {**row, "status": status})
    return table


def printable(name: str) -> str:
    """A name with its control characters escaped, so that it cannot move the cursor."""
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def coverage_line(coverage: Mapping[str, Any]) -> Text:
    """One line: measured, excluded, unsupported, not observed, as counts and parameter shares."""
    whole = coverage["parameters"] or 1

    def share(parameters: int) -> str:
        return f"{100 * parameters / whole:.1f} %"

    def part(kind: str) -> str:
        entries = coverage[kind]
        return f"{len(entries)} {kind} ({share(sum(e['parameters'] for e in entries))})"

    text = Text("coverage: ", style="bold")
    text.append(
        f"{coverage['measured']} layers measured ({share(coverage['measured_parameters'])} of "
        f"{coverage['parameters']:,} parameters), {part('excluded')}, ",
        style="not bold",
    )
    unsupported = part("unsupported")
    text.append(unsupported, style="bold red" if coverage["unsupported"] else "not bold")
    text.append(f", {len(coverage['not_observed'])} rows not observed", style="not bold")
    return text


def targets_in_words(targets: Mapping[str, float]) -> str:
    """What a recommendation had to reach."""
    units = {
        "target_sqnr": "SQNR of at least {:g} dB",
        "target_mse_ratio": "MSE ratio of at most {:g}",
        "max_bits": "at most {:g} bits per weight",
    }
    return " and ".join(
        units[name].format(value) if name in units else f"{name.replace('_', ' ')} {value}"
        for name, value in targets.items()
    )


def recommendation_lines(run: Run) -> list[Text]:
    """The recommendation's sentences under its target, and those on its validation."""
    found = run.data["recommendation"]
    heading = Text(f"recommended for {targets_in_words(found['targets'])}:", style="bold")
    lines = [heading, *(Text(f"  {printable(sentence)}") for sentence in found["sentences"])]
    validation = found.get("validation") or {}
    if validation.get("sentences"):
        lines.append(Text("run with them:", style="bold"))
        lines += [Text(f"  {printable(sentence)}") for sentence in validation["sentences"]]
    return lines


def recommendation_summary(run: Run, console: Console, top: int | None = 15) -> RenderableType:
    """What `mxdiag recommend` prints: rows that are to be changed, worst first; sentences."""
    changed = worst_first(
        [row for row in run.tensors if row.get("recommended") not in (None, "mxfp4")]
    )
    parts: list[RenderableType] = [_recommendation_table(changed[:top], console)]
    hidden = len(changed) - len(changed[:top])
    if hidden:
        parts.append(Text(f"… and {hidden} rows with less error", style="dim"))
    return Group(*parts, Text(), *recommendation_lines(run))


def _recommendation_table(rows: Iterable[Mapping[str, Any]], console: Console) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="bold")
    table.add_column("layer", overflow="fold", no_wrap=not console.is_terminal)
    table.add_column("operand", no_wrap=True)
    table.add_column("recommended", no_wrap=True)
    table.add_column("reason", overflow="fold", no_wrap=not console.is_terminal)
    for row in rows:
        table.add_row(
            Text(printable(row["layer"])),
            f"{row['operand']}·{row['gemm']}",
            Text(row["recommended"]),
            Text(printable(row["reason"])),
        )
    return table


def legend() -> Text:
    """What the colours of the bar stand for."""
    text = Text()
    for _, label, colour, mark in SHARE_LABELS:
        text.append(f"{mark * 2} ", style=colour)
        text.append(f"{label}   ")
    return text.append("in % of the squared error")


def scan_summary(run: Run, console: Console, top: int | None = 15) -> RenderableType:
    """What `mxdiag scan` prints."""
    parts: list[RenderableType] = []
    if console.is_terminal:
        parts += [legend(), Text()]
    parts.append(rows_table(run, console, top))
    hidden = 0 if top is None else max(0, len(run.tensors) - top)
    if hidden:
        parts.append(Text(f"… and {hidden} rows with less error", style="dim"))
    parts += [Text(), totals_table(run, console), Text(), coverage_line(run.data["coverage"])]
    parts += [Text(), *recommendation_lines(run)] if run.data.get("recommendation") else []
    parts += [
        Text(f"warning: {printable(warning)}", style="yellow") for warning in run.data["warnings"]
    ]
    return Group(*parts)
