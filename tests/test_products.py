"""Each way to multiply by a weight that torch offers, seen for what it is."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tap_tools import Wrap, assert_gradients, data, tap
from torch import Tensor, nn

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


@pytest.mark.parametrize("case", PRODUCTS)
def test_each_way_to_multiply(case: str) -> None:
    forward, weight, shape, matrices = PRODUCTS[case]
    model = Wrap(forward, w=weight)
    plain = copy.deepcopy(model)
    out = plain(data(*shape))
    out.square().sum().backward()
    seen, tapped = tap(model, data(*shape))
    assert torch.equal(plain.w.grad, model.w.grad)
    assert len(tapped.calls) == matrices
    assert not any(view.derived for view in tapped.calls)
    assert not tapped.unsupported
    assert_gradients(model, seen, "w")
    alone, _ = tap(model, data(*shape), gradients="activations")
    assert alone.g.keys() == seen.g.keys()
    for product, g in alone.g.items():
        # torch picks another kernel for matmul where no operand requires grad
        torch.testing.assert_close(g, seen.g[product], rtol=1e-4, atol=1e-4)


def test_what_is_no_product_is_recorded_as_a_use() -> None:
    model = Wrap(lambda m, x: x * m.w.exp() + torch.einsum("ti,ti->ti", x, m.w), w=(7, 5))
    seen, tapped = tap(model, data(7, 5))
    assert not seen.x
    assert set(tapped.uses["w"]) >= {"exp", "mul", "einsum"}


@pytest.mark.parametrize(
    ("forward", "what"),
    [
        (lambda m, x: torch.tensordot(x, m.w, dims=1), "tensordot"),
        (lambda m, x: F.bilinear(x, x, m.w.view(1, 5, 6)[:, :, :5]), "bilinear"),
        (lambda m, x: torch.einsum("ti,io,to->to", x, m.w, x @ torch.ones(5, 6)), "einsum"),
        (lambda m, x: x @ (m.w @ m.w.t()), "another parameter"),
    ],
)
def test_a_product_that_cannot_be_taken_apart_is_named(
    forward: Callable[..., Tensor], what: str
) -> None:
    _, tapped = tap(Wrap(forward, w=(5, 6)), data(7, 5))
    assert what in tapped.unsupported["w"]


def test_recurrent_layers_are_named() -> None:
    _, tapped = tap(nn.LSTM(4, 4), data(3, 2, 4))
    assert set(tapped.unsupported) == {"weight_ih_l0", "weight_hh_l0"}
