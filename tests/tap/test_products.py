"""Each way to multiply by a weight that torch offers, seen for what it is."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from product_calls import PRODUCTS
from tap_tools import Wrap, assert_gradients, data, tap


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
