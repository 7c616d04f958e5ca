"""The weights of a checkpoint, streamed and measured: no model, no torch, no transformers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mxdiag.checkpoint.inventory import CheckpointInventory, checkpoint_inventory
from mxdiag.checkpoint.open import Checkpoint, open_checkpoint
from mxdiag.checkpoint.stored import stored_statistics
from mxdiag.checkpoint.stream import ALIGN, CHUNK_BYTES, stream
from mxdiag.commands.scan.settings import ScanSettings
from mxdiag.decomposition import Decomposition, decompose
from mxdiag.errors import CheckpointError, UsageError
from mxdiag.gemms import Cell, choose_cells
from mxdiag.layers.linears import Linear
from mxdiag.progress import Progress
from mxdiag.quantize import dispatch
from mxdiag.quantize.corrections.base import Correction, Whole
from mxdiag.run.rows import Coverage, Measured, Measurement


def scan_checkpoint(
    path: str, settings: ScanSettings, corrections: Sequence[Correction], progress: Progress
) -> Measured:
    """Measure W of every linear layer that a checkpoint holds.

    Raises
    ------
    CheckpointError
        If the checkpoint cannot be read or holds no linear weight.
    UsageError
        If W is not among the operands.
    """
    cells = [c for c in choose_cells(settings.operands, settings.gemms) if c.operand == "W"]
    if not cells:
        raise UsageError(
            "a weights-only scan measures W", advice="Put W into --operands, or load the model"
        )
    with open_checkpoint(path, allow_pickle=settings.allow_pickle) as checkpoint:
        found = checkpoint_inventory(checkpoint, settings.include, settings.exclude)
        if not found.measured:
            raise CheckpointError(
                "holds no linear weight to measure", where=path, advice=_why_none(found)
            )
        parts = _measure(checkpoint, found.measured, cells, settings, corrections, progress)
        measurements = [
            Measurement(
                linear,
                cell,
                parts[linear, cell],
                dtype=checkpoint.entries[linear.tensor].dtype,
                facts=_facts(checkpoint, linear),
            )
            for linear in found.measured
            for cell in cells
        ]
        return Measured(
            measurements,
            Coverage(
                measured=len(found.measured),
                measured_parameters=found.measured_parameters,
                parameters=found.matrix_parameters,
                excluded=[
                    {"layer": item.name, "rule": item.rule, "parameters": item.parameters}
                    for item in found.excluded
                ],
                unsupported=[
                    {"layer": item.name, "reason": item.rule, "parameters": item.parameters}
                    for item in found.unsupported
                ],
            ),
            model={
                "architecture": checkpoint.architecture,
                "parameters": found.parameters,
                "revision": None,
                "files": [
                    {"name": file.name, "bytes": file.stat().st_size} for file in checkpoint.files
                ],
            },
            warnings=list(checkpoint.warnings),
        )


def _why_none(found: CheckpointInventory) -> str:
    if found.unsupported:
        first = found.unsupported[0]
        count = len(found.unsupported)
        return f"{count} tensors are unsupported, such as {first.name}: {first.rule}"
    if not found.excluded:
        return "Expected two-dimensional tensors called <layer>.weight"
    first = found.excluded[0]
    return f"{len(found.excluded)} tensors are excluded, such as {first.name}: see --include"


def _facts(checkpoint: Checkpoint, linear: Linear) -> dict[str, Any]:
    """What a weight stored in a 4-bit block format says about itself."""
    statistics = stored_statistics(checkpoint, linear)
    return {} if statistics is None else {"stored": statistics}


def _measure(
    checkpoint: Checkpoint,
    linears: Sequence[Linear],
    cells: Sequence[Cell],
    settings: ScanSettings,
    corrections: Sequence[Correction],
    progress: Progress,
) -> dict[tuple[Linear, Cell], Decomposition]:
    parts = {
        (linear, cell): Decomposition.empty(settings.scale_rule)
        for linear in linears
        for cell in cells
    }
    applicable = [correction for correction in corrections if "W" in correction.operands]
    align = math.lcm(ALIGN, *(correction.granule for correction in applicable))
    wholes = _wholes(checkpoint, linears, cells, settings, applicable)
    with progress.phase("weights", sum(_bytes(checkpoint, linear) for linear in linears), "B"):
        for chunk in stream(checkpoint, linears, align=align):
            for cell in cells:
                key = (chunk.linear, cell)
                whole = wholes.get(key)
                if whole is not None:
                    whole = replace(whole, start=(chunk.row, chunk.col))
                parts[key] = parts[key] + decompose(
                    chunk.data,
                    cell.axis,
                    settings.scale_rule,
                    corrections=applicable,
                    whole=whole,
                    backend=settings.backend,
                )
            progress.advance(chunk.data.nbytes)
    return parts


def _bytes(checkpoint: Checkpoint, linear: Linear) -> int:
    return linear.numel * checkpoint.values(linear.tensor).dtype.itemsize


def _wholes(
    checkpoint: Checkpoint,
    linears: Sequence[Linear],
    cells: Sequence[Cell],
    settings: ScanSettings,
    corrections: Sequence[Correction],
) -> dict[tuple[Linear, Cell], Whole]:
    """What pieces must know of their whole, of every weight that may arrive in several.

    A tensor of at most half a chunk is never cut, so it needs no pass of its own.
    """
    cut = [
        linear
        for linear in linears
        if checkpoint.entries[linear.tensor].numel * checkpoint.values(linear.tensor).dtype.itemsize
        > CHUNK_BYTES // 2
    ]
    wholes = {(linear, cell): Whole(linear.shape, (0, 0)) for linear in cut for cell in cells}
    amaxes = any(correction.needs_amax for correction in corrections)
    energies = any(correction.needs_rms for correction in corrections)
    if not wholes or not (amaxes or energies):
        return wholes
    sums = dict.fromkeys(wholes, (0.0, 0))
    for chunk in stream(checkpoint, cut):
        for cell in cells:
            key = (chunk.linear, cell)
            piece = dispatch.measure(
                chunk.data, cell.axis, settings.scale_rule, backend=settings.backend
            )
            wholes[key] = replace(wholes[key], amax=max(wholes[key].amax, piece.amax))
            if energies:
                energy, counted = dispatch.finite_energy(chunk.data, cell.axis)
                sums[key] = sums[key][0] + energy, sums[key][1] + counted
    return {
        key: replace(whole, rms=math.sqrt(sums[key][0] / max(sums[key][1], 1)))
        for key, whole in wholes.items()
    }
