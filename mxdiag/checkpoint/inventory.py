"""Where every parameter of a checkpoint ends: measured, excluded by a rule, or unsupported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mxdiag.checkpoint.open import Checkpoint
from mxdiag.checkpoint.tied import tied_embedding
from mxdiag.layers.linears import Linear, classify, is_mask
from mxdiag.layers.roles import TIED_ROLE, exclusion_of_tied


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """A stored tensor, or one layer of it, that is not measured, and the `rule` or reason."""

    name: str
    rule: str
    parameters: int


@dataclass(slots=True)
class CheckpointInventory:
    """Where every parameter of two or more axes ends: measured, excluded or unsupported.

    `parameters` counts all parameters, `matrix_parameters` those of two or more axes; the three
    groups add up to the latter exactly. Index and mask buffers are listed with 0 parameters, and
    an output head that the config ties to the embedding counts once.
    """

    measured: list[Linear] = field(default_factory=list)
    excluded: list[Unmeasured] = field(default_factory=list)
    unsupported: list[Unmeasured] = field(default_factory=list)
    parameters: int = 0
    matrix_parameters: int = 0

    @property
    def measured_parameters(self) -> int:
        """Parameters of the measured layers."""
        return sum(linear.numel for linear in self.measured)

    @property
    def excluded_parameters(self) -> int:
        """Parameters that a rule or an option leaves out."""
        return sum(item.parameters for item in self.excluded)

    @property
    def unsupported_parameters(self) -> int:
        """Parameters that cannot be read or placed."""
        return sum(item.parameters for item in self.unsupported)

    @property
    def parameter_fraction(self) -> float:
        """Share of `matrix_parameters` that is measured or excluded by a named rule."""
        if not self.matrix_parameters:
            return 1.0
        return 1.0 - self.unsupported_parameters / self.matrix_parameters


def checkpoint_inventory(
    checkpoint: Checkpoint, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> CheckpointInventory:
    """Sort every tensor of a checkpoint into measured layers, excluded and unsupported ones.

    `include` and `exclude` are globs on layer names: see `mxdiag.layers.linears.exclusion`.
    """
    result = CheckpointInventory()
    table = tied_embedding(checkpoint.entries.values(), checkpoint.config)
    copy = _tied_head(checkpoint, table)
    for entry in checkpoint.entries.values():
        if entry.integer or is_mask(entry.name, entry.shape):
            if len(entry.shape) > 1:
                result.excluded.append(
                    Unmeasured(entry.name, f"not a linear weight: {entry.dtype} buffer", 0)
                )
            continue
        if entry.name == copy:
            result.excluded.append(Unmeasured(entry.name, "tied to the input embedding", 0))
            continue
        result.parameters += entry.numel
        if len(entry.shape) < 2:
            continue
        result.matrix_parameters += entry.numel
        if entry.unsupported is not None:
            result.unsupported.append(Unmeasured(entry.name, entry.unsupported, entry.numel))
            continue
        verdict = classify(entry.name, entry.shape, checkpoint.config, out_in=entry.out_in)
        if verdict.unsupported is not None:
            result.unsupported.append(Unmeasured(entry.name, verdict.unsupported, entry.numel))
        elif verdict.rule is not None:
            result.excluded.append(Unmeasured(entry.name, verdict.rule, entry.numel))
        for linear in verdict.linears:
            names = [linear.layer]
            if entry.name == table:  # named as a live model names it
                linear, names = replace(linear, role=TIED_ROLE), [linear.layer, TIED_ROLE]
            rule = exclusion_of_tied(names, linear.role, include, exclude)
            if rule is None:
                result.measured.append(linear)
            else:
                result.excluded.append(Unmeasured(linear.layer, rule, linear.numel))
    return result


def _tied_head(checkpoint: Checkpoint, table: str | None) -> str | None:
    """Name of a stored output head that is a copy of the embedding `table`."""
    head = checkpoint.entries.get("lm_head.weight")
    if table is None or head is None or head.shape != checkpoint.entries[table].shape:
        return None
    return head.name
