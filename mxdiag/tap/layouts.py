"""One form for every product of an activation with a weight.

    Y[b, t, o] = sum_i X[b, t, i] W[b, o, i]

t are tokens, i the contracted axis, o the output axis, and b the axes that X, W and Y share
(experts, heads of a block-diagonal weight); most products have none. A product is described by one
letter per axis, as in einsum: which kind of axis it is follows from where its letter occurs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mxdiag.tap.tensor import Tag


@dataclass(frozen=True, slots=True)
class WeightView:
    """A matrix [out, in] inside a parameter, in elements of the parameter as a row-major array.

    `expert` is the index along the first axis if the parameter has three or more and the view lies
    within one index of it. `derived`: the product's weight is computed from the parameter (a weight
    norm, an adapter merged on the fly), so gradients are for that effective weight.
    """

    parameter: str
    offset: int
    size: tuple[int, int]
    stride: tuple[int, int]
    expert: int | None = None
    derived: bool = False

    def __hash__(self) -> int:
        """Hash what nearly always tells views apart: they key dicts at every product."""
        return hash((self.parameter, self.offset))


@dataclass(frozen=True, slots=True)
class Equation:
    """The axes of a product by letter: X, W and Y."""

    x: str
    w: str
    y: str


class UnsupportedProductError(Exception):
    """A product of a weight that has no such form; the message says why."""


# ---- tokens and features -------------------------------------------------------


@dataclass(slots=True)
class ProductLayout:
    """How X, W and Y of one equation become [b, tokens, in], [b, out, in] and [b, tokens, out].

    `stack` are axes of W alone (the experts of a grouped product), `spread` axes of W and Y along
    which the same X meets several matrices; `single` axes of X alone, of size 1.
    """

    equation: Equation
    batch: str
    tokens: str
    inner: str
    outer: str
    stack: str = ""
    spread: str = ""
    single: str = ""
    plain: bool = field(init=False)  # a 2-D weight and the features on the last axis of X and Y

    def __post_init__(self) -> None:
        x, w, y = self.equation.x, self.equation.w, self.equation.y
        self.plain = len(w) == 2 and x == self.tokens + self.inner and y == self.tokens + self.outer

    @classmethod
    def of(cls, equation: Equation) -> ProductLayout:
        """Sort the letters of an equation by kind."""
        x, w, y = equation.x, equation.w, equation.y
        return cls(
            equation,
            batch="".join(c for c in y if c in x and c in w),
            tokens="".join(c for c in y if c in x and c not in w),
            inner="".join(c for c in x if c in w and c not in y),
            outer="".join(c for c in y if c in w and c not in x),
            stack="".join(c for c in w if c not in x and c not in y),
            single="".join(c for c in x if c not in w and c not in y),
        )

    def spread_out(self) -> ProductLayout:
        """Take the first output axis as one along which the same X meets several matrices."""
        return replace(self, spread=self.outer[0], outer=self.outer[1:])

    def x3(self, x: Tensor) -> Tensor:
        """X as [b, tokens, in]; read only."""
        if self.plain:
            return x.reshape(1, -1, x.shape[-1])
        return _group(x, self.equation.x, self.batch, self.single + self.tokens, self.inner)

    def y3(self, y: Tensor) -> Tensor:
        """Y, or its gradient, as [b, tokens, out]."""
        if self.plain:
            return y.reshape(1, -1, y.shape[-1])
        return _group(y, self.equation.y, self.spread + self.batch, self.tokens, self.outer)

    def w3(self, w: Tensor) -> Tensor:
        """W as [b, out, in]."""
        lead = self.stack + self.spread + self.batch
        return _group(w, self.equation.w, lead, self.outer, self.inner)

    def x_back(self, x3: Tensor, like: Tensor) -> Tensor:
        """Undo `x3`."""
        order = self.batch + self.single + self.tokens + self.inner
        return _ungroup(x3, like, self.equation.x, order)

    def y_back(self, y3: Tensor, like: Tensor) -> Tensor:
        """Undo `y3`."""
        order = self.spread + self.batch + self.tokens + self.outer
        return _ungroup(y3, like, self.equation.y, order)

    def w_back(self, w3: Tensor, like: Tensor) -> Tensor:
        """Undo `w3`."""
        order = self.stack + self.spread + self.batch + self.outer + self.inner
        return _ungroup(w3, like, self.equation.w, order)


def _group(t: Tensor, letters: str, *groups: str) -> Tensor:
    order = [letters.index(c) for group in groups for c in group]
    sizes = [math.prod([t.shape[letters.index(c)] for c in group]) for group in groups]
    return t.permute(order).reshape(sizes)


def _ungroup(t3: Tensor, like: Tensor, letters: str, order: str) -> Tensor:
    t = t3.reshape([like.shape[letters.index(c)] for c in order])
    return t.permute([order.index(c) for c in letters])


# ---- which tokens meet which matrix ------------------------------------------------------------


@dataclass(slots=True)
class Segment:
    """The tokens of one call that one weight matrix multiplies.

    `x_at` and `y_at` index the first axis of [b, tokens, features] of X and of Y (a vector: several
    of them), `rows` those tokens that take part (None: all), `w_at` the first axis of [b, out, in].
    """

    view: WeightView
    w_at: int = 0
    x_at: int | Tensor = 0
    y_at: int | Tensor = 0
    rows: slice | Tensor | None = None

    def x_of(self, x3: Tensor) -> Tensor:
        """Pick the segment's activations, as [tokens, in]."""
        return _take(x3, self.x_at, self.rows)

    def y_of(self, y3: Tensor) -> Tensor:
        """Pick the segment's outputs, or their gradient, as [tokens, out]."""
        return _take(y3, self.y_at, self.rows)

    def put_x(self, x3: Tensor, values: Tensor) -> None:
        """Write the segment's activations."""
        _put(x3, self.x_at, self.rows, values)

    def put_y(self, y3: Tensor, values: Tensor) -> None:
        """Write the gradient of the segment's outputs."""
        _put(y3, self.y_at, self.rows, values)


def _take(t3: Tensor, at: int | Tensor, rows: slice | Tensor | None) -> Tensor:
    picked = t3[at]
    if rows is not None:
        picked = picked[rows]
    return picked if picked.dim() == 2 else picked.flatten(0, 1)


def _put(t3: Tensor, at: int | Tensor, rows: slice | Tensor | None, values: Tensor) -> None:
    if rows is None:
        t3[at] = values.reshape(t3[at].shape).to(t3.dtype)
    else:
        t3[at][rows] = values.to(t3.dtype)


def weight_views(tag: Tag, layout: ProductLayout) -> tuple[ProductLayout, list[WeightView]]:
    """Return the layout that fits a tagged weight, and the matrices [out, in] that it then is.

    Raises
    ------
    UnsupportedProductError
        If they are no matrices of constant strides inside the parameter.
    """
    if tag.index is not None and layout.batch != layout.equation.w[0]:
        raise UnsupportedProductError("selected by an index vector outside the batch axis")
    while True:
        meta3 = layout.w3(tag.meta)
        if meta3.untyped_storage()._cdata == tag.meta.untyped_storage()._cdata:
            return layout, [_view(tag, meta3[b]) for b in range(meta3.shape[0])]
        if len(layout.outer) < 2 or layout.spread or layout.batch or layout.stack:
            raise UnsupportedProductError(
                "multiplied in an order that is no matrix of constant strides"
            )
        layout = layout.spread_out()


def _view(tag: Tag, matrix: Tensor) -> WeightView:
    offset, (rows, columns) = matrix.storage_offset(), matrix.shape
    expert = None
    if len(tag.root) > 2:
        step = math.prod(tag.root[1:])
        last = offset + (rows - 1) * matrix.stride(0) + (columns - 1) * matrix.stride(1)
        expert = offset // step if offset // step == last // step else None
    stride = (matrix.stride(0), matrix.stride(1))
    return WeightView(tag.parameter, int(offset), (rows, columns), stride, expert, tag.derived)


def segments_of(
    tag: Tag, layout: ProductLayout, x: Tensor, views: list[WeightView], offsets: Tensor | None
) -> list[Segment]:
    """Say which tokens meet which of the weight's matrices; `offsets` ends the rows of each."""
    if offsets is not None:
        ends = offsets.tolist()
        spans = zip(views, [0, *ends], ends, strict=False)
        return [
            Segment(view, e, rows=slice(start, end))
            for e, (view, start, end) in enumerate(spans)
            if end > start
        ]
    if tag.index is not None:
        experts, places = torch.unique(tag.index, return_inverse=True)
        segments = []
        for k, expert in enumerate(experts.tolist()):
            chosen = (places == k).nonzero().flatten()
            segments.append(Segment(views[expert], int(chosen[0]), chosen, chosen))
        return segments
    if len(views) == 1:
        return [Segment(views[0])]
    if layout.spread:
        return [Segment(view, b, 0, b) for b, view in enumerate(views)]
    return _batched_segments(layout, x, views)


def _batched_segments(layout: ProductLayout, x: Tensor, views: list[WeightView]) -> list[Segment]:
    """One segment per matrix, without tokens that are zero throughout.

    Llama-4 sends every token to every expert and zeroes those that were not routed there: a row of
    zeros is no token of that expert.
    """
    present = layout.x3(x).detach().ne(0).any(-1)
    segments = []
    for b, view in enumerate(views):
        rows = present[b].nonzero().flatten()
        if len(rows):
            segments.append(Segment(view, b, b, b, None if len(rows) == present.shape[1] else rows))
    return segments


def product_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast makes of operands, None where it leaves them alone."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype is torch.float64 or not x.is_floating_point():
        return None
    return torch.get_autocast_dtype(kind)
