"""A product whose operands are replaced, straight-through, in each of its three GEMMs on its own.

The product is linear in each operand, so dX depends on (G, W) alone and dW on (G, X) alone: both
are computed with whatever the substitute returns, by the same kernels that autograd would run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mxdiag.tap.layouts import ProductLayout, Segment
from mxdiag.tap.observers import Product, Substitute
from mxdiag.tap.products import Call


@dataclass(slots=True)
class Work:
    """One product to be computed with replaced operands."""

    call: Call
    layout: ProductLayout
    pairs: list[tuple[Segment, Product]]
    substitute: Substitute
    on_gradient: Callable[[Tensor], None]


class SubstitutedProduct(torch.autograd.Function):
    """apply(x, w, bias, anchor, work); through `anchor` the result requires grad in any case."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, anchor: Tensor | None, work: Work
    ) -> Tensor:
        """The product of substituted operands."""
        ctx.work, ctx.x_like, ctx.bias_like = work, _like(x), None if bias is None else _like(bias)
        with torch._C.DisableTorchFunctionSubclass():
            need_x, need_w = ctx.needs_input_grad[1], ctx.needs_input_grad[0]
            ctx.save_for_backward(x if need_x else None, w if need_w else None)
            ctx.w_like = _like(w)
            operands = _forward_operands(work, x, w)
            with torch.set_grad_enabled(not _matrix_product(ctx)):
                # `.data`: a view made in here could not be modified in place later
                return _run(ctx, *operands, _detached(bias)).data

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """The gradients of x, w and the bias, from products of substituted operands."""
        work = ctx.work
        x, w = ctx.saved_tensors
        with torch._C.DisableTorchFunctionSubclass():
            work.on_gradient(g)
            d_x = d_w = d_bias = None
            if w is not None:
                d_x = _input_gradient(ctx, g, w)
            if x is not None:
                d_w = _weight_gradient(ctx, g, x)
            if ctx.bias_like is not None and ctx.needs_input_grad[2]:
                d_bias = _bias_gradient(ctx, g)
        return d_x, d_w, d_bias, None, None


@dataclass(slots=True)
class _Like:
    """What an operand looks like, without its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> Tensor:
        size, stride = tuple(self.shape), self.stride
        return torch.empty_strided(size, stride, dtype=self.dtype, device=self.device).zero_()


def _like(t: Tensor) -> _Like:
    return _Like(t.shape, t.stride(), t.dtype, t.device)


# ---- replacing ---------------------------------------------------------------------------------


def _forward_operands(work: Work, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    layout = work.layout
    x_out, w_out = _Operand(x, layout.x3, layout.x_back), _Operand(w, layout.w3, layout.w_back)
    for segment, product in work.pairs:
        xs, ws = segment.x_of(x_out.t3), w_out.t3[segment.w_at]
        x_new, w_new = work.substitute.fprop(product, xs, ws)
        x_out.replace(xs, x_new, segment.put_x)
        _replace_weight(w_out, segment, ws, w_new)
    return x_out.result(), w_out.result()


def _gradient_operands(work: Work, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    layout = work.layout
    g_out, w_out = _Operand(g, layout.y3, layout.y_back), _Operand(w, layout.w3, layout.w_back)
    for segment, product in work.pairs:
        gs, ws = segment.y_of(g_out.t3), w_out.t3[segment.w_at]
        g_new, w_new = work.substitute.dgrad(product, gs, ws)
        g_out.replace(gs, g_new, segment.put_y)
        _replace_weight(w_out, segment, ws, w_new)
    return g_out.result(), w_out.result()


def _outer_operands(work: Work, g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    layout = work.layout
    g_out, x_out = _Operand(g, layout.y3, layout.y_back), _Operand(x, layout.x3, layout.x_back)
    for segment, product in work.pairs:
        gs, xs = segment.y_of(g_out.t3), segment.x_of(x_out.t3)
        g_new, x_new = work.substitute.wgrad(product, gs, xs)
        g_out.replace(gs, g_new, segment.put_y)
        x_out.replace(xs, x_new, segment.put_x)
    return g_out.result(), x_out.result()


def _replace_weight(w_out: _Operand, segment: Segment, ws: Tensor, w_new: Tensor) -> None:
    def put(t3: Tensor, values: Tensor) -> None:
        # a weight gathered by an index vector holds one copy per token
        at = segment.y_at if isinstance(segment.y_at, Tensor) else segment.w_at
        t3[at] = values.to(t3.dtype)

    w_out.replace(ws, w_new, put)


class _Operand:
    """An operand in the form [b, rows, columns], copied only if a part of it is replaced."""

    def __init__(
        self, original: Tensor, group: Callable[..., Any], back: Callable[..., Any]
    ) -> None:
        self.original, self.back = original.detach(), back
        self.t3: Tensor = group(self.original)
        self.changed: Tensor | None = None

    def replace(self, old: Tensor, new: Tensor, put: Callable[[Tensor, Tensor], None]) -> None:
        if new is old:
            return
        if new.shape != old.shape:
            raise ValueError(f"a substitute made {tuple(new.shape)} of {tuple(old.shape)}")
        if self.changed is None and new.numel() == self.t3.numel():
            self.changed = new.to(self.t3.dtype).reshape(self.t3.shape)
            return
        if self.changed is None:
            self.changed = self.t3.clone()
        put(self.changed, new)

    def result(self) -> Tensor:
        if self.changed is None:
            return self.original
        made = self.back(self.changed, self.original)
        if made.stride() == self.original.stride():
            return made
        like = _like(self.original)  # same strides, same kernel
        if not torch.ops.aten.is_non_overlapping_and_dense(self.original):
            return made
        return like.zeros().copy_(made)


# ---- differentiating ---------------------------------------------------------------------------


def _matrix_product(ctx: Any) -> bool:
    """Whether the call is one plain matrix product, whose gradients autograd computes by `mm`."""
    work = ctx.work
    return (
        work.layout.plain
        and isinstance(work.call.func, type(torch.mm))
        and not work.call.extra
        and len(ctx.x_like.shape) > 1
        and _row_major(ctx.x_like)
    )


def _row_major(like: _Like) -> bool:
    step = 1
    for size, stride in zip(reversed(like.shape), reversed(like.stride), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _input_gradient(ctx: Any, g: Tensor, w: Tensor) -> Tensor:
    work = ctx.work
    g_new, w_new = _gradient_operands(work, g, w)
    if _matrix_product(ctx):
        matrix = work.layout.w3(w_new)[0]
        return g_new.reshape(-1, g.shape[-1]).mm(matrix).reshape(ctx.x_like.shape)
    with torch.enable_grad():
        x = ctx.x_like.zeros().requires_grad_()
        y = _run(ctx, x, w_new, _detached(work.call.bias))
    return torch.autograd.grad(y, x, g_new)[0]


def _weight_gradient(ctx: Any, g: Tensor, x: Tensor) -> Tensor:
    work = ctx.work
    g_new, x_new = _outer_operands(work, g, x)
    if _matrix_product(ctx):
        g2, x2 = g_new.reshape(-1, g.shape[-1]), x_new.reshape(-1, x.shape[-1])
        in_out = work.layout.equation.w[0] in work.layout.inner
        if in_out:
            return x2.t().mm(g2) if _row_major(ctx.w_like) else g2.t().mm(x2).t()
        return g2.t().mm(x2) if _row_major(ctx.w_like) else x2.t().mm(g2).t()
    with torch.enable_grad():
        w = ctx.w_like.zeros().requires_grad_()
        y = _run(ctx, x_new, w, _detached(work.call.bias))
    return torch.autograd.grad(y, w, g_new)[0]


def _run(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the product as torch would outside: its kernel depends on what requires grad."""
    if torch.is_grad_enabled():
        for operand, needed in zip((x, w), ctx.needs_input_grad, strict=False):
            if needed:
                operand.requires_grad_()
    return ctx.work.call.run(x, w, bias)


def _bias_gradient(ctx: Any, g: Tensor) -> Tensor:
    if _matrix_product(ctx):
        g = g.reshape(-1, g.shape[-1])
    return g.sum_to_size(ctx.bias_like.shape).to(ctx.bias_like.dtype)


def _detached(bias: Any) -> Any:
    return bias.detach() if isinstance(bias, Tensor) else bias
