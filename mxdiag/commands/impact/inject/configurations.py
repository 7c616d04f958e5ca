"""The configurations that an impact measurement compares, as a list; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from mxdiag.commands.impact.inject.plan import (
    PLAIN_MXFP4,
    Components,
    Corrected,
    Injection,
    InjectionPlan,
    Noisy,
    cells_of,
    uniform,
)
from mxdiag.commands.impact.settings import OPERAND_SETS, ImpactSettings
from mxdiag.errors import UsageError
from mxdiag.quantize.corrections.aqn import AdaptiveNoise
from mxdiag.quantize.corrections.base import Correction
from mxdiag.quantize.corrections.registry import parse_corrections

#: The seven non-empty sets of components; `ideal` is what an unrounded block scale would leave.
COMPONENT_SETS: dict[str, frozenset[str]] = {
    "all": frozenset(("scale", "deadzone", "grid")),
    "scale": frozenset(("scale",)),
    "deadzone": frozenset(("deadzone",)),
    "grid": frozenset(("grid",)),
    "ideal": frozenset(("deadzone", "grid")),
    "scale+deadzone": frozenset(("scale", "deadzone")),
    "scale+grid": frozenset(("scale", "grid")),
}
#: 4-bit weights with 8-bit activations; 4-bit weights with activations as they are is `all` on W.
W4A8 = "w4a8"


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to run the model: what is injected where. Equal if of the same name and place."""

    name: str
    operands: str
    which: str  # forward, backward or both
    plan: InjectionPlan = field(compare=False, repr=False)


def configurations(settings: ImpactSettings) -> list[Configuration]:
    """Every configuration that the settings ask for, each once: forward, then backward, then both.

    Raises
    ------
    UsageError
        On an unknown name, or if names, operands and passes leave nothing.
    """
    sources = [_source(name) for name in _names(settings)]
    found: dict[Configuration, None] = {}
    for which in settings.passes:
        for source in sources:
            for operands in source.sets(which, settings.operands):
                found.setdefault(source.configuration(which, operands))
    if not found:
        raise UsageError(
            f"the configurations {','.join(settings.configs)} take no part in "
            f"{','.join(settings.passes)} with these operands",
            advice="Operands are W, A, WA forward, G, GWA backward, GWA in both",
        )
    return list(found)


def _names(settings: ImpactSettings) -> Iterator[str]:
    corrections = [c.name for c in parse_corrections(settings.scan.corrections)]
    noise = [f"aqn:{sigma:g}" for sigma in settings.aqn_sigmas]
    sets: dict[str, Iterable[str]] = {
        "default": [*COMPONENT_SETS, *corrections, *noise, W4A8],
        "components": COMPONENT_SETS,
        "corrections": corrections,
        "aqn": noise,
    }
    for name in settings.configs:
        yield from sets.get(name, (name,))


@dataclass(frozen=True, slots=True)
class _Source:
    """What a name stands for: an injection by operand, and the sets it is run on by default."""

    name: str
    by_operand: dict[str, Injection]
    defaults: Mapping[str, tuple[str, ...]]

    def sets(self, which: str, asked: tuple[str, ...] | None) -> list[str]:
        if asked is None:
            return list(self.defaults[which])
        allowed = OPERAND_SETS[which] if len(self.by_operand) == 3 else self.defaults[which]
        return [operands for operands in allowed if operands in asked]

    def configuration(self, which: str, operands: str) -> Configuration:
        cells = {
            (operand, gemm): self.by_operand[operand]
            for operand, gemm in cells_of(which, operands)
            if operand in self.by_operand
        }
        return Configuration(self.name, operands, which, uniform(cells))


def _source(name: str) -> _Source:
    if name in COMPONENT_SETS:
        return _Source(name, _everywhere(Components(COMPONENT_SETS[name])), OPERAND_SETS)
    if name == W4A8:
        (eight_bits,) = parse_corrections("mxfp8")
        cells: dict[str, Injection] = {"W": PLAIN_MXFP4, "A": Corrected(eight_bits)}
        return _Source(name, cells, {"forward": ("WA",), "backward": (), "both": ()})
    (correction,) = _one_correction(name)
    if isinstance(correction, AdaptiveNoise):
        noise: dict[str, Injection] = {"W": Noisy(correction.sigma)}
        return _Source(name, noise, {"forward": ("W",), "backward": (), "both": ()})
    sets = {"forward": ("WA",), "backward": ("GWA",), "both": ("GWA",)}
    return _Source(correction.name, _everywhere(Corrected(correction)), sets)


def _everywhere(injection: Injection) -> dict[str, Injection]:
    return dict.fromkeys(("W", "A", "G"), injection)


def _one_correction(name: str) -> tuple[Correction, ...]:
    try:
        found = parse_corrections([name])
    except UsageError as error:
        known = ", ".join([*COMPONENT_SETS, W4A8])
        raise UsageError(
            f"unknown configuration {name!r}",
            advice=f"Use {known}, a correction such as mbs, or default",
        ) from error
    if len(found) != 1:
        raise UsageError(f"{name!r} is no single configuration", advice="Name one correction each")
    return found
