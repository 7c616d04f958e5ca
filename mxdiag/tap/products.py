"""Every torch call that multiplies an activation by a tapped weight."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mxdiag.tap.layouts import Equation, UnsupportedProductError
from mxdiag.tap.tensor import name_of, tag_of

_LETTERS = "abcdefghjklmnpqrsuvwxyz"


@dataclass(slots=True)
class Call:
    """One call of a torch function that multiplies an activation by a tapped weight.

    `arguments` holds every argument by position; those at `x_at` and `w_at` are X and W.
    """

    func: Callable[..., Any]
    arguments: list[Any]
    extra: dict[str, Any]
    x_at: int
    w_at: int
    equation: Equation
    bias_at: int | None = None
    offsets: Tensor | None = None  # grouped products: ends of the experts' rows

    @property
    def bias(self) -> Tensor | None:
        """What is added to the product, if anything."""
        at = self.bias_at
        return None if at is None or at >= len(self.arguments) else self.arguments[at]

    def run(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the product with other operands of the same shapes."""
        arguments = list(self.arguments)
        arguments[self.x_at], arguments[self.w_at] = x, w
        if self.bias_at is not None and self.bias_at < len(arguments):
            arguments[self.bias_at] = bias
        return self.func(*arguments, **self.extra)


_SIGNATURES: dict[str, tuple[str, ...]] = {
    "linear": ("input", "weight", "bias"),
    "matmul": ("input", "other"),
    "__matmul__": ("input", "other"),
    "__rmatmul__": ("other", "input"),
    "mm": ("input", "mat2"),
    "bmm": ("input", "mat2"),
    "mv": ("input", "vec"),
    "addmm": ("input", "mat1", "mat2"),
    "baddbmm": ("input", "batch1", "batch2"),
    "addmv": ("input", "mat", "vec"),
    "grouped_mm": ("mat_a", "mat_b"),
    "_grouped_mm": ("self", "mat2"),
    "grouped_mm_fallback": ("input", "weight", "offs"),
}
#: Calls that multiply by a weight in a way that is not taken apart: reported by name.
_OPAQUE = frozenset(
    {
        *("bilinear", "tensordot", "inner", "dot", "vdot", "addbmm", "chain_matmul", "multi_dot"),
        *("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell"),
        *("rnn_relu_cell", "_scaled_mm", "_scaled_grouped_mm", "_int_mm"),
        *("scaled_dot_product_attention", "_native_multi_head_attention"),
        "_transformer_encoder_layer_fwd",
    }
)


def call_of(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
    """Recognize a product of an activation with a tapped weight.

    Returns None for every other call.

    Raises
    ------
    UnsupportedProductError
        If it is a product, but one that cannot be brought to the form.
    """
    name = _product_name(func)
    if name == "einsum":
        return _einsum_call(func, args, kwargs)
    if name in _OPAQUE:
        raise UnsupportedProductError(f"used inside torch {name}")
    names = _SIGNATURES.get(name)
    if names is None:
        return None
    extra = dict(kwargs)
    arguments = list(args[: len(names)])
    if len(args) > len(names):  # in-place or positional extras: not called so by any model
        raise UnsupportedProductError(f"torch {name} with {len(args)} positional arguments")
    arguments += [extra.pop(n) for n in names[len(args) :] if n in extra]
    if extra.get("out") is not None:
        raise UnsupportedProductError(f"torch {name} with out=")
    if name == "linear":
        first, second = 0, 1
    elif name == "__rmatmul__":
        first, second = 1, 0
    elif name in ("addmm", "baddbmm", "addmv"):
        first, second = 1, 2
    else:
        first, second = 0, 1
    return _call(name, func, arguments, extra, first, second)


def _product_name(func: Callable[..., Any]) -> str:
    name = name_of(func)
    return name.rpartition("::")[2].removesuffix(".default") if "::" in name else name


def _call(
    name: str,
    func: Callable[..., Any],
    arguments: list[Any],
    extra: dict[str, Any],
    first: int,
    second: int,
) -> Call | None:
    a, b = arguments[first], arguments[second]
    if name == "linear":
        if tag_of(b) is None:
            return None
        lead = _LETTERS[: a.dim() - 1]
        return Call(func, arguments, extra, 0, 1, Equation(lead + "i", "oi", lead + "o"), 2)
    if "grouped_mm" in name:
        return _grouped_call(func, arguments, extra)
    weight_second = tag_of(b) is not None
    if weight_second and tag_of(a) is not None:
        raise UnsupportedProductError("multiplied by another parameter")
    equation = _matmul_letters(a, b, weight_second)
    x_at, w_at = (first, second) if weight_second else (second, first)
    return Call(
        func,
        arguments,
        extra,
        x_at,
        w_at,
        equation,
        0 if name.startswith(("add", "badd")) else None,
    )


def _matmul_letters(a: Tensor, b: Tensor, weight_second: bool) -> Equation:
    """Letters of a @ b: i is contracted, t are the rows of X, o those of W.

    Batch axes align on the right. An axis of size 1 that meets a larger one gets a letter of its
    own, upper case.
    """
    rows, columns = ("t", "o") if weight_second else ("o", "t")
    lead = [a.shape[:-2], b.shape[:-2]]
    width = max(len(lead[0]), len(lead[1]))
    batch = _LETTERS[:width]
    sides = []
    for own, other in (lead, lead[::-1]):
        letters = list(batch[width - len(own) :])
        for k in range(1, min(len(own), len(other)) + 1):
            if own[-k] == 1 != other[-k]:
                letters[-k] = letters[-k].upper()
        sides.append("".join(letters))
    left = sides[0] + (rows if a.dim() > 1 else "") + "i"
    right = sides[1] + "i" + (columns if b.dim() > 1 else "")
    out = batch + (rows if a.dim() > 1 else "") + (columns if b.dim() > 1 else "")
    return Equation(left, right, out) if weight_second else Equation(right, left, out)


def _grouped_call(
    func: Callable[..., Any], arguments: list[Any], extra: dict[str, Any]
) -> Call | None:
    offsets = arguments[2] if len(arguments) > 2 else extra.get("offs")
    x, w = arguments[:2]
    if tag_of(w) is None:
        return None
    if x.dim() != 2 or w.dim() != 3 or offsets is None:
        raise UnsupportedProductError(
            "used by grouped_mm other than as tokens times a stack of experts"
        )
    return Call(func, arguments, extra, 0, 1, Equation("ti", "aio", "to"), None, offsets)


def _einsum_call(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Call | None:
    equation, operands = args[0], args[1:]
    nested = len(operands) == 1 and isinstance(operands[0], (list, tuple))
    if nested:
        operands = tuple(operands[0])
    if not isinstance(equation, str):
        raise UnsupportedProductError("used by einsum in its sublist form")
    if len(operands) != 2:
        if len(operands) == 1:
            return None
        raise UnsupportedProductError(f"used by einsum with {len(operands)} operands")
    left, out = _einsum_letters(equation.replace(" ", ""), [t.dim() for t in operands])
    w_at = 1 if tag_of(operands[1]) is not None else 0
    x, w = left[1 - w_at], left[w_at]
    if not set(x) & set(w) - set(out):
        return None  # no contraction: an elementwise use
    if len(set(x)) < len(x) or len(set(w)) < len(w) or (set(x) ^ set(w)) - set(out):
        raise UnsupportedProductError(f"used by einsum {equation}")

    def run(first: Tensor, second: Tensor) -> Tensor:
        return func(equation, first, second, **kwargs)

    return Call(run, list(operands), {}, 1 - w_at, w_at, Equation(x, w, out))


def _einsum_letters(equation: str, dims: list[int]) -> tuple[list[str], str]:
    """Write out the ellipsis and the implicit result of an einsum equation."""
    sides, arrow, out = equation.partition("->")
    terms = sides.split(",")
    if not arrow:
        letters = sides.replace(",", "").replace(".", "")
        out = ("..." if "..." in sides else "") + "".join(
            sorted(c for c in set(letters) if letters.count(c) == 1)
        )
    free = "".join(c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation)
    widths = [n - len(t) + 3 for t, n in zip(terms, dims, strict=True) if "..." in t]
    width = max(widths, default=0)
    written = [
        t.replace("...", free[width - (n - len(t) + 3) : width])
        for t, n in zip(terms, dims, strict=True)
    ]
    return written, out.replace("...", free[:width])


def attention_without_dispatch() -> Callable[..., Any]:
    """Return a copy of `F.multi_head_attention_forward` whose inner products reach the tap.

    The function hands itself to `__torch_function__` before anything else; called again from there
    it would do so for ever.
    """
    original = F.multi_head_attention_forward
    scope = dict(original.__globals__, has_torch_function=lambda _: False)
    copy = types.FunctionType(original.__code__, scope, original.__name__, original.__defaults__)
    copy.__kwdefaults__ = original.__kwdefaults__
    return copy
