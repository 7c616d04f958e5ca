"""What a tap reports, and to whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mxdiag.tap.layouts import WeightView


@dataclass(frozen=True, slots=True)
class Product:
    """One product Y = X Wᵀ that a tapped model computed.

    Attributes
    ----------
    view
        The weight, as a matrix [out, in] inside a parameter; one object per matrix, so that it can
        key a dict by identity or value.
    call
        How often this matrix was multiplied before under the tap; -1 when a checkpointed forward is
        run again for the backward pass.
    """

    view: WeightView
    call: int

    @property
    def parameter(self) -> str:
        """Name of the parameter."""
        return self.view.parameter

    @property
    def offset(self) -> int:
        """Offset of the weight in its parameter, in elements."""
        return self.view.offset

    @property
    def size(self) -> tuple[int, int]:
        """Size of the weight as [out, in]."""
        return self.view.size

    @property
    def stride(self) -> tuple[int, int]:
        """Strides of the weight as [out, in], in elements of its parameter."""
        return self.view.stride

    @property
    def expert(self) -> int | None:
        """Index along the first axis of a parameter that stacks experts."""
        return self.view.expert


class Observer:
    """Receives every product, to take statistics at once: the tensors are not its own."""

    def forward(self, product: Product, x: Tensor) -> None:
        """See X, [tokens, in], detached, before the product is computed."""

    def backward(self, product: Product, g: Tensor) -> None:
        """See the gradient of Y, [tokens, out], detached."""


class Substitute(Protocol):
    """Replaces operands of products, straight-through: each of the three GEMMs on its own.

    Every method may return an operand as it is; a new one has the same shape, and is cast to the
    operand's dtype.
    """

    def fprop(self, product: Product, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Operands of Y = X Wᵀ: x [tokens, in], w [out, in]."""

    def dgrad(self, product: Product, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Operands of dX = G W: g [tokens, out], w [out, in]."""

    def wgrad(self, product: Product, g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Operands of dW = Gᵀ X: g [tokens, out], x [tokens, in]."""
