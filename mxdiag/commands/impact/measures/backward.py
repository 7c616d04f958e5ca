"""Weight gradients of a straight-through quantized backward pass, beside the reference's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mxdiag.errors import ModelError
from mxdiag.model.live import LiveLinear
from mxdiag.tap.parameters import parameter_names

#: Columns of the sums of one layer, additive over records: |g|^2, <g, r>, |g - r|^2 and |r|^2, g
#: the gradient and r the reference's.
GRADIENT_FIELDS = ("gg", "gr", "dd", "rr")
#: Elements of a gradient compared at a time, so that temporaries stay small.
_CHUNK = 1 << 20


class Gradients:
    """Gradients of the measured layers' weights, taken without touching any `.grad`.

    Parameters
    ----------
    model
        Untapped, with the gradient flags of `only_these`.
    layers
        The layers to compare; each reads its gradient from its place in a parameter.
    """

    def __init__(self, model: nn.Module, layers: Sequence[LiveLinear]) -> None:
        parameters = parameter_names(model)
        names = dict.fromkeys(live.view.parameter for live in layers)
        self.layers = list(layers)
        self._names = list(names)
        # An edge, not the parameter: a tapped one would draw the whole backward pass into the tap.
        self._edges: list[GradientEdge] = [get_gradient_edge(parameters[n]) for n in names]

    def of(self, loss: Tensor, *, keep_graph: bool) -> dict[str, Tensor | None]:
        """Gradients by parameter; None where the loss does not depend on it.

        Raises
        ------
        ModelError
            If the loss depends on no parameter.
        """
        if not loss.requires_grad:
            raise ModelError("the loss depends on no measured weight, so there is no gradient")
        found = torch.autograd.grad(loss, self._edges, retain_graph=keep_graph, allow_unused=True)
        return dict(zip(self._names, found, strict=True))

    def norms(self, reference: dict[str, Tensor | None]) -> np.ndarray:
        """|r|^2 by layer, [layers]."""
        sums = []
        for live in self.layers:
            r = _view(reference[live.view.parameter], live)
            sums.append(None if r is None else _products(r, r)[0])
        return _numbers([[value] for value in sums])[:, 0]

    def compare(
        self,
        gradients: dict[str, Tensor | None],
        reference: dict[str, Tensor | None],
        norms: np.ndarray,
    ) -> np.ndarray:
        """Sums by layer, float64 [layers, len(FIELDS)]; zeros where neither has a gradient."""
        rows: list[list[Tensor | None]] = []
        for live in self.layers:
            g = _view(gradients[live.view.parameter], live)
            r = _view(reference[live.view.parameter], live)
            if g is None or r is None:
                own = None if g is None else _products(g, g)[0]
                rows.append([own, None, own])
            else:
                rows.append(list(_products(g, r)))
        return np.column_stack([_numbers(rows), norms])


def _view(gradient: Tensor | None, live: LiveLinear) -> Tensor | None:
    """A layer's share of a parameter's gradient, [out, in]."""
    if gradient is None:
        return None
    view, whole = live.view, gradient.contiguous()
    return whole.as_strided(view.size, view.stride, whole.storage_offset() + view.offset)


def _products(g: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """|g|^2, <g, r> and |g - r|^2: float32 sums of rows, added up in float64."""
    kind = torch.promote_types(g.dtype, torch.float32)
    step = max(1, _CHUNK // max(g.shape[1], 1))
    sums = torch.zeros(3, dtype=torch.float64, device=g.device)
    for start in range(0, g.shape[0], step):
        a, b = g[start : start + step].to(kind), r[start : start + step].to(kind)
        d = a - b
        rows = [(a * a).sum(-1), (a * b).sum(-1), d.mul_(d).sum(-1)]
        sums += torch.stack(rows).sum(-1, dtype=torch.float64)
    return sums[0], sums[1], sums[2]


def _numbers(rows: list[list[Tensor | None]]) -> np.ndarray:
    """Scalars that may be on a device, as one array; None is 0."""
    flat = [value for row in rows for value in row]
    present = [value for value in flat if value is not None]
    moved = iter(torch.stack(present).cpu().tolist() if present else [])
    values = [0.0 if value is None else next(moved) for value in flat]
    return np.array(values, dtype=np.float64).reshape(len(rows), -1)


@contextmanager
def only_these(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Let exactly these parameters require grad for a block; every flag is put back."""
    wanted = frozenset(names)
    before = [(p, p.requires_grad) for p in model.parameters()]
    try:
        for name, parameter in parameter_names(model).items():
            if parameter.is_floating_point():
                parameter.requires_grad_(name in wanted)
        yield
    finally:
        for parameter, flag in before:
            parameter.requires_grad_(flag)


# ---- derived quantities ------------------------------------------------------------------------


def cosine(sums: np.ndarray) -> np.ndarray:
    """<g, r> / (|g| |r|) from [..., len(FIELDS)]; NaN where either is zero."""
    gg, gr, _, rr = np.moveaxis(sums, -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((gg > 0) & (rr > 0), gr / np.sqrt(gg * rr), np.nan)


def norm_ratio(sums: np.ndarray) -> np.ndarray:
    """|g| / |r|; NaN where the reference is zero."""
    gg, _, _, rr = np.moveaxis(sums, -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(rr > 0, np.sqrt(gg / rr), np.nan)


def snr_db(sums: np.ndarray) -> np.ndarray:
    """10 log10(|r|^2 / |g - r|^2); NaN where either is zero."""
    _, _, dd, rr = np.moveaxis(sums, -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((dd > 0) & (rr > 0), 10 * np.log10(rr / dd), np.nan)
