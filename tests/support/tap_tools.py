"""What the tests of the tap share: a recorder, small modules, fixed data."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mxdiag.tap.tap import Observer, Product, Tap


class Recorder(Observer):
    """Keeps X and G of every product."""

    def __init__(self) -> None:
        self.x: dict[Product, Tensor] = {}
        self.g: dict[Product, Tensor] = {}
        self.forwards = self.backwards = 0

    def forward(self, product: Product, x: Tensor) -> None:
        self.forwards += 1
        self.x[product] = x.clone()

    def backward(self, product: Product, g: Tensor) -> None:
        self.backwards += 1
        self.g[product] = g.clone()

    def gradient(self, parameter: nn.Parameter, name: str) -> Tensor:
        """Sum of GᵀX over everything seen, in the parameter's own shape."""
        total = torch.zeros(parameter.numel())
        for product, g in self.g.items():
            if product.parameter == name:
                place = (product.size, product.stride, product.offset)
                total.as_strided(*place).add_(g.T @ self.x[product])
        return total.view(parameter.shape)


def tap(model: nn.Module, *inputs: Tensor, **settings: str) -> tuple[Recorder, Tap]:
    """Run a model forward and backward under a tap."""
    seen = Recorder()
    with Tap(model, seen, **settings) as tap:
        out = model(*inputs)
        out = out[0] if isinstance(out, tuple) else out
        if out.requires_grad:
            out.square().sum().backward()
    return seen, tap


def assert_gradients(model: nn.Module, seen: Recorder, *names: str) -> None:
    parameters = dict(model.named_parameters())
    for name in names:
        wanted = parameters[name].grad
        assert wanted is not None
        assert wanted.any()
        # sums of a few dozen products of numbers of size 1, in float32
        torch.testing.assert_close(
            seen.gradient(parameters[name], name), wanted, rtol=1e-4, atol=1e-4
        )


class Wrap(nn.Module):
    """A module with parameters of given shapes and a function for its forward."""

    def __init__(self, forward: Callable[..., Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))
        self._forward = forward

    def forward(self, *inputs: Tensor) -> Tensor:
        return self._forward(self, *inputs)


def data(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))
