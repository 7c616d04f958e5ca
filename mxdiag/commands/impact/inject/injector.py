"""Puts a plan's injections into a tapped model, each GEMM's operands on their own."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from mxdiag.commands.impact.inject.plan import PLAIN_MXFP4, Injection, InjectionPlan
from mxdiag.commands.impact.inject.values import injected, undefined
from mxdiag.gemms import CELLS
from mxdiag.model.inventory import ModelInventory
from mxdiag.model.live import Part
from mxdiag.tap.layouts import WeightView
from mxdiag.tap.observers import Product

_AXIS = {(cell.operand, cell.gemm): cell.axis for cell in CELLS}


class Injector:
    """A `Substitute` for a tap that follows a plan, which may change from pass to pass.

    Layers that a rule excludes are left alone. A weight that holds several layers is injected layer
    by layer, in W's rows and G's columns; X, which they share, goes by the first. Without a plan
    every operand stays as it is.

    Parameters
    ----------
    inventory
        Tells which layers a product holds.
    scale_rule, backend
        As in a scan.
    seed
        Of noise and stochastic rounding, together with `draw`, layer, operand and GEMM.

    Attributes
    ----------
    draw
        What random numbers depend on beside the place: the repeat, by convention.
    notes
        What was not done as asked, each said once.
    """

    def __init__(
        self,
        inventory: ModelInventory,
        scale_rule: str = "rceil",
        backend: str = "auto",
        seed: int = 0,
    ) -> None:
        self.draw: tuple[int, ...] = ()
        self.notes: dict[str, None] = {}
        self._inventory, self._rule, self._backend = inventory, scale_rule, backend
        self._seed = seed
        self._plan: InjectionPlan | None = None
        self._weights: dict[tuple[WeightView, str], Tensor] | None = None
        self._shared: dict[str, tuple[Tensor, int, Injection, Tensor]] = {}

    @contextmanager
    def using(self, plan: InjectionPlan | None, *, keep_weights: bool = False) -> Iterator[None]:
        """Follow a plan for a block.

        `keep_weights` computes each W of fprop once and keeps it: for many forward passes in one
        block, at the price of one more copy of the weights.
        """
        before = self._plan, self._weights
        self._plan, self._weights = plan, {} if keep_weights else None
        self._shared.clear()
        try:
            yield
        finally:
            self._plan, self._weights = before
            self._shared.clear()

    # ---- what the tap calls --------------------------------------------------------------------

    def fprop(self, product: Product, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Y = X W^T: both blocked along in_features."""
        parts = self._parts(product)
        if not parts:
            return x, w
        return self._activation(parts, x, "fprop"), self._weight(product, parts, w)

    def dgrad(self, product: Product, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """DX = G W: both blocked along out_features."""
        parts = self._parts(product)
        if not parts:
            return g, w
        return self._split(parts, g, "G", "dgrad"), self._split(parts, w, "W", "dgrad")

    def wgrad(self, product: Product, g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """DW = G^T X: both blocked along tokens."""
        parts = self._parts(product)
        if not parts:
            return g, x
        return self._split(parts, g, "G", "wgrad"), self._activation(parts, x, "wgrad")

    def _parts(self, product: Product) -> tuple[Part, ...]:
        return () if self._plan is None else self._inventory.resolve(product.view)

    # ---- replacing -----------------------------------------------------------------------------

    def _weight(self, product: Product, parts: tuple[Part, ...], w: Tensor) -> Tensor:
        if self._weights is None:
            return self._split(parts, w, "W", "fprop")
        key = (product.view, "fprop")
        if key not in self._weights:
            self._weights[key] = self._split(parts, w, "W", "fprop")
        return self._weights[key]

    def _activation(self, parts: tuple[Part, ...], x: Tensor, gemm: str) -> Tensor:
        """X under the first part's injection; layers that share an input share the result."""
        part = parts[0]
        injection = self._injection(part, "A", gemm)
        if injection is None:
            return x
        last = self._shared.get(gemm)
        if last is not None and _same(last[0], x) and last[1:3] == (x._version, injection):
            return last[3]
        values = self._values(part, x, "A", gemm, injection)
        self._shared[gemm] = (x, x._version, injection, values)
        return values

    def _split(self, parts: tuple[Part, ...], t: Tensor, operand: str, gemm: str) -> Tensor:
        """W by the rows, or G by the columns, of each part."""
        along = 0 if operand == "W" else 1
        out = t
        for part in parts:
            injection = self._injection(part, operand, gemm)
            if injection is None:
                continue
            columns = part.columns
            if columns == slice(0, t.shape[along], 1):
                return self._values(part, t, operand, gemm, injection)
            if out is t:
                out = t.clone()
            place = columns if along == 0 else (slice(None), columns)
            out[place] = self._values(part, t[place], operand, gemm, injection)
        return out

    def _injection(self, part: Part, operand: str, gemm: str) -> Injection | None:
        assert self._plan is not None
        return self._plan(part.live.linear, operand, gemm)

    def _values(
        self, part: Part, x: Tensor, operand: str, gemm: str, injection: Injection
    ) -> Tensor:
        if not x.numel():
            return x
        axis = _AXIS[operand, gemm]
        reason = undefined(injection, operand, x.shape[axis])
        if reason is not None:
            self.notes.setdefault(f"{reason}: plain MXFP4 in its place ({operand}·{gemm})")
            injection = PLAIN_MXFP4
        place = f"{self._seed}|{self.draw}|{part.live.layer}|{operand}|{gemm}"
        seed = zlib.crc32(place.encode())
        return injected(x, injection, axis, self._rule, self._backend, seed)


def _same(a: Tensor, b: Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (
        b.data_ptr(),
        b.shape,
        b.stride(),
        b.dtype,
    )
