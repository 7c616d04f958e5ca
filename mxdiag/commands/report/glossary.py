"""What each quantity means: the text behind every hover of the report, as data.

Formulas follow `mxdiag.decomposition`; e = Q(x) - x, the norms run over finite blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from mxdiag.run.columns import CORRECTION_COLUMNS, ROW_COLUMNS, Column

_PAPER = "arXiv 2605.20402"


@dataclass(frozen=True, slots=True)
class Term:
    """One explained quantity.

    Attributes
    ----------
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

    title: str
    meaning: str
    formula: str = ""
    source: str = "mxdiag"
    unit: str = ""
    worse: str = ""


def _term(column: Column) -> Term:
    """What the report says of a column."""
    return Term(
        column.title, column.meaning, column.formula, column.source, column.unit, column.worse
    )


#: Of the columns, and of what else the report shows.
TERMS: dict[str, Term] = {
    **{column.name: _term(column) for column in ROW_COLUMNS if column.of != "detail"},
    "accumulated": Term(
        "Accumulated scale bias",
        "If each layer's δ were independent and uniform in [0, 1), the sum over L layers would "
        "spread by √(L/12) octaves. Measured: the variances of the layers' δ added up.",
        "σ(Σδ) = √(Σ var δ)  against  √(L/12)",
        _PAPER,
        "octaves",
    ),
    "mse_ratio": _term(CORRECTION_COLUMNS[0]),
    "floor": Term(
        "Floor",
        "MSE ratio that an ideal scale would reach.",
        "recoverable + irreducible",
        _PAPER,
        "ratio",
    ),
    "kl_mean": Term(
        "KL",
        "Mean over tokens of the divergence of the quantized from the reference policy.",
        "KL(p_ref ‖ p_quant)",
        unit="nats",
        worse="high",
    ),
    "agreement": Term(
        "Top-1 agreement", "Share of tokens whose likeliest next token is unchanged."
    ),
    "entropy": Term("Entropy", "Mean entropy of the next-token distribution.", unit="nats"),
    "t_eff": Term(
        "Effective temperature",
        "Measured: the T that best maps reference to quantized logits. "
        "Predicted from the variance of the logit error.",
        "argmin_T KL(p_quant ‖ softmax(z_ref / T));  √(1 + 2σ_η² / Var Δℓ)",
        _PAPER,
    ),
    "cosine": Term(
        "Gradient cosine",
        "Cosine between the weight gradients with and without quantization.",
        "⟨g_quant, g_ref⟩ / (‖g_quant‖ ‖g_ref‖)",
        worse="low",
    ),
    "gradient_snr": Term(
        "Gradient SNR",
        "Signal to noise of the weight gradients, in dB.",
        "10 log₁₀(‖g_ref‖² / ‖g_quant − g_ref‖²)",
        unit="dB",
        worse="low",
    ),
    "routing": Term(
        "Rerouted", "Share of the choices of experts that are not the reference's.", unit="share"
    ),
    "log_ratio": Term(
        "Log ratio",
        "Logarithm of a token's importance ratio w, trainer over rollout policy. Outside clip: the "
        "share of tokens whose w a clipped objective would cut.",
        "log w = log π_ref − log π_quant",
        unit="nats",
    ),
    "ess": Term(
        "Effective samples",
        "Effective sample size of the importance ratios, as a share of the tokens.",
        "(Σ w)² / (n Σ w²)",
        worse="low",
    ),
    "attribution": Term(
        "Attribution",
        "Shapley values of the three components: the mean marginal effect of each over all orders "
        "of adding them. They add up to the total; a part may be negative.",
        "Σ parts = v(all) − v(none)",
    ),
}

#: Metrics that the maps offer, before the corrections' MSE ratios.
MAP_METRICS = (
    "sqnr_db",
    "reducible",
    "recoverable",
    "irreducible",
    "deadzone_frac",
    "underflow_frac",
    "delta_mean",
    "delta_std",
    "rel_mse",
    "sqnr_db_token",
    "recoverable_token",
    "top_token_share",
    "cos_scale_grid",
    "gain",
)
