"""Chooses the backend for an array and brings the array into the backends' canonical form.

Accepts numpy arrays (float16, float32, float64, ml_dtypes.bfloat16), torch tensors, and lists of
numbers, which are read as numpy reads them. torch is imported only where a torch tensor arrives or
the reference is asked for: streaming a checkpoint stays off it.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import ml_dtypes
import numpy as np

from mxdiag.errors import TensorError, UsageError
from mxdiag.formats import ScaleRule, scale_rule
from mxdiag.quantize.corrections.base import Context, Correction, Whole
from mxdiag.quantize.sums import Sums

if TYPE_CHECKING:
    import torch

    Array = np.ndarray | torch.Tensor

BACKENDS = ("auto", "reference", "cpu", "triton")
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_KINDS = "Pass a numpy array or a torch tensor of float16, bfloat16, float32 or float64 values"
_KERNEL_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), _BFLOAT16)


def is_torch(x: object) -> TypeGuard[torch.Tensor]:
    """Whether x is a torch tensor, found out without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def accepted(x: object) -> Array:
    """X as a dense array or tensor whose values are here; what numpy reads becomes a numpy array.

    Raises
    ------
    TensorError
        If it is none: sparse, nested, masked, quantized, on the meta device, or no array at all.
    """
    if is_torch(x):
        return _dense(x)
    if isinstance(x, np.ma.MaskedArray):
        raise TensorError("cannot quantize a masked array", advice="Pass x.filled(0.0)")
    if not isinstance(x, np.ndarray):
        x = _read(x)
    return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))


def _read(x: object) -> np.ndarray:
    try:
        array = np.asarray(x)
    except (ValueError, TypeError, RuntimeError) as error:
        text = str(error).partition(". ")[0]
        raise TensorError(f"cannot read a {type(x).__name__}: {text}", advice=_KINDS) from None
    if array.dtype.kind in "OSUVM":
        raise TensorError(f"cannot quantize a {type(x).__name__}", advice=_KINDS)
    return array.astype(np.float64) if array.dtype.kind in "iu" else array


def _dense(x: torch.Tensor) -> torch.Tensor:
    import torch

    what = advice = None
    if x.is_nested:
        what, advice = "a nested tensor", "Pass its tensors one by one"
    elif x.layout != torch.strided:
        what, advice = f"a {str(x.layout).removeprefix('torch.')} tensor", "Pass x.to_dense()"
    elif x.is_quantized:
        what, advice = f"a tensor that is already {x.dtype}", "Pass x.dequantize()"
    elif x.is_meta:
        what, advice = "a tensor on the meta device: it holds no values", "Load its values first"
    if what is not None:
        raise TensorError(f"cannot quantize {what}", advice=advice)
    return x.resolve_neg()


def to_numpy(x: Array) -> np.ndarray:
    """The same values as a numpy array, without a copy for a CPU tensor; bfloat16 is ml_dtypes'."""
    if not is_torch(x):
        return np.asarray(x)
    import torch

    if x.requires_grad or not x.is_cpu:
        x = x.detach().cpu()
    if x.dtype == torch.bfloat16:
        return _values(x.view(torch.uint16)).view(_BFLOAT16)
    return _values(x)


def _values(x: torch.Tensor) -> np.ndarray:
    try:
        return x.numpy()
    except (RuntimeError, TypeError) as error:  # a subclass that stands for other values
        text = str(error).partition(". ")[0]
        raise TensorError(
            f"cannot read the values of a {type(x).__name__}: {text}",
            advice="Pass a plain tensor",
        ) from None


def to_torch(x: Array) -> torch.Tensor:
    """The same values as a torch tensor, without a copy where the strides allow it."""
    import torch

    if is_torch(x):
        return x
    array = np.asarray(x)
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def dtype_name(x: Array) -> str:
    """The dtype's name in numpy's and torch's common spelling: float32, bfloat16, ..."""
    return str(x.dtype).removeprefix("torch.")


def choose_backend(x: Array, backend: str) -> str:
    """The backend that will measure x: `auto` is triton on a GPU, the CPU kernel elsewhere, and
    the reference for float64, which no kernel reads.

    Raises
    ------
    UsageError
        If the backend is unknown.
    TensorError
        If the dtype cannot be quantized.
    """
    if backend not in BACKENDS:
        raise UsageError(f"unknown backend {backend!r}", advice=f"Use one of {', '.join(BACKENDS)}")
    name = dtype_name(x)
    if name == "float64":
        return "reference"
    if name not in ("float32", "float16", "bfloat16"):
        raise TensorError(
            f"cannot quantize a tensor of dtype {name}",
            advice="Pass float16, bfloat16, float32 or float64 values",
        )
    if backend != "auto":
        return backend
    on_gpu = is_torch(x) and x.device.type == "cuda"
    return "triton" if on_gpu else "cpu"


def canonical(x: Array, axis: int) -> Array:
    """X as [outer, K, inner] with K the blocked axis; a view where the strides allow one.

    Raises
    ------
    TensorError
        If x has no such axis.
    """
    shape = tuple(x.shape)
    if not shape:
        raise TensorError("cannot block a 0-dimensional tensor", advice="Pass at least one axis")
    try:
        axis = operator.index(axis)
    except TypeError:
        raise TensorError(f"axis must be an integer, not {axis!r}") from None
    if not -len(shape) <= axis < len(shape):
        raise TensorError(
            f"axis {axis} is out of range for shape {list(shape)}",
            advice=f"Use -{len(shape)} to {len(shape) - 1}",
        )
    axis %= len(shape)
    return x.reshape(math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))


def _module(name: str) -> Any:
    if name == "cpu":
        from mxdiag.quantize.cpu import launch as cpu

        return cpu
    try:
        from mxdiag.quantize.triton import launch as triton
    except ModuleNotFoundError:
        raise UsageError(
            "the triton backend needs the package triton", advice="Install it, or use --backend cpu"
        ) from None
    return triton


def measure(
    x: Array,
    axis: int = -1,
    rule: str | ScaleRule = "rceil",
    *,
    tokens: bool = False,
    backend: str = "auto",
    corrections: Sequence[Correction] = (),
    whole: Whole | None = None,
) -> Sums:
    """Raw sums of x in MXFP4 blocks along `axis`.

    Parameters
    ----------
    x
        Values of any shape with at least one axis.
    tokens
        Also return sums per token. x must be 2-D [tokens, features]; either axis may be blocked.
    corrections
        Corrections to evaluate in the same pass.
    whole
        The matrix that x is cut from, where it is a piece: scales of a tensor and random draws go
        by it. Sums of all pieces are then the whole's.
    """
    x = accepted(x)
    for correction in corrections:
        if not isinstance(correction, Correction):
            raise UsageError(
                f"{correction!r} is no correction",
                advice="Pass mxdiag.quantize.corrections.registry.parse_corrections('mbs,of')",
            )
    if tokens and len(x.shape) != 2:
        raise TensorError(f"token sums need a 2-D tensor, not {len(x.shape)}-D")
    if whole is not None and len(x.shape) != 2:
        raise TensorError(f"a piece of a matrix is 2-D, not {len(x.shape)}-D")
    rule, chosen = scale_rule(rule), choose_backend(x, backend)
    blocks = canonical(to_numpy(x) if chosen == "cpu" else x, axis)
    unfused = corrections
    if chosen == "cpu":
        cpu = _module("cpu")
        fused = [correction for correction in corrections if cpu.is_fused(correction)]
        unfused = [correction for correction in corrections if not cpu.is_fused(correction)]
        amax = None if whole is None else whole.amax
        sums = cpu.measure(blocks, rule, tokens=tokens, corrections=fused, amax=amax)
    elif chosen == "triton":
        sums = _module("triton").measure(to_torch(blocks), rule, tokens=tokens)
    else:
        from mxdiag.quantize import reference

        sums = reference.measure(to_torch(blocks), rule, tokens=tokens)
    if unfused:
        from mxdiag.quantize.corrections.evaluate import evaluate_corrections

        context = None if whole is None else _context(blocks, axis % 2, whole)
        sums.corrections |= evaluate_corrections(to_torch(blocks), rule, unfused, context=context)
    sums.corrections = {c.name: sums.corrections[c.name] for c in corrections}
    return sums


def finite_energy(x: Array, axis: int) -> tuple[float, int]:
    """||x||^2 over the finite MX blocks of a matrix along `axis`, and their elements."""
    from mxdiag.quantize.corrections import evaluate

    return evaluate.block_energy(to_torch(canonical(accepted(x), axis)))


def _context(blocks: Array, axis: int, whole: Whole) -> Context:
    """Where a canonical piece [outer, K, inner] lies in the whole matrix."""
    (rows, columns), (row, column) = whole.shape, whole.start
    sizes, start = (1, rows, columns), (0, row, column)
    if axis == 1:
        sizes, start = (rows, columns, 1), (row, column, 0)
    return Context(blocks.shape[1], sizes, start, whole.amax, whole.rms)


def first_use(backend: str) -> bool:
    """Whether the first measurement on a CPU will compile its kernels, which takes seconds."""
    return backend in ("auto", "cpu") and _module("cpu").needs_compiling()


def _written(x: Array, axis: int, backend: str, entry: str, *args: Any) -> Array:
    """Run a writing entry point and give back an array of x's kind, shape and dtype."""
    x = accepted(x)
    chosen, shape = choose_backend(x, backend), tuple(x.shape)
    blocks = canonical(x, axis)
    if chosen == "cpu":
        values = getattr(_module("cpu"), entry)(to_numpy(blocks), *args)
    elif chosen == "triton":
        values = getattr(_module("triton"), entry)(to_torch(blocks), *args)
    else:
        from mxdiag.quantize import reference

        if entry == "inject":
            values = reference.inject(to_torch(blocks), args[0], 1, args[1])
        else:
            values = reference.quantize_dequantize(to_torch(blocks), 1, args[0])
    if is_torch(x):
        return to_torch(values).to(x.device).reshape(shape)
    return to_numpy(values).reshape(shape)


def quantize_dequantize(
    x: Array, axis: int = -1, scale_rule: str = "rceil", *, backend: str = "auto"
) -> Array:
    """Q(x): x through MXFP4 and back, in blocks of 32 along `axis`.

    Parameters
    ----------
    x
        numpy array or torch tensor of at least one axis: float16, bfloat16, float32 or float64; or
        a list of numbers, which becomes a numpy array.
    axis
        The axis that is contracted in the GEMM: blocks run along it.
    scale_rule
        `rceil`, `floor`, `ceil` or `even`.

    Returns
    -------
    The decoded values in x's kind, shape and dtype. A block that holds a NaN or an infinity is NaN;
    a decoded value beyond the dtype's range (float16 above 65504) becomes an infinity.
    """
    return _written(x, axis, backend, "quantize_dequantize", _rule(scale_rule))


def inject(
    x: Array,
    components: frozenset[str],
    axis: int = -1,
    scale_rule: str = "rceil",
    *,
    backend: str = "auto",
) -> Array:
    """X plus the chosen error components (`scale`, `deadzone`, `grid`), rounded once to x's dtype.

    All three give exactly Q(x), none gives exactly x; see `mxdiag.quantize.reference.inject`.
    """
    return _written(x, axis, backend, "inject", frozenset(components), _rule(scale_rule))


def _rule(name: str | ScaleRule) -> ScaleRule:
    return scale_rule(name)
