"""What a CPU kernel is compiled for, as a numba type: one cache entry per variant."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numba import types
from numba.extending import NativeValue, models, register_model, typeof_impl, unbox

from mxdiag.quantize.sources import digest_of, sources_of


@dataclass(frozen=True, slots=True)
class Dtype:
    """A stored element type as the kernels see it.

    `overflow` is the smallest float32 bit pattern of a magnitude that is not finite once the
    element has been widened; `mantissa_bits` and `emin` describe its rounding.
    """

    name: str
    bits: int
    overflow: int
    mantissa_bits: int
    emin: int

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.bits // 8


DTYPES = {
    dtype.name: dtype
    for dtype in (
        Dtype("float32", 32, overflow=0x7F800000, mantissa_bits=23, emin=-126),
        Dtype("bfloat16", 16, overflow=0x7F800000, mantissa_bits=7, emin=-126),
        # A half-precision infinity widens to 2^16, above every finite value.
        Dtype("float16", 16, overflow=0x47800000, mantissa_bits=10, emin=-14),
    )
}


#: Run-time settings of a kernel, int64: the scale rule's carry for E2M1 and for E4M3; the smallest
#: magnitude bits that are not finite; NVFP4's scale of the tensor and its inverse as float32 bits.
SETTINGS = ("carry", "carry_e4m3", "overflow", "tensor_scale", "inverse_tensor_scale")


@dataclass(frozen=True, slots=True)
class Variant:
    """Everything a kernel's code depends on; all else is a run-time argument.

    Attributes
    ----------
    dtype
        Name of the stored element type, a key of `DTYPES`.
    task
        What is done with a strip: "measure", "amax", "decode", "encode", "inject".
    covers
        Whether the scale rule never gives s < amax / 6: nothing saturates and <e_dz, e_scale> = 0.
    row_tokens
        Whether to keep sums for every row of the tile (a token is an index along K).
    corrections
        What to measure in the same pass: ("of", alpha), ("mbs", size, None), ("mbs", size, alpha)
        for the fallback inside, ("scale:mse", whether the rule is rceil), ("scale:m", bits),
        ("nvfp4",), ("mxfp8",).
    """

    dtype: str
    task: str
    covers: bool = False
    row_tokens: bool = False
    corrections: tuple[tuple[Any, ...], ...] = ()


class VariantType(types.Opaque):
    """numba type of one `Variant`; its name holds a digest of the kernels' source.

    numba keys its disk cache by the file of the compiled function alone; with the digest, a change
    in any module that emits code is a different signature, and nothing stale is ever loaded.
    """

    def __init__(self, variant: Variant, digest: str) -> None:
        self.variant = variant
        self.digest = digest
        super().__init__(name=f"{variant}@{digest}")


register_model(VariantType)(models.OpaqueModel)


#: Modules whose compiled loops are cached; what they import, directly or not, makes up the kernels.
_LOOPS = ("mxdiag.quantize.cpu.measure_loops", "mxdiag.quantize.cpu.write_loops")


def kernel_sources() -> list[Path]:
    """Every source that a compiled loop depends on, found by following imports."""
    return sources_of(*_LOOPS)


def source_digest() -> str:
    """Digest of the kernels' sources."""
    return digest_of(kernel_sources())


_DIGEST = source_digest()


@functools.cache
def _variant_type(variant: Variant) -> VariantType:
    return VariantType(variant, _DIGEST)


@typeof_impl.register(Variant)
def _typeof_variant(value: Variant, context: Any) -> VariantType:
    return _variant_type(value)


@unbox(VariantType)
def _unbox_variant(kind: VariantType, value: Any, context: Any) -> NativeValue:
    return NativeValue(context.context.get_dummy_value())
