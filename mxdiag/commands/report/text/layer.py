"""One layer in depth, on the terminal: what `mxdiag show RUN LAYER` prints."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mxdiag.commands.report.text.tables import (
    SHARE_LABELS,
    cell_number,
    cell_percent,
    printable,
    share_bar,
)
from mxdiag.errors import UsageError
from mxdiag.formats import MXFP4, SCALE_RULES
from mxdiag.run.columns import Row, corrected_column
from mxdiag.run.run import Run

_BARS = " ▁▂▃▄▅▆▇█"
_SHARE_WIDTH = 40
#: The terms that add up to ||e||^2, as they are written.
_TERMS = (
    ("scale_energy", "‖e_scale‖²"),
    ("deadzone_energy", "‖e_dz‖²"),
    ("grid_energy", "‖e_grid‖²"),
    ("cross_scale_grid", "2⟨e_scale,e_grid⟩"),
    ("cross_scale_deadzone", "2⟨e_scale,e_dz⟩"),
)
_FRACTIONS = (
    ("deadzone_frac", "deadzone"),
    ("underflow_frac", "underflow"),
    ("zero_frac", "zero"),
    ("saturated_frac", "saturated"),
)


def find_layer(run: Run, name: str) -> Sequence[Row]:
    """A layer's rows. The end of its name will do, from a dot on, if no other layer ends so.

    Raises
    ------
    UsageError
        If the run has no such layer (with what was measured instead, or why it was not), or
        several end so.
    """
    rows = [row for row in run.tensors if row["layer"] == name]
    if rows:
        return rows
    layers = list(dict.fromkeys(row["layer"] for row in run.tensors))
    ending = [layer for layer in layers if layer.endswith(f".{name}")]
    if len(ending) == 1:
        return [row for row in run.tensors if row["layer"] == ending[0]]
    if ending:
        raise UsageError(
            f"{len(ending)} layers are called so",
            where=name,
            advice=f"Give the whole name: {', '.join(ending[:5])}{', …' * (len(ending) > 5)}",
        )
    raise UsageError(
        f"no such layer in this run{_why(run, name)}", where=name, advice=_near(name, layers)
    )


def _why(run: Run, name: str) -> str:
    """Why a layer that the scan saw has no row."""
    coverage = run.data.get("coverage") or {}
    for item in coverage.get("excluded") or []:
        if item.get("layer") == name:
            return f": excluded by {item.get('rule')}"
    for item in coverage.get("unsupported") or []:
        if item.get("layer") == name:
            return f": unsupported, {item.get('reason')}"
    return ""


def _near(name: str, layers: list[str]) -> str:
    close = [layer for layer in layers if name.lower() in layer.lower()][:5]
    if not close:
        # As many parts from the end as were typed: a slip in `q_prj` is close to `q_proj`.
        parts = name.count(".") + 1
        ends = {layer: ".".join(layer.split(".")[-parts:]) for layer in layers}
        near = difflib.get_close_matches(name, set(ends.values()), n=5, cutoff=0.6)
        close = [layer for layer in layers if ends[layer] in near][:5]
    if close:
        return f"Closest: {', '.join(close)}"
    return f"It has {len(layers):,} layers, the first is {layers[0]}" if layers else "It has none"


def layer_details(run: Run, name: str, console: Console) -> RenderableType:
    """Everything the run knows of a layer: its rows one by one, and its gradients if injected.

    On a terminal with bars and colours; piped without either, the histogram as counts.

    Raises
    ------
    UsageError
        As `find_layer`.
    """
    rows = find_layer(run, name)
    first = rows[0]
    head = Text(printable(first["layer"]), style="bold")
    facts = [f"role {printable(str(first.get('role')))}"]
    if first.get("expert") is not None:
        facts.append(f"expert {first['expert']}")
    parts: list[RenderableType] = [head, Text(", ".join(facts))]
    for row in rows:
        parts += [Text(), _row(run, row, console)]
    gradients = _gradients(run, first["layer"])
    if gradients is not None:
        parts += [Text(), Text("gradient of this weight under injection", style="bold"), gradients]
    return Group(*parts)


def _row(run: Run, row: Row, console: Console) -> RenderableType:
    size = "×".join(str(n) for n in row.get("shape") or ()) or "no shape"
    facts = [size, str(row.get("dtype") or "dtype unknown")]
    facts.append(f"blocked along {row.get('block_axis')}")
    if row.get("tokens") is not None:
        facts.append(f"{row['tokens']:,} tokens in {row.get('calls')} calls")
    head = Text(f"{row['operand']}·{row['gemm']}", style="bold")
    head.append(printable(f"   {', '.join(facts)}"), style="not bold")
    parts: list[RenderableType] = [head]
    if row["status"] != "ok":
        parts.append(Padding(Text(_status(row), style="bold yellow"), (0, 0, 0, 2)))
    if row["status"] != "not_observed":
        lines = _lines(run, row, console)
        parts.append(Padding(_labelled(lines), (0, 0, 0, 2)))
        corrections = _corrections(run, row)
        if corrections is not None:
            parts.append(Padding(corrections, (0, 0, 0, 2)))
    parts += [Padding(text, (0, 0, 0, 2)) for text in _recommendation(row)]
    return Group(*parts)


def _status(row: Row) -> str:
    reason = row.get("not_observed_reason")
    words = {
        "exact": "exact: Q reproduces it, there is no error",
        "zero": "all zero",
        "nonfinite": f"{row.get('nonfinite')} blocks hold NaN or infinity; the numbers leave "
        "them out",
        "not_observed": f"not observed{f': {reason}' if reason else ''}",
    }
    return printable(words.get(row["status"]) or str(row["status"]))


def _labelled(lines: Iterable[tuple[str, Text]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in lines:
        table.add_row(Text(label, style="dim"), text)
    return table


def _lines(run: Run, row: Row, console: Console) -> Iterable[tuple[str, Text]]:
    """(label, content) of everything but the corrections."""
    yield (
        "error",
        Text(f"SQNR {cell_number(row.get('sqnr_db'))} dB, relative MSE {_short(row, 'rel_mse')}"),
    )
    if row.get("irreducible") is not None:
        if console.is_terminal:
            yield "shares", share_bar(row, min(_SHARE_WIDTH, max(8, console.width - 14)))
        shares = [
            f"{name} {cell_percent(row.get(name))} % ({label})" for name, label, *_ in SHARE_LABELS
        ]
        yield "" if console.is_terminal else "shares", Text(", ".join(shares))
        yield "split", _sum(row)
    fractions = [f"{label} {cell_percent(row.get(key), 2)} %" for key, label in _FRACTIONS]
    yield "elements", Text(", ".join(fractions))
    yield (
        "values",
        Text(
            f"amax {_short(row, 'amax')}, rms {_short(row, 'rms')}, gain {_short(row, 'gain', 6)}"
        ),
    )
    if row.get("sqnr_db_token") is not None:
        yield (
            "per token",
            Text(
                f"SQNR {cell_number(row['sqnr_db_token'])} dB, recoverable "
                f"{cell_percent(row.get('recoverable_token'))} % (means); the largest token holds "
                f"{cell_percent(row.get('top_token_share'))} % of the energy"
            ),
        )
    if row.get("delta_mean") is not None:
        yield "δ", _delta(run, row, console)


def _short(row: Row, key: str, digits: int = 4) -> str:
    value = row.get(key)
    return "–" if value is None else f"{value:.{digits}g}"


def _sum(row: Row) -> Text:
    """The terms of the error's split, which add up to 1, and how well they do."""
    text = Text()
    for key, name in _TERMS:
        value = row.get(key)
        sign = "-" if value is not None and value < 0 else "+"
        text.append(f" {sign} " if text else "-" * (sign == "-"))
        text.append(f"{cell_number(None if value is None else abs(value), 3)} {name}")
    text.append(
        f" = 1 of ‖e‖² (closure {_short(row, 'closure_residual', 2)}), "
        f"cos(e_scale,e_grid) {cell_number(row.get('cos_scale_grid'), 3)}"
    )
    return text


def _delta(run: Run, row: Row, console: Console) -> Text:
    """Mean, spread and histogram of delta = log2(s_b / s*_b), in octaves."""
    text = Text(f"mean {_short(row, 'delta_mean', 3)}, std {_short(row, 'delta_std', 3)} octaves")
    counts = row.get("delta_hist")
    if not counts or not any(counts):
        return text
    rule = SCALE_RULES.get((run.data.get("settings") or {}).get("scale_rule", ""))
    low = None if rule is None else rule.delta_low(MXFP4.element)
    ends = ("", "") if low is None else (f"{low:+.2f} ", f" {low + 1:+.2f}")
    bars = bars_of(counts) if console.is_terminal else " ".join(map(str, counts))
    return text.append(f"\n{ends[0]}{bars}{ends[1]}")


def bars_of(counts: Iterable[int]) -> str:
    """A histogram as one character per bin; only an empty bin is blank."""
    counts = list(counts)
    top = max(counts) or 1
    return "".join(_BARS[math.ceil(8 * count / top)] for count in counts)


def _corrections(run: Run, row: Row) -> Table | None:
    """Each evaluated correction: what it leaves of the error, and what it costs; cheapest first."""
    costs = run.data.get("corrections") or {}
    names = [
        name for name in run.corrections if row.get(corrected_column("mse_ratio", name)) is not None
    ]
    if not names:
        return None

    def cost(name: str) -> tuple[float, float]:
        known = costs.get(name) or {}
        return known.get("gemm_passes", math.inf), known.get("bits", math.inf)

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("correction", overflow="fold")
    for column in ("MSE ratio", "gain dB", "SQNR dB", "bits", "passes", "rotations"):
        table.add_column(column, justify="right", no_wrap=True)
    for name in sorted(names, key=cost):
        ratio = row[corrected_column("mse_ratio", name)]
        gain = -10 * math.log10(ratio) if ratio > 0 else None
        after = None if gain is None or row.get("sqnr_db") is None else row["sqnr_db"] + gain
        known = costs.get(name) or {}
        chosen = name == row.get("recommended")
        table.add_row(
            Text(printable(name), style="bold green" if chosen else ""),
            f"{ratio:.4g}",
            "no error" if gain is None else f"{gain:+.2f}",
            cell_number(after),
            *(
                f"{known[k]:+g}" if k in known else "–"
                for k in ("bits", "gemm_passes", "transforms")
            ),
        )
    return table


def _recommendation(row: Row) -> list[Text]:
    recommended, reason = row.get("recommended"), row.get("reason")
    if not recommended:
        return []
    text = Text("recommended: ", style="bold")
    text.append(printable(str(recommended)), style="bold green")
    if reason:
        text.append(printable(f", {reason}"), style="not bold")
    return [text]


def _gradients(run: Run, layer: str) -> Table | None:
    """The weight gradient's cosine and norm ratio under each injected component."""
    impact = run.data.get("impact") or {}
    found = [
        (name, entry, item)
        for name in ("backward", "both")
        for entry in impact.get(name) or []
        for item in entry.get("layers") or []
        if item.get("layer") == layer
    ]
    if not found:
        return None
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("pass", "injected", "operands"):
        table.add_column(column)
    for column in ("cosine", "norm ratio", "SNR dB"):
        table.add_column(column, justify="right")
    for name, entry, item in found:
        table.add_row(
            name,
            Text(printable(str(entry.get("config")))),
            Text(str(entry.get("operands"))),
            *(cell_number(item.get(key), 4) for key in ("cosine", "norm_ratio")),
            cell_number(item.get("snr_db")),
        )
    return table
