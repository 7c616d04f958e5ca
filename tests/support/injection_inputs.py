"""Tensors and sets of components to inject."""

from __future__ import annotations

import torch
from torch import Tensor

from mxdiag.commands.impact.measures.attribution import COMPONENTS

ALL = frozenset(COMPONENTS)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Values over several octaves, so that blocks have zeros, large and small elements."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator).exp2()
    return x.masked_fill(torch.rand(shape, generator=generator) < 0.05, 0.0)
