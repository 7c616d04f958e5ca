"""What of a number is noise: jittered repeats, and resampling of the calibration records.

A network amplifies rounding: a change of one unit in the last place moves the divergence of a
quantized model by several percent. So every pass is repeated with embeddings jittered by 1e-6
relative, the same jitter for the reference and for every configuration.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

#: Resamples of the records.
RESAMPLES = 200
_WORD = {torch.bfloat16: torch.int16, torch.float16: torch.int16}


class Jitter:
    """Multiplies the embeddings' output by 1 + `relative` times a standard normal.

    Where the model has no input embedding, its floating-point inputs take the jitter. float16 and
    bfloat16 cannot hold so small a change: there each value moves to its neighbour with the
    probability that keeps the mean, so few of them move at all.
    """

    def __init__(self, relative: float, seed: int) -> None:
        self.relative, self._seed = relative, seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._draw = 0

    def begin(self, repeat: int, record: int) -> None:
        """Before each run of the model: the draws of this repeat and record, from the start."""
        words = np.random.SeedSequence([self._seed, repeat, record]).generate_state(2)
        self._draw = int(words[0]) << 31 ^ int(words[1])
        self._generators.clear()

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Jitter the model for the length of a block."""
        embedding = input_embedding(model)
        if embedding is not None:
            handle = embedding.register_forward_hook(self._after)
        else:
            handle = model.register_forward_pre_hook(self._before, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.moved(output) if isinstance(output, Tensor) else None

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (
            tuple(self.moved(a) if isinstance(a, Tensor) else a for a in args),
            {k: self.moved(v) if isinstance(v, Tensor) else v for k, v in kwargs.items()},
        )

    def moved(self, x: Tensor) -> Tensor:
        """X with the next draw of jitter; x itself if it is not floating point."""
        if not self.relative or not x.is_floating_point():
            return x
        generator = self._generators.get(x.device)
        if generator is None:
            generator = torch.Generator(x.device).manual_seed(self._draw)
            self._generators[x.device] = generator
        wide = x if x.dtype == torch.float64 else x.float()
        step = torch.randn(x.shape, generator=generator, device=x.device, dtype=wide.dtype)
        step.mul_(self.relative)
        if x.dtype not in _WORD:
            return x * (1 + step)
        return _moved_to_neighbour(x, step, generator)


def _moved_to_neighbour(x: Tensor, step: Tensor, generator: torch.Generator) -> Tensor:
    """16-bit x times 1 + step, rounded up or down at random so that the mean is kept."""
    up = torch.where(step > 0, 1, -1).to(torch.int16)  # in magnitude: the sign bit is on top
    neighbour = (x.detach().contiguous().view(_WORD[x.dtype]) + up).view(x.dtype)
    gap = (neighbour.float() - x.float()).abs()
    chance = (step * x.float()).abs() / gap
    draw = torch.rand(x.shape, generator=generator, device=x.device)
    moves = (draw < chance) & (x != 0) & neighbour.isfinite() & x.isfinite()
    return torch.where(moves, neighbour, x)


def input_embedding(model: nn.Module) -> nn.Module | None:
    """The module that embeds tokens, None if the model has none."""
    get = getattr(model, "get_input_embeddings", None)
    if get is None:
        return None
    try:
        found = get()
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(found, nn.Module) else None


# ---- summaries ---------------------------------------------------------------------------------


def mean_and_sd(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and sample standard deviation over repeats; None where a repeat has no number."""
    if not values or not all(math.isfinite(value) for value in values):
        return None, None
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def summarized(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """`name` and `name_sd`."""
    mean, sd = mean_and_sd(values)
    return {name: mean, f"{name}_sd": sd}


def resamples(records: int, seed: int) -> np.ndarray | None:
    """How often each record occurs in each resample, [RESAMPLES, records]; None for one record."""
    if records < 2:
        return None
    generator = np.random.default_rng([seed, records])
    return generator.multinomial(records, np.full(records, 1 / records), size=RESAMPLES)


def spread(values: Iterable[float]) -> float | None:
    """Sample standard deviation of the resamples that have a number; None for fewer than two."""
    finite = [value for value in values if math.isfinite(value)]
    return float(np.std(finite, ddof=1)) if len(finite) > 1 else None
