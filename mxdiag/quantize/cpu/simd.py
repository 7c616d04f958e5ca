"""Sixteen-lane vector expressions for numba: Python operators that emit LLVM vector instructions.

numba compiles scalar loops and leaves vectorising them to LLVM, which small obstacles prevent
without a word. Here the vectors are explicit: a `Lanes` holds sixteen values, one per MX block, and
its operators emit one vector instruction each inside an `@intrinsic`. LLVM lowers them to whatever
the host has: one AVX-512 register, two AVX2, four SSE or NEON registers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba.extending
from llvmlite import ir
from numba.core import cgutils

LANES = 16
CACHE_LINE = 64

#: numba's decorator; its annotations do not know that calls leave out the typing context.
intrinsic: Any = numba.extending.intrinsic

F32, F64 = ir.FloatType(), ir.DoubleType()
BIT, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))

Number = int | float


@dataclass(frozen=True, slots=True)
class Lanes:
    """A vector value and the builder that extends its program.

    Operators act lane by lane; a Python number stands for itself in every lane. Comparisons give
    bit lanes, which `&`, `|`, `~` combine and `select` consumes. Integers compare as unsigned.
    """

    builder: ir.IRBuilder
    value: ir.Value

    @property
    def element(self) -> ir.Type:
        """LLVM type of one lane."""
        return self.value.type.element

    @property
    def is_float(self) -> bool:
        """Whether the lanes are floating-point."""
        return isinstance(self.element, (ir.FloatType, ir.DoubleType))

    def _new(self, value: ir.Value) -> Lanes:
        return Lanes(self.builder, value)

    def _operand(self, other: Lanes | Number) -> ir.Value:
        if isinstance(other, Lanes):
            return other.value
        return ir.Constant(self.value.type, [other] * self.value.type.count)

    def _emit(self, float_op: str, int_op: str, other: Lanes | Number) -> Lanes:
        emit = getattr(self.builder, float_op if self.is_float else int_op)
        return self._new(emit(self.value, self._operand(other)))

    def __add__(self, other: Lanes | Number) -> Lanes:
        return self._emit("fadd", "add", other)

    def __sub__(self, other: Lanes | Number) -> Lanes:
        return self._emit("fsub", "sub", other)

    def __mul__(self, other: Lanes | Number) -> Lanes:
        return self._emit("fmul", "mul", other)

    def __truediv__(self, other: Lanes) -> Lanes:
        return self._new(self.builder.fdiv(self.value, other.value))

    def __and__(self, other: Lanes | Number) -> Lanes:
        return self._new(self.builder.and_(self.value, self._operand(other)))

    def __or__(self, other: Lanes | Number) -> Lanes:
        return self._new(self.builder.or_(self.value, self._operand(other)))

    def __lshift__(self, bits: int) -> Lanes:
        return self._new(self.builder.shl(self.value, self._operand(bits)))

    def __rshift__(self, bits: int) -> Lanes:
        return self._new(self.builder.lshr(self.value, self._operand(bits)))

    def __invert__(self) -> Lanes:
        return self._new(self.builder.not_(self.value))

    def _compare(self, relation: str, other: Lanes | Number) -> Lanes:
        if self.is_float:
            emit = self.builder.fcmp_unordered if relation == "!=" else self.builder.fcmp_ordered
        else:
            emit = self.builder.icmp_unsigned
        return self._new(emit(relation, self.value, self._operand(other)))

    def equals(self, other: Lanes | Number) -> Lanes:
        """Bit lanes: self == other."""
        return self._compare("==", other)

    def differs(self, other: Lanes | Number) -> Lanes:
        """Bit lanes: self != other."""
        return self._compare("!=", other)

    def __gt__(self, other: Lanes | Number) -> Lanes:
        return self._compare(">", other)

    def __ge__(self, other: Lanes | Number) -> Lanes:
        return self._compare(">=", other)

    def __le__(self, other: Lanes | Number) -> Lanes:
        return self._compare("<=", other)

    def __lt__(self, other: Lanes | Number) -> Lanes:
        return self._compare("<", other)

    def select(self, yes: Lanes | Number, no: Lanes | Number) -> Lanes:
        """`yes` where this bit lane is set, else `no`; one of the two must be lanes."""
        model = yes if isinstance(yes, Lanes) else no
        assert isinstance(model, Lanes)
        return self._new(self.builder.select(self.value, model._operand(yes), model._operand(no)))

    def maximum(self, other: Lanes | Number) -> Lanes:
        """The larger lane."""
        return (self > other).select(self, other)

    def minimum(self, other: Lanes | Number) -> Lanes:
        """The smaller lane."""
        return (self < other).select(self, other)

    def times_plus(self, factor: Lanes | Number, addend: Lanes | Number) -> Lanes:
        """Self * factor + addend, with one rounding where the host has fused multiply-add."""
        vector = self.value.type
        name = f"llvm.fmuladd.v{vector.count}{'f32' if self.element == F32 else 'f64'}"
        function_type = ir.FunctionType(vector, [vector] * 3)
        function = cgutils.get_or_insert_function(self.builder.module, function_type, name)
        operands = (self.value, self._operand(factor), self._operand(addend))
        return self._new(self.builder.call(function, operands))

    def negated(self) -> Lanes:
        """-self (floating-point)."""
        return self._new(self.builder.fneg(self.value))

    def bits(self) -> Lanes:
        """The same bits as integers."""
        return self.reinterpret(I32 if self.element == F32 else I64)

    def reinterpret(self, element: ir.Type) -> Lanes:
        """The same bits as lanes of `element`, of the same or another width."""
        width = {F32: 32, F64: 64}
        size = [width.get(kind) or kind.width for kind in (self.element, element)]
        count = self.value.type.count * size[0] // size[1]
        return self._new(self.builder.bitcast(self.value, ir.VectorType(element, count)))

    def to(self, element: ir.Type) -> Lanes:
        """Values converted to lanes of `element`; integers are taken as unsigned when widened."""
        source, target = self.element, ir.VectorType(element, self.value.type.count)
        to_float = isinstance(element, (ir.FloatType, ir.DoubleType))
        if self.is_float and to_float:
            name = "fpext" if element == F64 else "fptrunc"
        elif self.is_float:
            name = "fptosi"
        elif to_float:
            name = "sitofp"
        else:
            name = "zext" if element.width > source.width else "trunc"
        return self._new(getattr(self.builder, name)(self.value, target))

    def shuffle(self, other: Lanes, order: list[int]) -> Lanes:
        """Lanes picked from the concatenation of self and other."""
        mask = ir.Constant(ir.VectorType(I32, len(order)), order)
        return self._new(self.builder.shuffle_vector(self.value, other.value, mask))

    def count(self) -> ir.Value:
        """How many of these bit lanes are set, as an int64."""
        as_integer = self.builder.bitcast(self.value, ir.IntType(self.value.type.count))
        function_type = ir.FunctionType(I64, [I64])
        ctpop = cgutils.get_or_insert_function(self.builder.module, function_type, "llvm.ctpop.i64")
        return self.builder.call(ctpop, [self.builder.zext(as_integer, I64)])

    def any(self) -> ir.Value:
        """One bit: whether any of these bit lanes is set."""
        count = self.value.type.count
        as_integer = self.builder.bitcast(self.value, ir.IntType(count))
        return self.builder.icmp_unsigned("!=", as_integer, ir.Constant(as_integer.type, 0))

    def store_in(self, slot: ir.Value) -> None:
        """Write the lanes to a local variable made by `cgutils.alloca_once`."""
        self.builder.store(self.value, slot)

    def store(self, address: ir.Value, offset: int = 0) -> None:
        """Write the lanes at byte `address` + `offset`; no alignment is assumed."""
        pointer = _pointer(self.builder, address, offset, self.value.type)
        self.builder.store(self.value, pointer, align=1)


def _pointer(builder: ir.IRBuilder, address: ir.Value, offset: int, kind: ir.Type) -> ir.Value:
    if offset:
        address = builder.add(address, ir.Constant(address.type, offset))
    return builder.inttoptr(address, kind.as_pointer())


def load(
    builder: ir.IRBuilder, address: ir.Value, element: ir.Type, offset: int = 0, count: int = LANES
) -> Lanes:
    """`count` consecutive elements from byte `address` + `offset`; no alignment is assumed."""
    kind = ir.VectorType(element, count)
    return Lanes(builder, builder.load(_pointer(builder, address, offset, kind), align=1))


def constant(builder: ir.IRBuilder, element: ir.Type, value: Number) -> Lanes:
    """The same number in every lane."""
    return Lanes(builder, ir.Constant(ir.VectorType(element, LANES), [value] * LANES))


def scalar(builder: ir.IRBuilder, address: ir.Value, element: ir.Type, index: int) -> ir.Value:
    """One value of an array at a byte address."""
    width = {F32: 4, F64: 8}.get(element) or element.width // 8
    return builder.load(_pointer(builder, address, index * width, element))


def splat(builder: ir.IRBuilder, value: ir.Value, element: ir.IntType) -> Lanes:
    """A run-time integer, cut to `element`, in every lane."""
    vector = ir.VectorType(element, LANES)
    cut = builder.trunc(value, element)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), cut, ir.Constant(I32, 0))
    zeros = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    return Lanes(builder, builder.shuffle_vector(first, first, zeros))


def prefetch(builder: ir.IRBuilder, address: ir.Value, offset: int = 0) -> None:
    """Ask for the cache line at byte `address` + `offset`; never faults."""
    pointer_type = I8.as_pointer()
    function_type = ir.FunctionType(ir.VoidType(), [pointer_type, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    pointer = _pointer(builder, address, offset, I8)
    read, keep, data = (ir.Constant(I32, number) for number in (0, 3, 1))
    builder.call(function, [pointer, read, keep, data])


def align_stack(builder: ir.IRBuilder) -> None:
    """Align the stack of the function being built to cache lines, so that no spilled vector
    straddles two.
    """
    attributes = builder.function.attributes
    attributes.alignstack = CACHE_LINE
    attributes.add(
        "nounwind"
    )  # llvmlite writes no attributes of a function that has only the other


def transpose(rows: list[Lanes]) -> list[Lanes]:
    """A 16 x 16 matrix of 32-bit lanes, transposed by 64 two-source shuffles.

    Stages: interleave neighbouring rows' elements, then their pairs (4 x 4 blocks are transposed
    now, each in its own 128-bit group), then exchange the groups between rows four and eight apart.
    """

    def stage(rows: list[Lanes], distance: int, pick: Callable[[int], list[int]]) -> list[Lanes]:
        result = list(rows)
        for i in range(LANES):
            if not i & distance:
                low, high = rows[i], rows[i + distance]
                result[i] = low.shuffle(high, pick(0))
                result[i + distance] = low.shuffle(high, pick(1))
        return result

    def elements(half: int) -> list[int]:
        return [4 * g + 2 * half + i + LANES * s for g in range(4) for i in (0, 1) for s in (0, 1)]

    def pairs(half: int) -> list[int]:
        return [4 * g + 2 * half + i + LANES * s for g in range(4) for s in (0, 1) for i in (0, 1)]

    def groups(half: int) -> list[int]:
        return [4 * g + i + LANES * s for s in (0, 1) for g in (half, half + 2) for i in range(4)]

    rows = stage(rows, 1, elements)
    rows = stage(rows, 2, pairs)
    rows = stage(rows, 4, groups)
    rows = stage(rows, 8, groups)
    # The first two stages leave the columns of each group of four in the order 0, 2, 1, 3.
    return [rows[column - column % 4 + (0, 2, 1, 3)[column % 4]] for column in range(LANES)]
