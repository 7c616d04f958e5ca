"""What one reference pass says about each layer's error: cheap stand-ins for its measured effect.

With e the MXFP4 error of an operand x in fprop and g the reference loss's gradient by x:

    error_energy   |e|^2
    fisher         sum g^2 e^2        second order, with the squared gradient of each call for the
                                      curvature (diagonal empirical Fisher)
    first_order    |<g, e>|           first order: the change of the loss, its sign dropped

Activations and gradients of one record are held at a time, and no weight gradient is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mxdiag.commands.impact.inject.plan import PLAIN_MXFP4
from mxdiag.commands.impact.inject.values import injected
from mxdiag.commands.impact.session import Session
from mxdiag.model.batches import evaluating
from mxdiag.model.live import LiveLinear, Part
from mxdiag.tap.layouts import WeightView
from mxdiag.tap.observers import Observer, Product
from mxdiag.tap.tap import Tap


@dataclass(slots=True)
class ErrorSums:
    """Of one operand of one layer, over calls and records; `calls` counts gradients seen."""

    numel: int = 0
    e2: float = 0.0
    x2: float = 0.0
    fisher: float = 0.0
    first: float = 0.0
    calls: int = 0

    @property
    def relative(self) -> float:
        """|e|^2 / |x|^2, 0 for zeros."""
        return self.e2 / self.x2 if self.x2 else 0.0


@dataclass(slots=True)
class Predictions:
    """Sums by (layer, operand); `notes` say what could not be had."""

    sums: dict[tuple[str, str], ErrorSums] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def of(self, layers: Iterable[LiveLinear], operands: str) -> dict[str, float | None]:
        """The predictors of some layers together, None where no gradient was seen.

        `relative_error` is the sum over layers of the weight's elements times the sum of |e|^2 /
        |x|^2 over operands: to first order, independent relative errors of both add up in a
        product.
        """
        energy = relative = fisher = first = 0.0
        seen = True
        for live in layers:
            for operand in operands:
                sums = self.sums.get((live.layer, operand), ErrorSums())
                energy, fisher, first = energy + sums.e2, fisher + sums.fisher, first + sums.first
                relative += live.linear.numel * sums.relative
                seen = seen and sums.calls > 0
        return {
            "error_energy": energy,
            "relative_error": relative,
            "fisher": fisher if seen else None,
            "first_order": abs(first) if seen else None,
        }


def run_predictors(session: Session, operands: str) -> Predictions:
    """Run the reference once on every record, forward and backward.

    Parameters
    ----------
    session
        Not open: the model is tapped in here, and left as found.
    operands
        `W`, `A` or `WA`.
    """
    observer = _Observer(session, operands)
    tap = Tap(session.model, observer, gradients="activations")
    without_loss = False
    with evaluating(session.model, session.settings.scan.seed), tap, torch.enable_grad():
        for record in range(len(session.batches)):
            output = session.run(record, 0)
            loss = session.loss(output, record)
            if loss is None or not loss.requires_grad:
                without_loss = True
            else:
                loss.backward()
            observer.forget()
    notes = list(observer.notes)
    if without_loss:
        notes.append("the model has no loss on some records: fisher and first_order lack them")
    return Predictions(observer.sums, notes)


class _Observer(Observer):
    def __init__(self, session: Session, operands: str) -> None:
        self._inventory, self._operands = session.inventory, operands
        self._rule, self._backend = session.settings.scan.scale_rule, session.settings.scan.backend
        self._inputs: dict[tuple[WeightView, int], tuple[Tensor, int]] = {}
        self._last: tuple[Tensor, int, Tensor] | None = None
        self.sums: dict[tuple[str, str], ErrorSums] = {}
        self.notes: dict[str, None] = {}

    def forget(self) -> None:
        """Let go of what belongs to the record."""
        self._inputs.clear()
        self._last = None

    def forward(self, product: Product, x: Tensor) -> None:
        parts = self._inventory.resolve(product.view)
        if not parts or not x.numel():
            return
        self._inputs[product.view, product.call] = (x, x._version)
        for part in parts:
            if "W" in self._operands and (part.live.layer, "W") not in self.sums:
                w = self._weight(part)
                self._add_energy(part, "W", w, self._error(w))
            if "A" in self._operands:
                self._add_energy(part, "A", x, self._shared(x))

    def backward(self, product: Product, g: Tensor) -> None:
        x, version = self._inputs.pop((product.view, product.call), (None, 0))
        if x is None:
            return
        if x._version != version:
            self.notes.setdefault(f"an input of {product.parameter} was overwritten: no gradient")
            return
        for part in self._inventory.resolve(product.view):
            own, w = part.gradient(g).float(), self._weight(part)
            if "W" in self._operands:
                self._add_gradient(part, "W", own.t() @ x.float(), self._error(w))
            if "A" in self._operands:
                self._add_gradient(part, "A", own @ w.float(), self._shared(x))

    def _weight(self, part: Part) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self._inventory.weight(part.live)

    def _error(self, x: Tensor) -> Tensor:
        """Q(x) - x, blocked as in fprop."""
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        return injected(x, PLAIN_MXFP4, 1, self._rule, self._backend, 0).to(wide.dtype) - wide

    def _shared(self, x: Tensor) -> Tensor:
        """The error of an input, which layers such as q, k and v share."""
        if self._last is not None:
            last, version, error = self._last
            same = last.data_ptr() == x.data_ptr() and last.shape == x.shape
            if same and last.stride() == x.stride() and version == x._version:
                return error
        error = self._error(x)
        self._last = (x, x._version, error)
        return error

    def _add_energy(self, part: Part, operand: str, x: Tensor, error: Tensor) -> None:
        sums = self.sums.setdefault((part.live.layer, operand), ErrorSums())
        sums.numel += x.numel()
        sums.e2 += _sum(error.square())
        sums.x2 += _sum(x.to(error.dtype).square())

    def _add_gradient(self, part: Part, operand: str, g: Tensor, error: Tensor) -> None:
        sums, change = self.sums[part.live.layer, operand], g * error
        sums.first += _sum(change)
        sums.fisher += _sum(change.square())
        sums.calls += 1


def _sum(t: Tensor) -> float:
    """A sum in float64 that leaves NaN blocks out."""
    return float(t.nansum(dtype=torch.float64))
