"""Every torch call that multiplies an activation by a weight."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...], int]] = {
    # name: (forward, shape of the weight, shape of the input, number of matrices)
    "linear, 2-D": (lambda m, x: F.linear(x, m.w), (6, 5), (7, 5), 1),
    "linear, 4-D, not contiguous": (
        lambda m, x: F.linear(x.transpose(0, 2), m.w, torch.ones(6)),
        (6, 5),
        (2, 3, 4, 5),
        1,
    ),
    "linear, one token": (lambda m, x: F.linear(x, m.w), (6, 5), (5,), 1),
    "linear by keywords": (lambda m, x: F.linear(weight=m.w, input=x), (6, 5), (7, 5), 1),
    "matmul": (lambda m, x: torch.matmul(x, m.w), (5, 6), (2, 7, 5), 1),
    "operator": (lambda m, x: x @ m.w, (5, 6), (2, 7, 5), 1),
    "operator, weight first": (lambda m, x: m.w @ x, (6, 5), (2, 5, 7), 1),
    "operator, transposed": (lambda m, x: x @ m.w.T, (6, 5), (2, 7, 5), 1),
    "method": (lambda m, x: x.matmul(m.w.mT), (6, 5), (7, 5), 1),
    "vector": (lambda m, x: x @ m.w, (5, 6), (5,), 1),
    "mm": (lambda m, x: torch.mm(x, m.w.t()), (6, 5), (7, 5), 1),
    "mv": (lambda m, x: torch.mv(m.w, x), (6, 5), (5,), 1),
    "addmm": (lambda m, x: torch.addmm(torch.ones(6), x, m.w), (5, 6), (7, 5), 1),
    "addmm, weight first": (lambda m, x: torch.addmm(torch.ones(7), m.w, x), (6, 5), (5, 7), 1),
    "bmm": (lambda m, x: torch.bmm(x, m.w), (3, 5, 6), (3, 7, 5), 3),
    "baddbmm": (lambda m, x: torch.baddbmm(torch.ones(1), x, m.w), (3, 5, 6), (3, 7, 5), 3),
    "batched, more batch axes": (lambda m, x: x @ m.w, (3, 5, 6), (2, 3, 7, 5), 3),
    "batch axis of one": (lambda m, x: x @ m.w, (1, 5, 6), (2, 3, 7, 5), 1),
    "the same tokens to every expert": (lambda m, x: x @ m.w, (3, 5, 6), (7, 5), 3),
    "one slice": (lambda m, x: F.linear(x, m.w[1]), (3, 6, 5), (7, 5), 1),
    "one slice, chosen by a tensor": (
        lambda m, x: F.linear(x, m.w[torch.tensor(2)]),
        (3, 6, 5),
        (7, 5),
        1,
    ),
    "chunks": (
        lambda m, x: torch.cat([F.linear(x, w) for w in m.w.chunk(2)], -1),
        (6, 5),
        (7, 5),
        2,
    ),
    "interleaved rows": (
        lambda m, x: F.linear(x, m.w[::2]) * F.linear(x, m.w[1::2]),
        (6, 5),
        (7, 5),
        2,
    ),
    "view as another shape": (lambda m, x: F.linear(x, m.w.view(6, 5)), (2, 3, 5), (7, 5), 1),
    "a cast on the way": (lambda m, x: (x.double() @ m.w.double().t()).float(), (6, 5), (7, 5), 1),
    "a copy on the way": (lambda m, x: x @ m.w.t().contiguous(), (6, 5), (7, 5), 1),
    "chosen by an index vector": (
        lambda m, x: torch.bmm(m.w[torch.tensor([2, 0, 2, 1])], x.unsqueeze(-1)).squeeze(-1),
        (3, 6, 5),
        (4, 5),
        3,
    ),
    "grouped_mm": (
        lambda m, x: F.grouped_mm(x, m.w.mT, offs=torch.tensor([4, 4, 16], dtype=torch.int32)),
        (3, 8, 8),
        (16, 8),
        2,
    ),
    "einsum": (lambda m, x: torch.einsum("bti,oi->bto", x, m.w), (6, 5), (2, 7, 5), 1),
    "einsum, heads out": (
        lambda m, x: torch.einsum("ibh,hnd->ibnd", x, m.w),
        (5, 2, 3),
        (7, 2, 5),
        1,
    ),
    "einsum, heads in": (
        lambda m, x: torch.einsum("ibnd,hnd->ibh", x, m.w),
        (6, 2, 3),
        (7, 2, 2, 3),
        1,
    ),
    "einsum, experts, ellipsis": (
        lambda m, x: torch.einsum("e...i,eoi->e...o", x, m.w),
        (3, 6, 5),
        (3, 2, 7, 5),
        3,
    ),
    "einsum, weight first, implicit result": (
        lambda m, x: torch.einsum("oi,ti", m.w, x),
        (6, 5),
        (7, 5),
        1,
    ),
    "einsum, the same tokens to every expert": (
        lambda m, x: torch.einsum("ti,eio->eto", x, m.w),
        (3, 5, 6),
        (7, 5),
        3,
    ),
}
