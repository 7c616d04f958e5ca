"""One linear layer of a live model, and its share of a product."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mxdiag.layers.linears import Linear
from mxdiag.tap.layouts import WeightView


@dataclass(frozen=True, slots=True)
class LiveLinear:
    """One linear layer of a live model: its checkpoint identity, and its place in a parameter."""

    linear: Linear
    view: WeightView

    @property
    def layer(self) -> str:
        """Name of the layer."""
        return self.linear.layer


@dataclass(frozen=True, slots=True)
class Part:
    """The share of one layer in a product: all of X, and these columns of the gradient of Y."""

    live: LiveLinear
    columns: slice

    def gradient(self, g: Tensor) -> Tensor:
        """Pick the layer's columns of G, [tokens, out]; a view, or G itself if they are all."""
        return g if self.columns == slice(0, g.shape[1], 1) else g[:, self.columns]


def output_columns(view: WeightView, part: WeightView) -> slice | None:
    """Which output columns of a product's weight a layer is; None if it is none of them."""
    (rows, columns), (step, inner) = view.size, view.stride
    if part.size[1] != columns or (columns > 1 and part.stride[1] != inner):
        return None
    distance = part.offset - view.offset
    if rows == 1:
        return slice(0, 1, 1) if distance == 0 and part.size[0] == 1 else None
    first, rest = divmod(distance, step)
    every, odd = divmod(part.stride[0], step) if part.size[0] > 1 else (1, 0)
    last = first + (part.size[0] - 1) * every
    if rest or odd or every < 1 or not 0 <= first <= last < rows:
        return None
    return slice(first, last + 1, every)
