"""All that `mxdiag impact` measures: the table, rollouts, one unit at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mxdiag.commands.impact.inject.configurations import configurations
from mxdiag.commands.impact.per_layer.sensitivity import SensitivitySettings, measure_sensitivity
from mxdiag.commands.impact.rollout.rollout import RolloutSettings, roll_out, rollout_configurations
from mxdiag.commands.impact.session import Session
from mxdiag.commands.impact.settings import ImpactSettings
from mxdiag.commands.impact.table import impact_batches, measure_impact
from mxdiag.errors import UsageError
from mxdiag.model.batches import Loss
from mxdiag.model.calibration import Calibration
from mxdiag.progress import Progress

DEFAULT_ROLLOUT_TOKENS = 32
#: Finished units of a per-layer measurement, in the run folder, so that it can be resumed.
PER_LAYER_JOURNAL = "per-layer.jsonl"
#: Parts of an impact that stay in a run when it is measured again without them.
_KEPT = ("rollout", "per_layer", "per_layer_ranking", "per_layer_notes")


@dataclass(frozen=True, slots=True)
class Extras:
    """What is measured beside the table; see the options of `mxdiag impact`."""

    rollout_tokens: int | None = None
    rollout_temperature: float = 1.0
    rollout_clip: float = 0.2
    per_layer: str | None = None
    per_layer_operands: str = "W"
    journal: Path | None = None

    def check(self) -> None:
        """Refuse bad options before anything is loaded; a UsageError says which."""
        if self.rollout_tokens is not None and self.rollout_tokens < 0:
            raise UsageError(f"--rollout-tokens must be at least 0, not {self.rollout_tokens}")
        self.rollout()
        self.sensitivity()

    def rollout(self) -> RolloutSettings | None:
        """How to roll out, None if not at all. Texts are only rolled out if a number was given."""
        if self.rollout_tokens == 0:
            return None
        return RolloutSettings(
            tokens=self.rollout_tokens or DEFAULT_ROLLOUT_TOKENS,
            temperature=self.rollout_temperature,
            clip=self.rollout_clip,
            halve_texts=self.rollout_tokens is not None,
        )

    def sensitivity(self) -> SensitivitySettings | None:
        """What a unit is, None if units are not measured."""
        if self.per_layer is None:
            return None
        return SensitivitySettings(self.per_layer, self.per_layer_operands)


@torch.inference_mode(False)  # the caller's mode would make every tensor an inference tensor
def measure_all(
    model: nn.Module,
    tokenizer: Any,
    calibration: Calibration,
    settings: ImpactSettings,
    extras: Extras,
    loss: Loss | None,
    progress: Progress,
    absent: Sequence[str],
) -> dict[str, Any]:
    """The whole `impact` of a run.

    Raises
    ------
    MxdiagError
        If an option names nothing, or the model does not run on the calibration.
    """
    rollout, sensitivity = extras.rollout(), extras.sensitivity()
    impact = measure_impact(
        model, tokenizer, calibration, settings, loss=loss, progress=progress, absent=absent
    )
    notes: list[str] = []
    batches = impact_batches(model, tokenizer, calibration, settings, False, [])
    session = Session(model, batches, settings, loss=loss, absent=absent)
    has_prompts = any(batch.record and batch.record.prompt_length for batch in batches)
    if rollout is not None and (has_prompts or rollout.halve_texts):
        chosen = rollout_configurations(configurations(settings))
        impact["rollout"] = roll_out(session, chosen, rollout, notes=notes, progress=progress)
    if sensitivity is not None:
        impact |= measure_sensitivity(
            session, sensitivity, journal=extras.journal, progress=progress
        )
    impact["warnings"] = [*impact.get("warnings", []), *notes]
    return impact


def merged(before: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """What was measured now, with the rollouts and single layers of before where it has none."""
    kept = {name: before[name] for name in _KEPT if before.get(name) and not measured.get(name)}
    return {**measured, **kept}
