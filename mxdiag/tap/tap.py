"""A tap on a model: sees, and can replace, every product of an activation with a parameter.

For the length of a `with` block the model's parameters belong to a class that reports each use
(`tap_tensor`). A call that multiplies one of them by an activation (`products`) reaches the
observer at once, as X on the way forward and as the gradient of Y on the way back; nothing is
kept for it beyond what autograd keeps anyway.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxdiag.errors import ModelError
from mxdiag.tap.experts import eager_experts
from mxdiag.tap.layouts import (
    Equation,
    ProductLayout,
    Segment,
    UnsupportedProductError,
    WeightView,
    product_dtype,
    segments_of,
    weight_views,
)
from mxdiag.tap.observers import Observer, Product, Substitute
from mxdiag.tap.offload import tapped_while_loaded
from mxdiag.tap.parameters import parameter_names
from mxdiag.tap.products import Call, attention_without_dispatch, call_of
from mxdiag.tap.substitution import SubstitutedProduct, Work
from mxdiag.tap.tensor import Tag, TapParameter, attach, carry_tag, name_of, tag_of, tagged


class Tap(AbstractContextManager[Any]):
    """Report every product of an activation with a parameter of `model` while the block runs.

    Parameters
    ----------
    model
        Any torch module. It is left as found, also after an exception.
    observer
        Receives X and G of every product.
    substitute
        Replaces operands, if given.
    gradients
        "model": what requires grad is the caller's affair. "activations": no parameter does while
        the tap lasts, and every product still has its gradient, the lowest ones included; nothing
        is spent on weight gradients.
    experts
        "eager": mixtures of experts run expert by expert; "as_is": as the model is set up.

    Attributes
    ----------
    calls, gradients
        How often each matrix was multiplied, and how often a gradient came back.
    uses
        Parameter -> names of the torch calls, other than products, that used it, counted.
    unsupported
        Parameter -> why a product of it could not be taken apart.
    untapped
        Parameter -> why it cannot be tapped at all.

    Raises
    ------
    ModelError
        On entering, if the model is tapped already or its experts cannot be switched.
    """

    def __init__(
        self,
        model: nn.Module,
        observer: Observer | None = None,
        *,
        substitute: Substitute | None = None,
        gradients: str = "model",
        experts: str = "eager",
    ) -> None:
        self.model = model
        self.observer = observer or Observer()
        self.substitute = substitute
        self.active = False
        self.calls: Counter[WeightView] = Counter()
        self.gradients: Counter[WeightView] = Counter()
        self.uses: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.unsupported: dict[str, str] = {}
        self.untapped: dict[str, str] = {}
        self._start_gradients = gradients == "activations"
        self._eager = experts == "eager"
        self._anchor = torch.zeros((), requires_grad=True)
        self._attention = attention_without_dispatch()
        self._layouts: dict[tuple[Any, ...], tuple[ProductLayout, list[WeightView]]] = {}
        self._views: dict[WeightView, WeightView] = {}
        self._whole: dict[str, WeightView] = {}
        self._whole_layout = ProductLayout.of(Equation("ti", "oi", "to"))
        self._stack = ExitStack()

    def __enter__(self) -> Tap:
        """Tap the model."""
        with ExitStack() as stack:
            if self._eager:
                stack.enter_context(eager_experts(self.model))
            if self._start_gradients:
                stack.enter_context(activation_gradients(self.model))
            if "torch._dynamo" in sys.modules:  # compiled code would not dispatch
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            tapped: list[tuple[nn.Parameter, type]] = []
            stack.callback(self._untap, tapped)
            later = stack.enter_context(tapped_while_loaded(self.model, self._tap, self._untap))
            for name, parameter in parameter_names(self.model).items():
                if name not in later:
                    self._tap(name, parameter, tapped)
            self.active = True
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Leave the model as it was found."""
        self.active = False
        self._stack.close()

    def _tap(
        self, name: str, parameter: nn.Parameter, tapped: list[tuple[nn.Parameter, type]]
    ) -> None:
        if parameter.dim() < 2:
            return
        if isinstance(parameter, TapParameter):
            raise ModelError(
                "the model is already tapped", where=name, advice="Use one tap at a time"
            )
        reason = cannot_tap(parameter)
        if reason is not None:
            self.untapped[name] = reason
            return
        shape = tuple(parameter.shape)
        meta = torch.empty(shape, device="meta")
        tapped.append((parameter, type(parameter)))
        parameter.__class__ = TapParameter
        parameter.__dict__["_mxdiag_tag"] = Tag(self, name, meta, shape, whole=len(shape) == 2)

    @staticmethod
    def _untap(tapped: list[tuple[nn.Parameter, type]]) -> None:
        for parameter, original in tapped:
            parameter.__class__ = original
            parameter.__dict__.pop("_mxdiag_tag", None)

    # ---- what tagged tensors report ------------------------------------------------------------

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a torch function on a tagged tensor, and report it if it is a product."""
        if func is F.multi_head_attention_forward:
            return self._attention(*args, **kwargs)
        in_backward = torch._C._current_graph_task_id() != -1
        with torch._C.DisableTorchFunctionSubclass():
            if in_backward and not torch.is_grad_enabled():  # a custom Function's own backward
                return func(*args, **kwargs)
            try:
                if func is F.linear and self.substitute is None:
                    tag = tag_of(args[1]) if len(args) > 1 else None
                    if tag is not None and tag.whole:
                        return self._whole_linear(args, kwargs, tag, in_backward)
                call = call_of(func, args, kwargs)
                if call is not None:
                    return self._product(call, in_backward)
            except UnsupportedProductError as error:
                for _, tag in tagged((args, tuple(kwargs.values()))):
                    self.unsupported.setdefault(tag.parameter, str(error))
            out = func(*args, **kwargs)
            if not carry_tag(func, args, kwargs, out):
                out = self._other_use(func, args, kwargs, out)
            return out

    def _other_use(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], out: Any
    ) -> Any:
        """Record a use that is no product; start gradients behind it; follow effective weights."""
        tags = [tag for _, tag in tagged((args, tuple(kwargs.values())))]
        for tag in tags:
            self.uses[tag.parameter][name_of(func)] += 1
        if not isinstance(out, Tensor) or not out.is_floating_point():
            return out
        if self._starts_here(out):
            out = _Start.apply(out, self._anchor, None)
        first = tags[0]
        others = [a for a in args if isinstance(a, Tensor) and not isinstance(a, nn.Parameter)]
        if all(tag_of(a) for a in others) and out.shape == first.meta.shape and first.index is None:
            attach(out, Tag(self, first.parameter, first.meta, first.root, None, derived=True))
        return out

    def _starts_here(self, out: Tensor) -> bool:
        return self._start_gradients and torch.is_grad_enabled() and not out.requires_grad

    # ---- products ------------------------------------------------------------------------------

    def _product(self, call: Call, again: bool) -> Tensor:
        x, w, bias = call.arguments[call.x_at], call.arguments[call.w_at], call.bias
        tag = tag_of(w)
        assert tag is not None, "call_of returns products of tagged weights"
        layout, views = self._layout(call, tag)
        segments = segments_of(tag, layout, x, views, call.offsets)
        pairs = [(segment, self._count(segment.view, again)) for segment in segments]
        dtype = product_dtype(x)
        if not again:  # a checkpointed forward, run again, was seen before
            seen = x.detach() if dtype is None else x.detach().to(dtype)
            x3 = layout.x3(seen)
            for segment, product in pairs:
                self.observer.forward(product, segment.x_of(x3))
        if self.substitute is None:
            return self._watch(call.run(x, w, bias), layout, pairs)
        if dtype is not None:
            x, w = x.to(dtype), w.to(dtype)
            bias = bias.to(dtype) if isinstance(bias, Tensor) else bias
        work = Work(call, layout, pairs, self.substitute, self._reporter(layout, pairs, None))
        anchor = self._anchor if self._start_gradients else None
        return SubstitutedProduct.apply(x, w, bias, anchor, work)

    def _whole_linear(
        self, args: Sequence[Any], kwargs: dict[str, Any], tag: Tag, again: bool
    ) -> Tensor:
        """Do what `_product` does for the commonest product: an `nn.Linear`, with less ado."""
        x = args[0]
        view = self._whole.get(tag.parameter)
        if view is None:
            rows, columns = tag.meta.shape
            view = WeightView(tag.parameter, 0, (rows, columns), (columns, 1))
            self._whole[tag.parameter] = view = self._views.setdefault(view, view)
        product = self._count(view, again)
        if not again:
            dtype = product_dtype(x)
            seen = x.detach() if dtype is None else x.detach().to(dtype)
            self.observer.forward(product, seen.reshape(-1, view.size[1]))
        out = F.linear(*args, **kwargs)
        return self._watch(out, self._whole_layout, [(Segment(view), product)])

    def _layout(self, call: Call, tag: Tag) -> tuple[ProductLayout, list[WeightView]]:
        meta = tag.meta
        key = (
            tag.parameter,
            call.equation,
            meta.storage_offset(),
            meta.shape,
            meta.stride(),
            tag.derived,
        )
        known = self._layouts.get(key)
        if known is None:
            layout, views = weight_views(tag, ProductLayout.of(call.equation))
            known = layout, [self._views.setdefault(view, view) for view in views]
            self._layouts[key] = known
        return known

    def _count(self, view: WeightView, again: bool) -> Product:
        if again:
            return Product(view, -1)
        calls = self.calls[view]
        self.calls[view] = calls + 1
        return Product(view, calls)

    def _watch(
        self, out: Tensor, layout: ProductLayout, pairs: list[tuple[Segment, Product]]
    ) -> Tensor:
        """Have the gradient of a product's output reported.

        A hook on the node that computed it, not on the tensor: a tensor that is a view loses its
        hook when it is modified in place, and the node keeps nothing alive.
        """
        if not out.requires_grad:
            if self._starts_here(out):
                return _Start.apply(out, self._anchor, self._reporter(layout, pairs, None))
            return out
        node, shape, base = out.grad_fn, out.shape, out._base
        if base is not None:
            whole = base.numel() == out.numel() and base.is_contiguous() and out.is_contiguous()
            node = base.grad_fn if whole else None
        if node is None:
            return _Watch.apply(out, self._reporter(layout, pairs, None))
        report = self._reporter(layout, pairs, shape)
        node.register_prehook(lambda grads: report(grads[0]))
        return out

    def _reporter(
        self, layout: ProductLayout, pairs: list[tuple[Segment, Product]], shape: torch.Size | None
    ) -> Callable[[Tensor | None], None]:
        def report(g: Tensor | None) -> None:
            if g is None or not self.active:
                return
            g = g.detach()
            if layout.plain:
                product = pairs[0][1]
                self.gradients[product.view] += 1
                self.observer.backward(product, g.reshape(-1, product.view.size[0]))
                return
            g3 = layout.y3(g if shape is None else g.reshape(shape))
            for segment, product in pairs:
                self.gradients[product.view] += 1
                self.observer.backward(product, segment.y_of(g3))

        return report


class _Start(torch.autograd.Function):
    """Makes a result require grad, so that gradients reach the products behind it."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, anchor: Tensor, report: Callable[..., Any] | None) -> Tensor:
        ctx.report = report
        return out.data

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        if ctx.report is not None:
            ctx.report(g)
        return None, None, None


class _Watch(torch.autograd.Function):
    """Reports the gradient of a view of some larger result."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, report: Callable[..., Any]) -> Tensor:
        ctx.report = report
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        ctx.report(g)
        return g, None


def cannot_tap(parameter: nn.Parameter) -> str | None:
    """Why a parameter's products cannot be seen, None if they can."""
    if isinstance(parameter, TapParameter):
        return None
    if parameter.device.type == "meta":
        return "not loaded: offloaded, or never materialized"
    if type(parameter) is not nn.Parameter:
        return f"a {type(parameter).__name__}, which handles torch functions itself"
    if not parameter.is_floating_point() or parameter.itemsize < 2:
        return f"{str(parameter.dtype).removeprefix('torch.')} codes, not values"
    return None


@contextmanager
def activation_gradients(model: nn.Module) -> Iterator[None]:
    """Let no parameter require grad, so that no weight gradient is computed; restores each flag.

    By itself this leaves a model without gradients: `Tap(gradients="activations")` uses it, and
    starts gradients behind the embeddings and at every product whose input has none.
    """
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    try:
        for parameter in trained.values():
            parameter.requires_grad_(False)
        yield
    finally:
        now = dict(model.named_parameters())  # offloaded ones are new objects after each call
        for name, parameter in trained.items():
            parameter.requires_grad_(True)
            now.get(name, parameter).requires_grad_(True)
