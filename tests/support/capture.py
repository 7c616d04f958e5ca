"""Operands of a model captured without mxdiag's inventory, and what a row must say of them.

A layer is found by the rows of its stored weight: whatever multiplied the same rows saw its X, and
has its G in those columns. Plain hooks capture `nn.Linear` and `Conv1D`; the rest (experts, fused
attention, bare parameters) comes from a tap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from mxdiag.gemms import Cell
from mxdiag.quantize import reference
from mxdiag.quantize.sums import COUNT_FIELDS, SUM_FIELDS
from mxdiag.tap.tap import Tap
from tap_tools import Recorder


@dataclass
class Source:
    """One weight [out, in], and X and G of each of its calls as [tokens, features]."""

    weight: Tensor
    x: list[Tensor] = field(default_factory=list)
    g: list[Tensor] = field(default_factory=list)


def _flat(t: Tensor) -> Tensor:
    return t.detach().reshape(-1, t.shape[-1]).clone()


@contextmanager
def hooked(model: nn.Module) -> Iterator[list[Source]]:
    """Capture every `nn.Linear` and `Conv1D` whose forward runs, by hooks alone."""
    called: list[Source] = []
    handles = []
    for module in model.modules():
        if not isinstance(module, (nn.Linear, Conv1D)):
            continue
        weight = module.weight.detach()
        source = Source(weight if isinstance(module, nn.Linear) else weight.t())

        def forward(module, args, output, source=source):
            if not isinstance(output, Tensor):  # a router that inherits from nn.Linear
                return
            if not source.x:
                called.append(source)
            source.x.append(_flat(args[0]))
            if output.requires_grad:
                output.grad_fn.register_prehook(lambda grads: source.g.append(_flat(grads[0])))

        handles.append(module.register_forward_hook(forward))
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()


def tapped(model: nn.Module, run: Callable[[], Tensor]) -> list[Source]:
    """Capture every product that a tap sees in one backward pass."""
    seen = Recorder()
    with Tap(model, seen):
        run().backward()
    parameters = dict(model.named_parameters())
    sources: dict[object, Source] = {}
    for product, x in seen.x.items():
        weight = parameters[product.parameter].detach()
        weight = weight.as_strided(product.size, product.stride, product.offset)
        source = sources.setdefault(product.view, Source(weight))
        source.x.append(x)
        if product in seen.g:
            source.g.append(seen.g[product])
    model.zero_grad(set_to_none=True)
    return list(sources.values())


def by_rows(sources: list[Source]) -> dict[bytes, tuple[Source, int]]:
    """Where each row of each weight is; an earlier source goes first."""
    rows: dict[bytes, tuple[Source, int]] = {}
    for source in sources:
        for i, row in enumerate(source.weight.contiguous().numpy()):
            rows.setdefault(row.tobytes(), (source, i))
    return rows


def operands(
    weight: np.ndarray, rows: dict[bytes, tuple[Source, int]]
) -> tuple[list[Tensor], list[Tensor]] | None:
    """X and G of each call of a layer with this weight; None if nothing multiplied it."""
    places = [rows.get(np.ascontiguousarray(row).tobytes()) for row in weight]
    if None in places:
        return None
    source = places[0][0]
    assert all(place[0] is source for place in places)
    columns = torch.tensor([place[1] for place in places])
    return source.x, [g[:, columns] for g in source.g]


def direct(calls: list[Tensor], cell: Cell) -> tuple[dict[str, float], dict[str, int]]:
    """Sums and counts over calls, each blocked on its own, by the float64 reference."""
    sums, counts = np.zeros(len(SUM_FIELDS)), np.zeros(len(COUNT_FIELDS), np.int64)
    for x in calls:
        swapped = x if cell.axis == 1 else x.t()
        result = reference.measure(swapped[:, :, None])
        sums += result.sums
        counts += result.counts
    return (
        dict(zip(SUM_FIELDS, sums.tolist(), strict=True)),
        dict(zip(COUNT_FIELDS, counts.tolist(), strict=True)),
    )
