"""The one list of columns: what every value of a row is, and the names that corrections add.

The files that hold rows, what is checked when they are read, the report's glossary, the list of
columns in the documentation and the published JSON Schema all come from here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

_PAPER = "arXiv 2605.20402"
_OCP = "OCP Microscaling Formats (MX) v1.0"

Row = Mapping[str, Any]
#: (layer, operand, gemm)
Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a row.

    Attributes
    ----------
    name
        Key in `run.json`, and head in `tensors.csv` where it is there.
    kind
        `text`, `integer`, `number`, `fraction` (0 to 1), `sizes` or `counts` (lists of integers).
        Every value may be null, but those of `REQUIRED`.
    of
        Where it comes from: `identity` (what was measured), `sums` (derived from them), `choice`
        (recommend), `detail` (in `run.json` alone).
    title
        Short name for a column head or an axis.
    meaning
        One or two sentences.
    formula
        In plain text with Unicode signs, empty if there is none.
    source
        Where the definition comes from.
    unit
        `dB`, `octaves`, `share` (of 1), `ratio`, `count` or empty.
    worse
        `low`, `high` or empty: which end is the bad one.
    """

    name: str
    kind: Literal["text", "integer", "number", "fraction", "sizes", "counts"]
    of: Literal["identity", "sums", "choice", "detail"]
    title: str
    meaning: str
    formula: str = ""
    source: str = "mxdiag"
    unit: str = ""
    worse: str = ""


ROW_COLUMNS: tuple[Column, ...] = (
    Column(
        "layer",
        "text",
        "identity",
        "Layer",
        "The name that the checkpoint gives the weight, without “.weight”.",
    ),
    Column(
        "role",
        "text",
        "identity",
        "Role",
        "What the model family calls the projection; “expert.” marks experts.",
    ),
    Column(
        "expert",
        "integer",
        "identity",
        "Expert",
        "Index of the expert inside its layer.",
    ),
    Column(
        "operand",
        "text",
        "identity",
        "Operand",
        "W is the weight, A the input activation, G the gradient of the output.",
    ),
    Column(
        "gemm",
        "text",
        "identity",
        "GEMM",
        "The product the operand enters. The same tensor is blocked along another axis in each.",
        formula="fprop Y = X Wᵀ · dgrad dX = dY W · wgrad dW = dYᵀ X",
    ),
    Column(
        "status",
        "text",
        "identity",
        "Status",
        "ok; exact: already on the MXFP4 grid; zero: all zero; nonfinite: holds NaN or Inf, "
        "never passes a gate; not_observed: never called, or an expert without a token.",
    ),
    Column(
        "block_axis",
        "text",
        "identity",
        "Blocked along",
        "The contracted axis, along which the blocks of 32 run.",
        source=_OCP,
    ),
    Column(
        "shape",
        "sizes",
        "identity",
        "Shape",
        "Shape of the measured tensor, summed over calls.",
    ),
    Column(
        "numel",
        "integer",
        "identity",
        "Elements",
        "Number of measured elements.",
        unit="count",
    ),
    Column(
        "dtype",
        "text",
        "identity",
        "dtype",
        "Type of the values that were quantized.",
    ),
    Column(
        "calls",
        "integer",
        "identity",
        "Calls",
        "How often the layer ran on the calibration data.",
        unit="count",
    ),
    Column(
        "tokens",
        "integer",
        "identity",
        "Tokens",
        "Tokens that reached the layer; for an expert, those routed to it.",
        unit="count",
    ),
    Column(
        "sqnr_db",
        "number",
        "sums",
        "SQNR",
        "Signal to quantization noise. Higher is better.",
        formula="10 log₁₀(‖x‖² / ‖e‖²)",
        unit="dB",
        worse="low",
    ),
    Column(
        "rel_mse",
        "number",
        "sums",
        "Relative MSE",
        "Error energy per signal energy.",
        formula="‖e‖² / ‖x‖²",
        unit="ratio",
        worse="high",
    ),
    Column(
        "reducible",
        "number",
        "sums",
        "Reducible",
        "Scale bias: what an ideal, unrounded block scale would remove, cross term included. "
        "Negative where a power-of-two scale happens to beat amax / 6.",
        formula="1 − (‖e_dz‖² + ‖e_grid‖²) / ‖e‖²",
        source=_PAPER,
        unit="share",
        worse="high",
    ),
    Column(
        "recoverable",
        "number",
        "sums",
        "Recoverable",
        "Deadzone truncation: what bringing back the values cut to zero would remove.",
        formula="‖e_dz‖² / ‖e‖²",
        source=_PAPER,
        unit="share",
        worse="high",
    ),
    Column(
        "irreducible",
        "number",
        "sums",
        "Irreducible",
        "Grid noise: what the E2M1 grid itself costs under an ideal scale.",
        formula="‖e_grid‖² / ‖e‖²",
        source=_PAPER,
        unit="share",
        worse="high",
    ),
    Column(
        "scale_energy",
        "number",
        "sums",
        "Scale energy",
        "Energy of the scale error alone; above 1 where it cancels against grid error.",
        formula="‖e_scale‖² / ‖e‖²,  e_scale = Q(x) − Q*(x)",
        source=_PAPER,
        unit="ratio",
        worse="high",
    ),
    Column(
        "deadzone_energy",
        "number",
        "sums",
        "Deadzone energy",
        "Energy of the deadzone error; equals the recoverable share.",
        formula="‖e_dz‖² / ‖e‖²,  e_dz = Q*(x) − x where x ≠ 0 and Q*(x) = 0",
        source=_PAPER,
        unit="ratio",
        worse="high",
    ),
    Column(
        "grid_energy",
        "number",
        "sums",
        "Grid energy",
        "Energy of the grid error; equals the irreducible share.",
        formula="‖e_grid‖² / ‖e‖²,  e_grid = Q*(x) − x off the deadzone",
        source=_PAPER,
        unit="ratio",
        worse="high",
    ),
    Column(
        "cross_scale_grid",
        "number",
        "sums",
        "Cross scale·grid",
        "Cross term of scale and grid error; negative where they cancel.",
        formula="2⟨e_scale, e_grid⟩ / ‖e‖²",
        source=_PAPER,
        unit="ratio",
    ),
    Column(
        "cross_scale_deadzone",
        "number",
        "sums",
        "Cross scale·dz",
        "Cross term of scale and deadzone error; exactly 0 under rceil.",
        formula="2⟨e_scale, e_dz⟩ / ‖e‖²",
        source=_PAPER,
        unit="ratio",
    ),
    Column(
        "cos_scale_grid",
        "number",
        "sums",
        "cos scale·grid",
        "Cosine between scale and grid error.",
        formula="⟨e_scale, e_grid⟩ / (‖e_scale‖ ‖e_grid‖)",
        source=_PAPER,
        unit="ratio",
    ),
    Column(
        "closure_residual",
        "number",
        "sums",
        "Closure",
        "How far the parts miss the independently summed error; a check of the split.",
        formula="(Σ parts and cross terms − ‖e‖²) / (‖e_scale‖² + ‖e_dz‖² + ‖e_grid‖²)",
        unit="ratio",
    ),
    Column(
        "deadzone_frac",
        "fraction",
        "sums",
        "Deadzone",
        "Share of elements that an ideal scale rounds to zero.",
        formula="x ≠ 0 and |x| ≤ amax / 24",
        source=_PAPER,
        unit="share",
        worse="high",
    ),
    Column(
        "underflow_frac",
        "fraction",
        "sums",
        "Underflow",
        "Share of elements that MXFP4 turns from nonzero to zero.",
        formula="x ≠ 0 and Q(x) = 0",
        unit="share",
        worse="high",
    ),
    Column(
        "zero_frac",
        "fraction",
        "sums",
        "Zeros",
        "Share of elements that are zero.",
        formula="x = 0",
        unit="share",
    ),
    Column(
        "saturated_frac",
        "fraction",
        "sums",
        "Saturated",
        "Share of elements beyond the largest grid value.",
        formula="|x| > 6 s",
        source=_OCP,
        unit="share",
        worse="high",
    ),
    Column(
        "nonfinite",
        "integer",
        "sums",
        "Non-finite",
        "Blocks that hold a NaN or an infinity. They enter no other number.",
        unit="count",
        worse="high",
    ),
    Column(
        "delta_mean",
        "number",
        "sums",
        "δ mean",
        "Mean over blocks of the scale's rounding, in octaves. 0.5 if uniform.",
        formula="δ = log₂(s / s*),  s* = amax / 6",
        source=_PAPER,
        unit="octaves",
        worse="high",
    ),
    Column(
        "delta_std",
        "number",
        "sums",
        "δ std",
        "Spread over blocks of the scale's rounding; 1/√12 = 0.289 if uniform.",
        formula="std of δ = log₂(s / s*)",
        source=_PAPER,
        unit="octaves",
        worse="high",
    ),
    Column(
        "gain",
        "number",
        "sums",
        "Gain",
        "How much of x survives along itself; 1 is unbiased.",
        formula="⟨Q(x), x⟩ / ‖x‖²",
        unit="ratio",
    ),
    Column(
        "amax",
        "number",
        "sums",
        "amax",
        "Largest absolute value.",
        formula="max |x|",
    ),
    Column(
        "rms",
        "number",
        "sums",
        "rms",
        "Root mean square.",
        formula="√(‖x‖² / n)",
    ),
    Column(
        "sqnr_db_token",
        "number",
        "sums",
        "SQNR per token",
        "Mean over tokens of the token's own SQNR: one loud token cannot hide the rest.",
        formula="mean over tokens of 10 log₁₀(‖x_t‖² / ‖e_t‖²)",
        unit="dB",
        worse="low",
    ),
    Column(
        "recoverable_token",
        "number",
        "sums",
        "Recoverable per token",
        "Mean over tokens of the token's own recoverable share.",
        formula="mean over tokens of ‖e_dz,t‖² / ‖e_t‖²",
        unit="share",
        worse="high",
    ),
    Column(
        "top_token_share",
        "number",
        "sums",
        "Top token",
        "Energy share of the largest token. Near 1, the energy-weighted numbers describe that"
        " token alone.",
        formula="max ‖x_t‖² / ‖x‖²",
        unit="share",
        worse="high",
    ),
    Column(
        "recommended",
        "text",
        "choice",
        "Recommended",
        "The correction that the default recommendation chose.",
    ),
    Column(
        "reason",
        "text",
        "choice",
        "Reason",
        "Why, in one sentence with the numbers.",
    ),
    Column(
        "delta_hist",
        "counts",
        "detail",
        "δ histogram",
        "Blocks by the scale's rounding δ, in 32 bins of 1/32 octave from the rule's lowest.",
        unit="count",
    ),
    Column(
        "not_observed_reason",
        "text",
        "detail",
        "Why not observed",
        "Why nothing was seen of the operand.",
    ),
)

#: What a row carries of every correction that was evaluated on it, as `<quantity>:<correction>`.
CORRECTION_COLUMNS: tuple[Column, ...] = (
    Column(
        "mse_ratio",
        "number",
        "sums",
        "MSE ratio",
        "Error energy with the correction over that of plain MXFP4, measured on this tensor. "
        "1 changes nothing, 0 removes everything.",
        formula="‖x̂ − x‖² / ‖Q(x) − x‖²",
        unit="ratio",
        worse="high",
    ),
    Column(
        "sqnr_db",
        "number",
        "sums",
        "SQNR after",
        "Signal to quantization noise with the correction.",
        formula="10 log₁₀(‖x‖² / ‖x̂ − x‖²)",
        unit="dB",
        worse="low",
    ),
    Column(
        "underflow_frac",
        "fraction",
        "sums",
        "Underflow after",
        "Share of elements that become zero with the correction.",
        formula="x ≠ 0 and x̂ = 0",
        unit="share",
        worse="high",
    ),
    Column(
        "gain",
        "number",
        "sums",
        "Gain after",
        "How much of x survives along itself with the correction; 1 is unbiased.",
        formula="⟨x̂, x⟩ / ‖x‖²",
        unit="ratio",
    ),
    Column(
        "error_sum",
        "number",
        "sums",
        "Error sum after",
        "Sum of the corrected error; 0 in the mean for an unbiased correction.",
        formula="Σ (x̂ − x)",
    ),
    Column(
        "reducible",
        "number",
        "sums",
        "Reducible after",
        "Scale bias that the correction leaves; for corrections that keep the ideal value.",
        formula="1 − (‖e_dz‖² + ‖e_grid‖²) / ‖x̂ − x‖²",
        source=_PAPER,
        unit="share",
        worse="high",
    ),
    Column(
        "recoverable",
        "number",
        "sums",
        "Recoverable after",
        "Deadzone truncation as a share of the corrected error; likewise.",
        formula="‖e_dz‖² / ‖x̂ − x‖²",
        source=_PAPER,
        unit="share",
        worse="high",
    ),
    Column(
        "irreducible",
        "number",
        "sums",
        "Irreducible after",
        "Grid noise as a share of the corrected error; likewise.",
        formula="‖e_grid‖² / ‖x̂ − x‖²",
        source=_PAPER,
        unit="share",
        worse="high",
    ),
)

IDENTITY_COLUMNS = tuple(column.name for column in ROW_COLUMNS if column.of == "identity")
CHOICE_COLUMNS = tuple(column.name for column in ROW_COLUMNS if column.of == "choice")
#: Columns of tensors.csv before and after the corrections'.
CSV_COLUMNS = tuple(c.name for c in ROW_COLUMNS if c.of in ("identity", "sums"))
#: Columns that are never null.
REQUIRED = ("layer", "operand", "gemm", "status")
STATUSES = ("ok", "exact", "zero", "nonfinite", "not_observed")

_BY_NAME = {column.name: column for column in ROW_COLUMNS}
_OF_CORRECTIONS = {column.name: column for column in CORRECTION_COLUMNS}


def column_of(key: str) -> Column | None:
    """What a key of a row is; None for one that is no column."""
    quantity, colon, _ = key.partition(":")
    return _OF_CORRECTIONS.get(quantity) if colon else _BY_NAME.get(key)


def corrected_column(quantity: str, correction: str) -> str:
    """The column of a quantity after a correction: `mse_ratio:mbs`."""
    return f"{quantity}:{correction}"


def correction_of(key: str, quantity: str = "mse_ratio") -> str | None:
    """The correction whose `quantity` a column holds; None for any other column."""
    head, colon, name = key.partition(":")
    return name if colon and head == quantity else None


def finite(value: object) -> float | None:
    """The number, or None if it is none, NaN or infinite."""
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
        return None
    return float(value) if math.isfinite(value) else None


def key_of(row: Row) -> Key:
    """A row's identity."""
    return row["layer"], row["operand"], row["gemm"]
