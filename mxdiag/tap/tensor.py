"""Parameters that tell a tap what happens to them.

A tapped parameter keeps its identity and its name; only its class changes, to one whose
`__torch_function__` sees every use. Views, casts and selections of it carry a `Tag`: a meta tensor
on which every view operation is replayed, so that a slice, a transpose or a chunk still says which
elements of the parameter it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

#: Results that hold the same elements in the same logical order: the tag goes with them.
_COPIES = frozenset(
    {
        *("to", "type", "type_as", "float", "half", "bfloat16", "double", "_to_copy"),
        *("cpu", "cuda", "xpu", "contiguous", "clone"),
    }
)
#: Results that leave the tap on purpose: state dicts and copies must hold plain tensors.
_UNTAGGED = frozenset({"detach", "detach_", "data", "grad", "__deepcopy__", "numpy", "__dlpack__"})
_SELECT_BY_INDEX = frozenset({"__getitem__", "index_select"})


class TapCore(Protocol):
    """What a tagged tensor needs of the tap that tagged it."""

    active: bool

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run `func`, whose arguments hold at least one tagged tensor."""


@dataclass(slots=True)
class Tag:
    """Which elements of which parameter a tensor holds.

    `meta` has the tensor's logical shape and the offset and strides of those elements in the
    parameter, seen as a contiguous array. With `index`, a vector of n integers, the tensor's first
    dimension is n rows selected by it from the first dimension of `meta`.
    """

    tap: TapCore
    parameter: str
    meta: Tensor
    root: tuple[int, ...]  # the parameter's shape
    index: Tensor | None = None
    derived: bool = False  # computed from the parameter: an effective weight
    whole: bool = False  # the parameter itself, and a matrix


class TapTensor(Tensor):
    """A view, cast or selection of a tapped parameter."""

    _mxdiag_tag: Tag

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return dispatch(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().__deepcopy__(memo)

    def __reduce_ex__(self, proto: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().__reduce_ex__(proto)


class TapParameter(nn.Parameter):
    """A parameter for the length of a tap."""

    _mxdiag_tag: Tag

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return dispatch(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            data = self.detach().clone(memory_format=torch.preserve_format)
            return nn.Parameter(data, self.requires_grad)

    def __reduce_ex__(self, proto: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(proto)


def tag_of(value: object) -> Tag | None:
    """Return the tag of a tapped parameter or of something made from one, else None."""
    if isinstance(value, (TapParameter, TapTensor)):
        return value.__dict__.get("_mxdiag_tag")
    return None


def tagged(values: Sequence[Any]) -> Iterator[tuple[Tensor, Tag]]:
    """Yield every tagged tensor among arguments, lists of tensors included."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from tagged(value)
        else:
            tag = tag_of(value)
            if tag is not None:
                yield value, tag


def dispatch(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Pass a call on a tagged tensor to its tap; once that has ended, just run it."""
    tag = next((tag for value in args if (tag := tag_of(value)) is not None), None)
    if tag is None:
        tag = next((tag for _, tag in tagged((args, tuple(kwargs.values())))), None)
    if tag is not None and tag.tap.active:
        return tag.tap.call(func, args, kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def name_of(func: Callable[..., Any]) -> str:
    """Name a torch function: `linear`, `__getitem__`; a property by its own name."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", name)
    return name or str(func)


def attach(tensor: Tensor, tag: Tag) -> Tensor:
    """Make a plain tensor a tagged one, in place."""
    if type(tensor) is Tensor:
        tensor.__class__ = TapTensor
        tensor.__dict__["_mxdiag_tag"] = tag
    return tensor


def carry_tag(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], out: Any
) -> bool:
    """Tag the results of a call that views, casts or selects a tagged tensor.

    Returns
    -------
    bool
        Whether `out` is such a result (or no tensor at all): otherwise the call used the values.
    """
    results = out if isinstance(out, (list, tuple)) else (out,)
    if not any(isinstance(result, Tensor) for result in results):
        return True
    name = name_of(func)
    source = tag_of(args[0]) if args else None
    if name in _UNTAGGED or any(result is args[0] for result in results if args):
        return True
    if source is None:
        return False
    if name in _COPIES:
        if results[0].is_floating_point() and results[0].shape[1:] == source.meta.shape[1:]:
            attach(results[0], source)
        return True
    if _storage(results[0]) == _storage(args[0]):
        return _replay(func, args, kwargs, results, source)
    if name in _SELECT_BY_INDEX and source.index is None:
        return _select(name, args, kwargs, results[0], source)
    return False


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _replay(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    results: Sequence[Any],
    source: Tag,
) -> bool:
    """Repeat a view operation on the meta tensor."""
    try:
        metas = func(source.meta, *(_plain_index(a) for a in args[1:]), **kwargs)
    except (RuntimeError, IndexError, TypeError):  # the cast made it contiguous, the meta is not
        return False
    metas = metas if isinstance(metas, (list, tuple)) else (metas,)
    for result, meta in zip(results, metas, strict=True):
        if _storage(meta) != _storage(source.meta):  # a copy: its order is not known
            return False
        index = source.index
        if index is not None and meta.shape[:1] != source.meta.shape[:1]:
            return False
        attach(result, Tag(source.tap, source.parameter, meta, source.root, index, source.derived))
    return True


def _plain_index(value: Any) -> Any:
    """A zero-dimensional index as an int, so that it selects a view on the meta device too."""
    if isinstance(value, tuple):
        return tuple(_plain_index(v) for v in value)
    if isinstance(value, Tensor) and value.dim() == 0 and not value.is_floating_point():
        return bool(value) if value.dtype is torch.bool else int(value)
    return value


def _select(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Tensor, source: Tag
) -> bool:
    """Note which rows of the first dimension an index vector selects: the experts' choice."""
    if name == "__getitem__":
        index = args[1][0] if isinstance(args[1], tuple) and len(args[1]) == 1 else args[1]
    else:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        index = kwargs.get("index", args[2] if len(args) > 2 else None) if dim == 0 else None
    if not isinstance(index, Tensor) or index.dtype in (torch.bool, torch.uint8):
        return False
    if index.dim() != 1:
        return False
    attach(result, replace(source, index=index.detach(), whole=False))
    return True
