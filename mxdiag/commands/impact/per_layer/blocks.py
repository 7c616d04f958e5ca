"""Skipping the blocks of a model whose outputs are known already.

Where only one layer is changed, everything that runs before it gives what it gave before. A model
is a stack of blocks, so each block that ended before the changed layer's block began returns its
recorded output in place of running.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from mxdiag.tap.parameters import parameter_names

_ABSENT = object()


class Blocks:
    """The blocks of a model that hold given parameters, and what they returned when recorded.

    Blocks are the children of the outermost `nn.ModuleList`s. Unusual models are safe with it only
    if what a block returns is all that it does: `per_layer.sensitivity` checks that first.

    Parameters
    ----------
    model
        Any torch module.
    parameters
        Names of the parameters that may be changed later.
    """

    def __init__(self, model: nn.Module, parameters: Iterable[str]) -> None:
        known = parameter_names(model)
        wanted = {id(known[name]): name for name in parameters}
        self._modules = _blocks(model, frozenset(wanted))
        self._holders: dict[str, list[int]] = {name: [] for name in wanted.values()}
        for index, block in enumerate(self._modules):
            for name in dict.fromkeys(_held(block, wanted)):
                self._holders[name].append(index)
        inside = {id(module) for block in self._modules for module in block.modules()}
        others = [module for module in model.modules() if id(module) not in inside]
        for module in others:
            for parameter in module.parameters(recurse=False):
                self._holders.pop(wanted.get(id(parameter), ""), None)
        self._began: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        self._calls: Counter[int] = Counter()
        self._outputs: dict[int, Any] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Run the model once inside: what each block returns is kept, in place of earlier ones."""
        self._began.clear()
        self._ended.clear()
        self._calls.clear()
        self._outputs.clear()
        with self._forwards({i: self._recorder(i) for i in range(len(self._modules))}):
            yield

    @contextmanager
    def skipping(self, parameters: Iterable[str]) -> Iterator[int]:
        """Let the blocks that ended before any of these parameters was used return their outputs.

        Yields their number. The blocks run again afterwards, also after an exception.
        """
        indices = self.before(parameters)
        with self._forwards({index: self._player(index) for index in indices}):
            yield len(indices)

    def before(self, parameters: Iterable[str]) -> list[int]:
        """Indices of the blocks to skip: none if a parameter is also used outside of blocks."""
        holders = [self._holders.get(name) for name in parameters]
        if not holders or not all(holders):
            return []
        starts = [self._began.get(index, -1) for found in holders for index in found or ()]
        start = min(starts)
        return [
            index
            for index, end in self._ended.items()
            if end < start and self._calls[index] == 1 and index in self._outputs
        ]

    def depths(self) -> list[list[str]]:
        """Parameters, each in one block, before which half and most of the recorded blocks ran."""
        single = {found[0]: name for name, found in self._holders.items() if len(found) == 1}
        order = sorted((i for i in self._began if i in single), key=lambda i: self._began[i])
        return (
            [[single[order[at]]] for at in dict.fromkeys((len(order) // 2, len(order) - 1))]
            if order
            else []
        )

    def forget(self) -> None:
        """Let go of the outputs."""
        self._outputs.clear()

    def _recorder(self, index: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                self._began.setdefault(index, self._clock())
                self._calls[index] += 1
                output = forward(*args, **kwargs)
                self._ended[index] = self._clock()
                self._outputs[index] = _copied(output)
                return output

            return run

        return wrap

    def _clock(self) -> int:
        return 1 + max([*self._began.values(), *self._ended.values()], default=-1)

    def _player(self, index: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
            # a copy: the code between two blocks may add to it in place
            return lambda *args, **kwargs: _copied(self._outputs[index])

        return wrap

    @contextmanager
    def _forwards(
        self, wrappers: Mapping[int, Callable[[Callable[..., Any]], Callable[..., Any]]]
    ) -> Iterator[None]:
        """Replace `forward` of some blocks for a block of code."""
        with ExitStack() as stack:
            for index, wrap in wrappers.items():
                module = self._modules[index]
                before = vars(module).get("forward", _ABSENT)
                stack.callback(_restore, module, before)
                vars(module)["forward"] = wrap(module.forward)
            yield


def _restore(module: nn.Module, before: Any) -> None:
    if before is _ABSENT:
        vars(module).pop("forward", None)
    else:
        vars(module)["forward"] = before


def _blocks(module: nn.Module, wanted: frozenset[int]) -> list[nn.Module]:
    """Children of the outermost module lists that hold a wanted parameter, in order, each once."""
    found: dict[int, nn.Module] = {}
    waiting = [module]
    while waiting:
        current = waiting.pop()
        if isinstance(current, nn.ModuleList):
            for child in current:
                if any(id(p) in wanted for p in child.parameters()):
                    found.setdefault(id(child), child)  # in the order of the model
        else:
            waiting += reversed(list(current.children()))
    return list(found.values())


def _held(block: nn.Module, wanted: Mapping[int, str]) -> Iterator[str]:
    for parameter in block.parameters():
        name = wanted.get(id(parameter))
        if name is not None:
            yield name


def _copied(value: Any) -> Any:
    """A copy of a block's output: tensors in tuples, lists and dicts; anything else as it is."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(_copied(item) for item in value)
    if type(value) is list:
        return [_copied(item) for item in value]
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return value
