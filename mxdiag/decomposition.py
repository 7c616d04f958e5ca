"""The exact split of the MXFP4 error, as additive statistics and the quantities derived from them.

    e = Q(x) - x = e_scale + e_dz + e_grid
    e_scale = Q(x) - Q*(x)
    e_dz    = Q*(x) - x  where x != 0 and Q*(x) = 0
    e_grid  = Q*(x) - x  elsewhere

Q uses the shared power-of-two scale, Q* the ideal scale amax / 6. Source: arXiv 2605.20402. A
`Decomposition` holds sums only, so it merges over chunks, calls, batches and ranks with `+`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mxdiag.quantize import dispatch
from mxdiag.quantize.sums import CORRECTION_FIELDS, COUNT_FIELDS, DELTA_BINS, SUM_FIELDS, Sums
from mxdiag.quantize.token_sums import TokenSums

if TYPE_CHECKING:
    from mxdiag.quantize.corrections.base import Correction, Whole
    from mxdiag.quantize.dispatch import Array

#: The derived quantities that a row of results carries, in the order of its columns.
METRICS = (
    "sqnr_db",
    "rel_mse",
    "reducible",
    "recoverable",
    "irreducible",
    "scale_energy",
    "deadzone_energy",
    "grid_energy",
    "cross_scale_grid",
    "cross_scale_deadzone",
    "cos_scale_grid",
    "closure_residual",
    "deadzone_frac",
    "underflow_frac",
    "zero_frac",
    "saturated_frac",
    "nonfinite",
    "delta_mean",
    "delta_std",
    "gain",
    "amax",
    "rms",
    "sqnr_db_token",
    "recoverable_token",
    "top_token_share",
)

#: Squares below it have lost bits, or all of them: only float64 values below 2^-480 get there.
_LEAST_ENERGY = 2.0**-960

_SUM_AT = {name: i for i, name in enumerate(SUM_FIELDS)}
_COUNT_AT = {name: i for i, name in enumerate(COUNT_FIELDS)}


def _ratio(numerator: float, denominator: float) -> float | None:
    known = denominator > _LEAST_ENERGY and math.isfinite(numerator) and math.isfinite(denominator)
    return numerator / denominator if known else None


def _decibels(ratio: float | None) -> float | None:
    return 10 * math.log10(ratio) if ratio else None


@dataclass(slots=True)
class Decomposition:
    """Additive statistics of one operand under one scale rule, and what follows from them.

    Every ratio is None where it is undefined: no element, no energy, no error, or float64 values so
    small that their squares underflow (`underflows`).
    """

    scale_rule: str
    sums: np.ndarray
    counts: np.ndarray
    amax: float
    delta_hist: np.ndarray
    tokens: TokenSums | None = None
    corrections: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def empty(cls, scale_rule: str) -> Decomposition:
        """The neutral element of `+`: nothing observed."""
        return cls(
            scale_rule,
            np.zeros(len(SUM_FIELDS)),
            np.zeros(len(COUNT_FIELDS), dtype=np.int64),
            0.0,
            np.zeros(DELTA_BINS, dtype=np.int64),
        )

    @classmethod
    def of(cls, sums: Sums, scale_rule: str) -> Decomposition:
        """From a backend's raw sums."""
        tokens = None if sums.tokens is None else TokenSums.of(sums.tokens)
        return cls(
            scale_rule,
            sums.sums,
            sums.counts,
            sums.amax,
            sums.delta_hist,
            tokens,
            sums.corrections,
        )

    def __add__(self, other: Decomposition) -> Decomposition:
        if self.scale_rule != other.scale_rule:
            raise ValueError(f"cannot add {self.scale_rule} to {other.scale_rule} statistics")
        names = [*self.corrections, *(n for n in other.corrections if n not in self.corrections)]
        nothing = np.zeros(len(CORRECTION_FIELDS))
        return Decomposition(
            self.scale_rule,
            self.sums + other.sums,
            self.counts + other.counts,
            max(self.amax, other.amax),
            self.delta_hist + other.delta_hist,
            self.tokens + other.tokens
            if self.tokens and other.tokens
            else self.tokens or other.tokens,
            {
                name: self.corrections.get(name, nothing) + other.corrections.get(name, nothing)
                for name in names
            },
        )

    def pack(self) -> np.ndarray:
        """The statistics as one float64 vector of `packed_fields`, which ranks can reduce.

        Vectors of equal fields add up with `+`, but for those of `merges_by_maximum`. Counts are
        exact up to 2^53.
        """
        tokens = self.tokens
        parts: list[Any] = [self.sums, self.counts, [self.amax], self.delta_hist]
        if tokens is not None:
            parts.append([tokens.count, tokens.sqnr_db, tokens.recoverable, tokens.top_energy])
        return np.concatenate([*parts, *self.corrections.values()], dtype=np.float64)

    @classmethod
    def unpack(
        cls,
        vector: np.ndarray,
        scale_rule: str,
        corrections: Sequence[str] = (),
        *,
        tokens: bool = False,
    ) -> Decomposition:
        """The statistics that `pack` made a vector of, or a reduction of several.

        Raises
        ------
        ValueError
            If the vector is not as long as its fields.
        """
        sizes = [len(SUM_FIELDS), len(COUNT_FIELDS), 1, DELTA_BINS, 4 * tokens]
        sizes += [len(CORRECTION_FIELDS)] * len(corrections)
        if vector.shape != (sum(sizes),):
            raise ValueError(f"a vector of shape {vector.shape} for {sum(sizes)} fields")
        parts = [np.array(part) for part in np.split(vector, np.cumsum(sizes)[:-1])]
        sums, counts, amax, histogram, per_token, *corrected = parts
        found = None
        if tokens:
            count, *ratios = per_token.tolist()
            found = TokenSums(int(count), *ratios)
        return cls(
            scale_rule,
            sums,
            counts.astype(np.int64),
            float(amax[0]),
            histogram.astype(np.int64),
            found,
            dict(zip(corrections, corrected, strict=True)),
        )

    def sum(self, name: str) -> float:
        """One of SUM_FIELDS."""
        return self.sums.item(_SUM_AT[name])

    def count(self, name: str) -> int:
        """One of COUNT_FIELDS."""
        return self.counts.item(_COUNT_AT[name])

    def _share(self, *names: str) -> float | None:
        return _ratio(sum(self.sum(name) for name in names), self.sum("e2"))

    def _fraction(self, name: str) -> float | None:
        return _ratio(self.count(name), self.count("counted"))

    @property
    def _is_finite(self) -> bool:
        return all(map(math.isfinite, self.sums.tolist()))

    @property
    def status(self) -> str:
        """`ok`, `exact` (Q reproduces x), `zero`, `nonfinite` or `not_observed`."""
        if self.count("numel") == 0:
            return "not_observed"
        if self.count("nonfinite_blocks") or not self._is_finite:
            return "nonfinite"
        if self.sum("x2") == 0 and not self.underflows:
            return "zero"
        return "ok" if self.sum("e2") > 0 or self.underflows else "exact"

    @property
    def underflows(self) -> bool:
        """Whether the energy is too small for float64: x is not zero, but no ratio is known."""
        return self.amax > 0 and self.sum("x2") < _LEAST_ENERGY

    @property
    def numel(self) -> int:
        """Elements seen, those of non-finite blocks included."""
        return self.count("numel")

    @property
    def sqnr_db(self) -> float | None:
        """Signal to quantization noise, 10 log10(||x||^2 / ||e||^2), in dB."""
        return _decibels(_ratio(self.sum("x2"), self.sum("e2")))

    @property
    def rel_mse(self) -> float | None:
        """||e||^2 / ||x||^2."""
        return _ratio(self.sum("e2"), self.sum("x2"))

    @property
    def reducible(self) -> float | None:
        """1 - (||e_dz||^2 + ||e_grid||^2) / ||e||^2: what an ideal scale would remove. May be
        negative: a power-of-two scale can beat amax / 6.
        """
        rest = self._share("deadzone2", "grid2")
        return None if rest is None else 1 - rest

    @property
    def recoverable(self) -> float | None:
        """||e_dz||^2 / ||e||^2: what recovering zeroed values would remove."""
        return self._share("deadzone2")

    @property
    def irreducible(self) -> float | None:
        """||e_grid||^2 / ||e||^2: the element grid itself."""
        return self._share("grid2")

    @property
    def scale_energy(self) -> float | None:
        """||e_scale||^2 / ||e||^2; above 1 where it cancels against the grid error."""
        return self._share("scale2")

    @property
    def deadzone_energy(self) -> float | None:
        """||e_dz||^2 / ||e||^2."""
        return self._share("deadzone2")

    @property
    def grid_energy(self) -> float | None:
        """||e_grid||^2 / ||e||^2."""
        return self._share("grid2")

    @property
    def cross_scale_grid(self) -> float | None:
        """2 <e_scale, e_grid> / ||e||^2."""
        return self._share("scale_grid", "scale_grid")

    @property
    def cross_scale_deadzone(self) -> float | None:
        """2 <e_scale, e_dz> / ||e||^2; exactly 0 under rceil."""
        return self._share("scale_deadzone", "scale_deadzone")

    @property
    def cos_scale_grid(self) -> float | None:
        """Cosine between e_scale and e_grid."""
        norms = math.sqrt(self.sum("scale2")) * math.sqrt(self.sum("grid2"))
        return _ratio(self.sum("scale_grid"), norms)

    @property
    def closure_residual(self) -> float | None:
        """(parts and cross terms re-added - ||e||^2) / (||e_scale||^2 + ||e_dz||^2 + ||e_grid||^2).

        ||e||^2 is accumulated on its own, so this checks the split: within 1e-12 for the
        reference and 1e-6 for the fast paths.
        """
        if self.numel == 0:
            return None
        if not self._is_finite or self.underflows:  # squares that float64 cannot hold
            return None
        parts = [self.sum(name) for name in ("scale2", "deadzone2", "grid2")]
        crosses = [2 * self.sum(name) for name in ("scale_grid", "scale_deadzone")]
        residual = math.fsum([*parts, *crosses, -self.sum("e2")])
        return residual / math.fsum(parts) if any(parts) else abs(residual)

    @property
    def deadzone_frac(self) -> float | None:
        """Share of elements with x != 0 and Q*(x) = 0, that is |x| <= amax / 24."""
        return self._fraction("deadzone")

    @property
    def underflow_frac(self) -> float | None:
        """Share of elements with x != 0 and Q(x) = 0."""
        return self._fraction("underflow")

    @property
    def zero_frac(self) -> float | None:
        """Share of elements with x = 0."""
        return self._fraction("zero")

    @property
    def saturated_frac(self) -> float | None:
        """Share of elements with |x| > 6 s_b, which Q cuts to 6 s_b."""
        return self._fraction("saturated")

    @property
    def nonfinite(self) -> int:
        """Blocks that hold a NaN or an infinity; they enter no other quantity."""
        return self.count("nonfinite_blocks")

    @property
    def delta_mean(self) -> float | None:
        """Mean over blocks of delta_b = log2(s_b / s*_b), in octaves."""
        return self.sum("delta") / self.count("blocks") if self.count("blocks") else None

    @property
    def delta_std(self) -> float | None:
        """Standard deviation over blocks of delta_b, in octaves."""
        mean, blocks = self.delta_mean, self.count("blocks")
        if mean is None:
            return None
        return math.sqrt(max(0.0, self.sum("delta2") / blocks - mean * mean))

    @property
    def gain(self) -> float | None:
        """<Q(x), x> / ||x||^2: how much of x survives along itself."""
        return _ratio(self.sum("qx"), self.sum("x2"))

    @property
    def rms(self) -> float | None:
        """Root mean square of x."""
        mean_square = _ratio(self.sum("x2"), self.count("counted"))
        return None if mean_square is None or self.underflows else math.sqrt(mean_square)

    @property
    def sqnr_db_token(self) -> float | None:
        """Mean over tokens of the token's SQNR, in dB."""
        tokens = self.tokens
        return tokens.sqnr_db / tokens.count if tokens and tokens.count else None

    @property
    def recoverable_token(self) -> float | None:
        """Mean over tokens of the token's recoverable share."""
        tokens = self.tokens
        return tokens.recoverable / tokens.count if tokens and tokens.count else None

    @property
    def top_token_share(self) -> float | None:
        """Energy share of the token with the most energy."""
        return _ratio(self.tokens.top_energy, self.sum("x2")) if self.tokens else None

    def mse_ratio(self, correction: str) -> float | None:
        """||x_c - x||^2 / ||Q(x) - x||^2 for an evaluated correction."""
        corrected = self.corrections[correction][CORRECTION_FIELDS.index("e2")]
        return _ratio(float(corrected), self.sum("e2"))

    def metrics(self) -> dict[str, float | int | None]:
        """The derived quantities in METRICS order, for a row of results."""
        if self.status == "not_observed":
            return dict.fromkeys(METRICS)
        return {name: getattr(self, name) for name in METRICS}


#: What TokenSums holds, in the order in which it is packed.
_TOKEN_SUMS = ("count", "sqnr_db", "recoverable", "top_energy")


def packed_fields(corrections: Sequence[str] = (), *, tokens: bool = False) -> list[str]:
    """What each element of `Decomposition.pack` is, for these corrections, with or without tokens.

    `SUM_FIELDS`, `COUNT_FIELDS`, `amax`, `delta_hist:0` ..., `token:count` ..., and `e2:mbs` ...
    """
    fields = [*SUM_FIELDS, *COUNT_FIELDS, "amax", *(f"delta_hist:{i}" for i in range(DELTA_BINS))]
    if tokens:
        fields += [f"token:{name}" for name in _TOKEN_SUMS]
    return [*fields, *(f"{field}:{name}" for name in corrections for field in CORRECTION_FIELDS)]


def merges_by_maximum(fields: Sequence[str]) -> np.ndarray:
    """Boolean mask: which packed fields merge by maximum; the others add up."""
    return np.array([field in ("amax", "token:top_energy") for field in fields])


def total(decompositions: Iterable[Decomposition], scale_rule: str) -> Decomposition:
    """Their sum; the neutral element if there is none."""
    result = Decomposition.empty(scale_rule)
    for decomposition in decompositions:
        result = result + decomposition
    return result


def decompose(
    tensor: Array,
    axis: int = -1,
    scale_rule: str = "rceil",
    *,
    tokens: bool = False,
    corrections: Sequence[Correction] = (),
    whole: Whole | None = None,
    backend: str = "auto",
) -> Decomposition:
    """Split the MXFP4 error of a tensor into scale bias, deadzone truncation and grid noise.

    Parameters
    ----------
    tensor
        numpy array or torch tensor of at least one axis: float16, bfloat16, float32 or float64.
    axis
        The axis that is contracted in the GEMM: blocks of 32 run along it, the last one padded.
    scale_rule
        `rceil`, `floor`, `ceil` or `even`.
    tokens
        For [tokens, features]: also the means of per-token ratios.
    corrections
        Corrections to evaluate in the same pass (see `mxdiag.quantize.corrections.registry`).
    whole
        The matrix that `tensor` is cut from, where it is a piece: the sum over the pieces is then
        what the whole gives, for every correction.
    backend
        `auto`, `reference`, `cpu` or `triton`.

    Returns
    -------
    Decomposition

    Examples
    --------
    >>> import numpy as np, mxdiag
    >>> d = mxdiag.decompose(np.random.default_rng(0).standard_normal((4096, 4096), np.float32))
    >>> round(d.sqnr_db, 1), round(d.recoverable, 2), round(d.irreducible, 2)
    (18.7, 0.02, 0.75)
    """
    sums = dispatch.measure(
        tensor,
        axis,
        scale_rule,
        tokens=tokens,
        corrections=corrections,
        whole=whole,
        backend=backend,
    )
    return Decomposition.of(sums, scale_rule)
