"""A run in other shapes: Markdown short enough for a pull-request comment, and Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mxdiag.commands.report import summary
from mxdiag.commands.report.escape import markdown_code
from mxdiag.commands.report.predictions import predictions
from mxdiag.errors import UsageError
from mxdiag.run.columns import corrected_column
from mxdiag.run.run import Run, write_atomically

#: Corrections in the Markdown's table; a longer one does not fit a comment.
_CORRECTIONS_SHOWN = 6
#: What Markdown, HTML and a forge's mentions would read as more than text.
_ENTITIES = {ord(character): f"&#{ord(character)};" for character in "\\`*_{}[]<>|#!~$@&"}


def _escape(text: Any) -> str:
    """Text that stays itself in a Markdown table cell, whatever a layer is called."""
    return " ".join(str(text).split()).translate(_ENTITIES)


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    marks = ["---", *("---:" for _ in heads[1:])]
    return [f"| {' | '.join(cells)} |" for cells in (heads, marks, *rows)]


def _shares(run: Run) -> list[str]:
    rows = [
        [
            f"{total['operand']}·{total['gemm']}",
            *(summary.percent(total.get(name), 1) for name in summary.SHARES),
            summary.percent(total.get("deadzone_frac"), 1),
            summary.number(total.get("sqnr_db"), 2, "dB"),
        ]
        for total in summary.overall(run)
    ]
    heads = ["Operand", "Reducible", "Recoverable", "Irreducible", "Deadzone", "SQNR"]
    return _table(heads, rows) if rows else ["Nothing was measured."]


def _corrections(run: Run) -> list[str]:
    costs = run.data.get("corrections") or {}
    names = [
        name
        for name in costs
        if any(corrected_column("mse_ratio", name) in total for total in summary.overall(run))
        and not (name.startswith("scale:m") and name[7:].isdigit())
    ][:_CORRECTIONS_SHOWN]
    if not names:
        return []
    rows = []
    for total in summary.overall(run):
        cells = [
            summary.number(total.get(corrected_column("mse_ratio", name)), 3) for name in names
        ]
        floor = None if total.get("reducible") is None else 1 - total["reducible"]
        rows.append([f"{total['operand']}·{total['gemm']}", *cells, summary.number(floor, 3)])
    heads = ["MSE ratio after", *(_escape(name) for name in names), "floor of an ideal scale"]
    bits = ["bits per element", *(f"{summary.bits_of(costs[name]):+.3g}" for name in names), ""]
    return ["", *_table(heads, [*rows, bits])]


def _missed(run: Run) -> list[str]:
    """Predictions that miss the measurement by more than a tenth, as one line each."""
    lines = []
    for item in predictions(run):
        if (
            item.same_model
            and item.cell == "W·fprop"
            and abs(item.measured - item.predicted) > 0.1 * abs(item.predicted)
        ):
            remark = f" ({_escape(item.remark)})" if item.remark else ""
            lines.append(
                f"- {_escape(item.claim)}, {item.cell}: predicted {item.predicted:.3g}, "
                f"measured {item.measured:.3g}{remark}"
            )
    return ["", "Where prediction and measurement part:", *lines] if lines else []


def render_markdown(run: Run) -> str:
    """The run in a page of Markdown: shares, corrections, worst layers, coverage.

    Its length does not grow with the model; layer names are inert whatever they hold.
    """
    model, covered = run.data["model"], summary.coverage(run)
    facts = [
        str(model.get("architecture") or ""),
        f"{summary.count(model.get('parameters'))} parameters",
    ]
    facts.append(f"scale rule {(run.data.get('settings') or {}).get('scale_rule', 'rceil')}")
    lines = [
        f"### MXFP4 error of {_escape(model.get('source'))}",
        "",
        _escape(" · ".join(fact for fact in facts if fact)),
        "",
        *_shares(run),
        *_corrections(run),
    ]
    worst = summary.worst_layers(run)
    if worst:
        lines += ["", "Worst layers:"]
        for place, item in enumerate(worst, 1):
            head = f"{place}. {markdown_code(item.layer)} {item.cell}, {item.headline}"
            lines.append(f"{head}: {_escape(item.words)}")
    lines += _missed(run)
    lines += [
        "",
        f"Coverage: {summary.percent(covered['fraction'], 1)} of "
        f"{summary.count(covered['parameters'])} matrix parameters in {covered['layers']} layers, "
        f"{summary.percent(covered['included_fraction'], 1)} of those that no rule excludes. "
        f"{covered['remainder']}",
    ]
    lines += [f"Warning: {_escape(warning)}" for warning in run.data.get("warnings") or []]
    text = "\n".join(lines) + "\n"
    return text.encode("utf-8", "replace").decode("utf-8")


def export_parquet(run: Run, path: Path | str) -> Path:
    """Write the rows as one Parquet file with the columns of `tensors.csv`, whole or not at all.

    Raises
    ------
    UsageError
        If pyarrow, which writes Parquet, is not installed.
    RunError
        If the file cannot be written.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UsageError(
            "writing Parquet needs pyarrow", advice='Install it: pip install "mxdiag[parquet]"'
        ) from None
    path = Path(path)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pandas(run.frame, preserve_index=False), sink)
    write_atomically(path, sink.getvalue().to_pybytes())
    return path
