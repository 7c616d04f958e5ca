"""Per-token ratios, reduced to sums that add over chunks, calls and batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mxdiag.quantize.sums import TOKEN_FIELDS


@dataclass(slots=True)
class TokenSums:
    """Sums over tokens of per-token ratios. Tokens without error or without energy are left out."""

    count: int = 0
    sqnr_db: float = 0.0
    recoverable: float = 0.0
    top_energy: float = 0.0

    @classmethod
    def of(cls, tokens: np.ndarray) -> TokenSums:
        """From [n_tokens, TOKEN_FIELDS] energies."""
        columns = np.ascontiguousarray(tokens.T)
        energy, error = (columns[TOKEN_FIELDS.index(name)] for name in ("x2", "e2"))
        x2, e2, deadzone2 = columns.compress((energy > 0) & (error > 0), axis=1)
        return cls(
            count=len(x2),
            sqnr_db=float(np.add.reduce(10 * np.log10(x2 / e2))),
            recoverable=float(np.add.reduce(deadzone2 / e2)),
            top_energy=float(np.maximum.reduce(energy, initial=0.0)),
        )

    def __add__(self, other: TokenSums) -> TokenSums:
        return TokenSums(
            self.count + other.count,
            self.sqnr_db + other.sqnr_db,
            self.recoverable + other.recoverable,
            max(self.top_energy, other.top_energy),
        )
