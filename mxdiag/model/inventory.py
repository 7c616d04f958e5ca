"""The linear layers of a live model: their names in its checkpoint, their place in its parameters.

Names propose, the tap decides: before the model runs, a parameter is a linear weight if its
checkpoint name says so (`mxdiag.layers.linears`); afterwards, if it was multiplied.
`ModelInventory.resolve` turns a product that a tap saw into rows, `ModelInventory.settle` settles
what the names got wrong. Every parameter of two or more axes ends in exactly one of `measured`,
`excluded` and `unsupported`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from mxdiag.checkpoint.inventory import Unmeasured
from mxdiag.errors import ModelError
from mxdiag.layers.linears import Linear, classify, expert_of, role_of
from mxdiag.layers.roles import TIED_ROLE, exclusion_of_tied
from mxdiag.model.checkpoint_names import (
    Stored,
    stored_tensors,
    transformers_models,
    user_name,
    within,
)
from mxdiag.model.live import LiveLinear, Part, output_columns
from mxdiag.tap.layouts import WeightView
from mxdiag.tap.offload import offloaded_values
from mxdiag.tap.parameters import parameter_names, tied_names
from mxdiag.tap.tap import Tap, cannot_tap

#: Last names of buffers in which quantized modules keep their weights.
_WEIGHT_BUFFERS = frozenset(
    {"qweight", "weight", "weight_packed", "weight_q", "packed_weight", "B"}
)


#: Parameters that torch's parametrizations, weight norms and pruning compute a weight from.
_PARAMETRIZED = re.compile(r"(^|\.)parametrizations\.|weight_(orig|g|v)$")


@dataclass(slots=True)
class _Piece:
    """One tensor of the checkpoint and what became of it."""

    stored: Stored
    layers: list[LiveLinear] = field(default_factory=list)
    rule: str | None = None
    unsupported: str | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.stored.shape)


class ModelInventory:
    """Where every parameter of a live model ends; made by `model_inventory`."""

    def __init__(
        self,
        model: nn.Module,
        include: Iterable[str],
        exclude: Iterable[str],
        absent: Iterable[str],
    ) -> None:
        self._include, self._exclude = tuple(include), tuple(exclude)
        self._parameters = parameter_names(model)
        self._owners = _owners(model, self._parameters)
        self._aliases = tied_names(model)
        self._pieces: dict[str, list[_Piece]] = {}
        self._parts: dict[WeightView, tuple[Part, ...]] = {}
        self._seen: dict[LiveLinear, list[WeightView]] = {}
        self._twice: set[LiveLinear] = set()  # a second orientation of a weight already counted
        self._buffers = _packed_buffers(model)
        self._offloaded = offloaded_values(model)
        self._unreadable = _unreadable(self._matrices(), self._offloaded)
        self._unreadable |= dict.fromkeys(absent, "not in the checkpoint: its values are random")
        self._unreadable |= {
            name: "a layer's weight is computed from it (a parametrization)"
            for name in self._matrices()
            if _PARAMETRIZED.search(name)
        }
        self._classify(model)

    def _matrices(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self._parameters.items() if p.dim() >= 2}

    # ---- what the names say --------------------------------------------------------------------

    def _classify(self, model: nn.Module) -> None:
        shapes = {name: tuple(p.shape) for name, p in self._matrices().items()}
        configs = {prefix: _config(inner) for prefix, inner in transformers_models(model)}
        for stored in stored_tensors(model, shapes):
            prefix = max(
                (p for p in configs if stored.parameter.startswith(p)), key=len, default=None
            )
            piece = _Piece(stored)
            self._propose(piece, None if prefix is None else configs[prefix])
            self._pieces.setdefault(stored.parameter, []).append(piece)

    def _propose(self, piece: _Piece, config: Mapping[str, Any] | None) -> None:
        stored = piece.stored
        owner = self._owners.get(stored.parameter)
        if owner is not None and issubclass(owner, _ConvNd):
            piece.rule = "not a linear weight: convolution"
            return
        verdict = classify(stored.name, stored.shape, config)
        linears = list(verdict.linears)
        if not linears and owner is not None and issubclass(owner, nn.Linear):
            layer = _layer(stored.name)
            shape, stride = (stored.shape[0], stored.shape[1]), (stored.shape[1], 1)
            linears = [Linear(layer, role_of(layer), None, stored.name, 0, shape, stride)]
        else:
            piece.rule, piece.unsupported = verdict.rule, verdict.unsupported
        computed = _PARAMETRIZED.search(stored.parameter) is not None
        if (piece.rule is None or computed) and stored.parameter in self._unreadable:
            piece.rule, piece.unsupported = None, self._unreadable[stored.parameter]
            return
        for linear in linears:
            if owner is not None and issubclass(owner, nn.Embedding):
                role = TIED_ROLE if self._is_head(stored.parameter) else "embedding"
                linear = replace(linear, role=role)
            offset, stride = within(stored, linear.offset, linear.shape, linear.stride)
            view = WeightView(stored.parameter, offset, linear.shape, stride, linear.expert)
            piece.layers.append(LiveLinear(linear, view))

    def _is_head(self, parameter: str) -> bool:
        """Whether an embedding is tied to an output head."""
        return any(role_of(_layer(a)) == TIED_ROLE for a in self._names(parameter))

    def _names(self, parameter: str) -> list[str]:
        return [user_name(alias) for alias in self._aliases.get(parameter, [])]

    def _rule(self, live: LiveLinear) -> str | None:
        """Return the rule that excludes a layer; a tied weight goes by any of its names."""
        role, aliases = live.linear.role, self._names(live.view.parameter)
        names = [
            live.layer,
            *map(_layer, aliases),
            *([TIED_ROLE] if aliases and role == TIED_ROLE else []),
        ]
        return exclusion_of_tied(names, role, self._include, self._exclude)

    # ---- what the tap says ---------------------------------------------------------------------

    def resolve(self, view: WeightView) -> tuple[Part, ...]:
        """Return the measured layers that a product's weight holds; cached, so cheap per call.

        Several for a fused weight (gate and up share X and each have their columns of G), none for
        an excluded one. A weight that no name announced becomes a layer here.
        """
        parts = self._parts.get(view)
        if parts is None:
            unreadable = view.parameter in self._unreadable
            layers = [] if unreadable else self._covered(view) or self._discover(view)
            for live, _ in layers:
                self._seen.setdefault(live, []).append(view)
            parts = tuple(
                Part(live, columns) for live, columns in layers if self._rule(live) is None
            )
            self._parts[view] = parts
        return parts

    def _covered(self, view: WeightView) -> list[tuple[LiveLinear, slice]]:
        pieces = self._pieces.get(view.parameter, ())
        found = [
            (live, output_columns(view, live.view)) for piece in pieces for live in piece.layers
        ]
        return [(live, columns) for live, columns in found if columns is not None]

    def _discover(self, view: WeightView) -> list[tuple[LiveLinear, slice]]:
        """Make layers of a weight multiplied though no name said so, or in another form."""
        pieces = self._pieces[view.parameter]
        piece = pieces[0]
        parameter = self._parameters[view.parameter]
        base = _layer(piece.stored.name if len(pieces) == 1 else user_name(view.parameter))
        taken = [live for p in pieces for live in p.layers if live in self._seen]
        if not taken:
            for p in pieces:
                p.layers, p.rule, p.unsupported = [], None, None
        slab = math.prod(parameter.shape[1:])
        if view.expert is not None and math.prod(view.size) == slab:
            views = [
                replace(view, offset=view.offset + (e - view.expert) * slab, expert=e)
                for e in range(parameter.shape[0])
            ]
            made = [self._layer_at(f"{base}[{v.expert}]", v, piece) for v in views]
        elif math.prod(view.size) == parameter.numel():
            made = [self._layer_at(f"{base}.T" if taken else base, view, piece)]
            self._twice.update(made if taken else ())
        else:
            first = view.offset if view.expert is None else view.offset - view.expert * slab
            rows = first // max(view.stride[0], 1)
            index = "" if view.expert is None else f"[{view.expert}]"
            made = [self._layer_at(f"{base}{index}[{rows}:{rows + view.size[0]}]", view, piece)]
        piece.layers += made
        chosen = next(live for live in made if live.view.offset == view.offset)
        return [(chosen, slice(0, view.size[0], 1))]

    @staticmethod
    def _layer_at(name: str, view: WeightView, piece: _Piece) -> LiveLinear:
        role = role_of(name.removesuffix(".T"))
        expert = view.expert if view.expert is not None else expert_of(name)
        return LiveLinear(
            Linear(name, role, expert, piece.stored.name, view.offset, view.size, view.stride), view
        )

    def settle(self, tap: Tap) -> None:
        """After the last batch: correct by use what the names got wrong.

        A weight that was never multiplied but used otherwise is no linear weight; one that was
        multiplied in a way the tap cannot take apart is unsupported.
        """
        for name, pieces in self._pieces.items():
            if name in self._unreadable or any(
                live in self._seen for piece in pieces for live in piece.layers
            ):
                continue
            used = sorted(tap.uses.get(name, ()))
            for piece in pieces:
                self._settle(piece, used, tap.unsupported.get(name))

    def _settle(self, piece: _Piece, used: Sequence[str], unsupported: str | None) -> None:
        kept = bool(piece.layers) and all(self._rule(live) is not None for live in piece.layers)
        if unsupported is not None:
            piece.layers, piece.rule, piece.unsupported = [], None, unsupported
        elif _PARAMETRIZED.search(piece.stored.parameter):
            return  # used to compute a weight, which is what its reason says
        elif used and not kept and piece.rule is None:
            piece.layers, piece.unsupported = [], None
            piece.rule = (
                "embedding" if used == ["embedding"] else f"not a linear weight: {_uses(used)}"
            )

    # ---- read-outs -----------------------------------------------------------------------------

    @property
    def measured(self) -> list[LiveLinear]:
        """The layers to report, in the order of the model's parameters."""
        return [live for live in self._layers() if self._rule(live) is None]

    def _layers(self) -> list[LiveLinear]:
        return [
            live for pieces in self._pieces.values() for piece in pieces for live in piece.layers
        ]

    @property
    def excluded(self) -> list[Unmeasured]:
        """What a rule leaves out, and what is no linear weight."""
        found = []
        for piece in self._all_pieces():
            if piece.rule is not None:
                found.append(Unmeasured(piece.stored.name, piece.rule, piece.numel))
            for live in piece.layers:
                rule = self._rule(live)
                if rule is not None:
                    numel = 0 if live in self._twice else live.linear.numel
                    found.append(Unmeasured(live.layer, rule, numel))
        return found

    @property
    def unsupported(self) -> list[Unmeasured]:
        """What may be a linear weight and cannot be measured, with the reason."""
        found = [
            Unmeasured(piece.stored.name, piece.unsupported, piece.numel)
            for piece in self._all_pieces()
            if piece.unsupported is not None
        ]
        for name, pieces in self._pieces.items():
            if all(piece.layers for piece in pieces):
                held = {live: live.linear.numel for piece in pieces for live in piece.layers}
                rest = self._parameters[name].numel() - sum(
                    n for live, n in held.items() if live not in self._twice
                )
                if rest > 0:
                    found.append(
                        Unmeasured(user_name(name), "only a part of it was multiplied", rest)
                    )
        return found + [Unmeasured(name, "weights packed in a buffer", 0) for name in self._buffers]

    def _all_pieces(self) -> list[_Piece]:
        return [piece for pieces in self._pieces.values() for piece in pieces]

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones once."""
        return sum(p.numel() for p in self._parameters.values())

    @property
    def matrix_parameters(self) -> int:
        """Number of parameters in tensors of two or more axes."""
        return sum(p.numel() for p in self._matrices().values())

    @property
    def measured_parameters(self) -> int:
        """Number of parameters in the measured layers."""
        return sum(live.linear.numel for live in self.measured if live not in self._twice)

    def weight(self, live: LiveLinear) -> Tensor:
        """W as [out, in]: a detached view of the parameter (its full value, if distributed).

        Raises
        ------
        ModelError
            If the weight is not loaded.
        """
        parameter = self._parameters[live.view.parameter]
        offloaded = self._offloaded.get(live.view.parameter)
        if parameter.device.type == "meta" and offloaded is None:
            raise ModelError(
                "the weight is not loaded", where=live.layer, advice="Load the whole model"
            )
        values = parameter.detach() if offloaded is None else offloaded()
        if _distributed(parameter):
            values = cast(Any, values).full_tensor()
        values = values.contiguous()
        view = live.view
        return values.as_strided(view.size, view.stride, values.storage_offset() + view.offset)

    def in_memory(self, live: LiveLinear) -> bool:
        """Whether `weight` is a view of values in main memory, not a copy or a transfer."""
        name = live.view.parameter
        parameter = self._parameters[name]
        here = parameter.device.type == "cpu" and name not in self._offloaded
        return here and not _distributed(parameter) and parameter.is_contiguous()

    def dtype(self, live: LiveLinear) -> str:
        """Dtype of a layer's weight: `bfloat16`, `float32` ..."""
        return str(self._parameters[live.view.parameter].dtype).removeprefix("torch.")

    def why_not_observed(self, live: LiveLinear, operand: str, tap: Tap) -> str | None:
        """Why A or G of a layer was not seen by a tap; None if it was."""
        views = self._seen.get(live, [])
        calls = sum(tap.calls[view] for view in views)
        if calls and (operand == "A" or any(tap.gradients[view] for view in views)):
            return None
        if calls:
            return "no gradient reached it"
        name = live.view.parameter
        if name in tap.untapped:
            return f"cannot be tapped: {tap.untapped[name]}"
        if live.linear.expert is not None:
            return "no token was routed to it"
        return "never called"


def model_inventory(
    model: nn.Module,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    absent: Iterable[str] = (),
) -> ModelInventory:
    """Find the linear layers of a model.

    Parameters
    ----------
    model
        Any torch module, tapped or not.
    include, exclude
        Globs on layer names: see `mxdiag.layers.linears.exclusion`.
    absent
        Parameters that the checkpoint lacked (`LoadedModel.absent`): their values mean nothing.
    """
    return ModelInventory(model, include, exclude, absent)


def _layer(name: str) -> str:
    return name.removesuffix(".weight")


def _config(model: Any) -> Mapping[str, Any]:
    return model.config.to_dict()


def _uses(names: Sequence[str]) -> str:
    return "used by " + ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


def _owners(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, type[nn.Module]]:
    """Class of the module that holds each parameter (the first, for a tied one)."""
    owners: dict[int, type[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), type(module))
    return {name: owners[id(p)] for name, p in parameters.items()}


def _unreadable(
    parameters: Mapping[str, nn.Parameter], offloaded: Collection[str]
) -> dict[str, str]:
    """Parameters whose values cannot be had as one plain tensor, with the reason."""
    reasons = {name: cannot_tap(p) for name, p in parameters.items()}
    return {
        name: reason
        for name, reason in reasons.items()
        if reason is not None and not _distributed(parameters[name]) and name not in offloaded
    }


def _distributed(parameter: Tensor) -> bool:
    return hasattr(parameter, "full_tensor") and parameter.is_floating_point()


def _packed_buffers(model: nn.Module) -> list[str]:
    """Weights that quantized modules keep in buffers, where no parameter tells of them."""
    return [
        user_name(name)
        for name, buffer in model.named_buffers()
        if buffer.dim() >= 2 and name.rpartition(".")[2] in _WEIGHT_BUFFERS
    ]
