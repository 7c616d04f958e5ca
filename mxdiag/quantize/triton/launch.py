"""The Triton backend's entry points, by the names that every backend has."""

from __future__ import annotations

from mxdiag.quantize.triton.measure import measure
from mxdiag.quantize.triton.write import encode, inject, quantize_dequantize

__all__ = ["encode", "inject", "measure", "quantize_dequantize"]
