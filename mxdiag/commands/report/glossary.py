"""What each quantity means: the text behind every hover of the report, as data.

Formulas follow `mxdiag.decomposition`; e = Q(x) - x, the norms run over finite blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

_PAPER = "arXiv 2605.20402"
_OCP = "OCP Microscaling Formats (MX) v1.0"


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


TERMS: dict[str, Term] = {
    "layer": Term("Layer", "The name that the checkpoint gives the weight, without “.weight”."),
    "role": Term("Role", "What the model family calls the projection; “expert.” marks experts."),
    "expert": Term("Expert", "Index of the expert inside its layer."),
    "operand": Term(
        "Operand",
        "W is the weight, A the input activation, G the gradient of the output.",
    ),
    "gemm": Term(
        "GEMM",
        "The product the operand enters. The same tensor is blocked along another axis in each.",
        "fprop Y = X Wᵀ · dgrad dX = dY W · wgrad dW = dYᵀ X",
    ),
    "status": Term(
        "Status",
        "ok; exact: already on the MXFP4 grid; zero: all zero; nonfinite: holds NaN or Inf, "
        "never passes a gate; not_observed: never called, or an expert without a token.",
    ),
    "block_axis": Term(
        "Blocked along", "The contracted axis, along which the blocks of 32 run.", source=_OCP
    ),
    "shape": Term("Shape", "Shape of the measured tensor, summed over calls."),
    "numel": Term("Elements", "Number of measured elements.", unit="count"),
    "dtype": Term("dtype", "Type of the values that were quantized."),
    "calls": Term("Calls", "How often the layer ran on the calibration data.", unit="count"),
    "tokens": Term(
        "Tokens", "Tokens that reached the layer; for an expert, those routed to it.", unit="count"
    ),
    "sqnr_db": Term(
        "SQNR",
        "Signal to quantization noise. Higher is better.",
        "10 log₁₀(‖x‖² / ‖e‖²)",
        unit="dB",
        worse="low",
    ),
    "rel_mse": Term(
        "Relative MSE", "Error energy per signal energy.", "‖e‖² / ‖x‖²", unit="ratio", worse="high"
    ),
    "reducible": Term(
        "Reducible",
        "Scale bias: what an ideal, unrounded block scale would remove, cross term "
        "included. Negative where a power-of-two scale happens to beat amax / 6.",
        "1 − (‖e_dz‖² + ‖e_grid‖²) / ‖e‖²",
        _PAPER,
        "share",
        "high",
    ),
    "recoverable": Term(
        "Recoverable",
        "Deadzone truncation: what bringing back the values cut to zero would remove.",
        "‖e_dz‖² / ‖e‖²",
        _PAPER,
        "share",
        "high",
    ),
    "irreducible": Term(
        "Irreducible",
        "Grid noise: what the E2M1 grid itself costs under an ideal scale.",
        "‖e_grid‖² / ‖e‖²",
        _PAPER,
        "share",
        "high",
    ),
    "scale_energy": Term(
        "Scale energy",
        "Energy of the scale error alone; above 1 where it cancels against grid error.",
        "‖e_scale‖² / ‖e‖²,  e_scale = Q(x) − Q*(x)",
        _PAPER,
        "ratio",
        "high",
    ),
    "deadzone_energy": Term(
        "Deadzone energy",
        "Energy of the deadzone error; equals the recoverable share.",
        "‖e_dz‖² / ‖e‖²,  e_dz = Q*(x) − x where x ≠ 0 and Q*(x) = 0",
        _PAPER,
        "ratio",
        "high",
    ),
    "grid_energy": Term(
        "Grid energy",
        "Energy of the grid error; equals the irreducible share.",
        "‖e_grid‖² / ‖e‖²,  e_grid = Q*(x) − x off the deadzone",
        _PAPER,
        "ratio",
        "high",
    ),
    "cross_scale_grid": Term(
        "Cross scale·grid",
        "Cross term of scale and grid error; negative where they cancel.",
        "2⟨e_scale, e_grid⟩ / ‖e‖²",
        _PAPER,
        "ratio",
    ),
    "cross_scale_deadzone": Term(
        "Cross scale·dz",
        "Cross term of scale and deadzone error; exactly 0 under rceil.",
        "2⟨e_scale, e_dz⟩ / ‖e‖²",
        _PAPER,
        "ratio",
    ),
    "cos_scale_grid": Term(
        "cos scale·grid",
        "Cosine between scale and grid error.",
        "⟨e_scale, e_grid⟩ / (‖e_scale‖ ‖e_grid‖)",
        _PAPER,
        "ratio",
    ),
    "closure_residual": Term(
        "Closure",
        "How far the parts miss the independently summed error; a check of the split.",
        "(Σ parts and cross terms − ‖e‖²) / (‖e_scale‖² + ‖e_dz‖² + ‖e_grid‖²)",
        unit="ratio",
    ),
    "deadzone_frac": Term(
        "Deadzone",
        "Share of elements that an ideal scale rounds to zero.",
        "x ≠ 0 and |x| ≤ amax / 24",
        _PAPER,
        "share",
        "high",
    ),
    "underflow_frac": Term(
        "Underflow",
        "Share of elements that MXFP4 turns from nonzero to zero.",
        "x ≠ 0 and Q(x) = 0",
        unit="share",
        worse="high",
    ),
    "zero_frac": Term("Zeros", "Share of elements that are zero.", "x = 0", unit="share"),
    "saturated_frac": Term(
        "Saturated",
        "Share of elements beyond the largest grid value.",
        "|x| > 6 s",
        _OCP,
        "share",
        "high",
    ),
    "nonfinite": Term(
        "Non-finite",
        "Blocks that hold a NaN or an infinity. They enter no other number.",
        unit="count",
        worse="high",
    ),
    "delta_mean": Term(
        "δ mean",
        "Mean over blocks of the scale's rounding, in octaves. 0.5 if uniform.",
        "δ = log₂(s / s*),  s* = amax / 6",
        _PAPER,
        "octaves",
        "high",
    ),
    "delta_std": Term(
        "δ std",
        "Spread over blocks of the scale's rounding; 1/√12 = 0.289 if uniform.",
        "std of δ = log₂(s / s*)",
        _PAPER,
        "octaves",
        "high",
    ),
    "gain": Term(
        "Gain",
        "How much of x survives along itself; 1 is unbiased.",
        "⟨Q(x), x⟩ / ‖x‖²",
        unit="ratio",
    ),
    "amax": Term("amax", "Largest absolute value.", "max |x|"),
    "rms": Term("rms", "Root mean square.", "√(‖x‖² / n)"),
    "sqnr_db_token": Term(
        "SQNR per token",
        "Mean over tokens of the token's own SQNR: one loud token cannot hide the rest.",
        "mean over tokens of 10 log₁₀(‖x_t‖² / ‖e_t‖²)",
        unit="dB",
        worse="low",
    ),
    "recoverable_token": Term(
        "Recoverable per token",
        "Mean over tokens of the token's own recoverable share.",
        "mean over tokens of ‖e_dz,t‖² / ‖e_t‖²",
        unit="share",
        worse="high",
    ),
    "top_token_share": Term(
        "Top token",
        "Energy share of the largest token. Near 1, the energy-weighted numbers "
        "describe that token alone.",
        "max ‖x_t‖² / ‖x‖²",
        unit="share",
        worse="high",
    ),
    "recommended": Term("Recommended", "The correction that the default recommendation chose."),
    "reason": Term("Reason", "Why, in one sentence with the numbers."),
    "accumulated": Term(
        "Accumulated scale bias",
        "If each layer's δ were independent and uniform in [0, 1), the sum over L layers would "
        "spread by √(L/12) octaves. Measured: the variances of the layers' δ added up.",
        "σ(Σδ) = √(Σ var δ)  against  √(L/12)",
        _PAPER,
        "octaves",
    ),
    "mse_ratio": Term(
        "MSE ratio",
        "Error energy with the correction over that of plain MXFP4, measured on this tensor. "
        "1 changes nothing, 0 removes everything.",
        "‖x̂ − x‖² / ‖Q(x) − x‖²",
        unit="ratio",
        worse="high",
    ),
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
