"""Explicit vectors for Numba kernels: `LANES` numbers in registers, with the few operations the kernels need.

What LLVM makes of a scalar loop depends on trip counts it does not know; these become the instructions meant, at every
shape, and compile faster than a search for them. There are no fast-math flags: -inf marks a masked node and survives.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import math
import operator
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, njit, types
from numba.extending import lower_builtin, models, register_model, type_callable

LANES = 16
INDEX = np.int64(0)
ROOM = 64
_INT32 = ir.IntType(32)
intrinsic: Any = extending.intrinsic  # its type describes the typing function, not the call in a kernel

# Division by zero follows IEEE: the checks Python asks for would break up every loop.
_jit: Callable[..., Any] = partial(njit, error_model="numpy")
# A function kernels are made of.
part: Callable[..., Any] = partial(_jit, no_cpython_wrapper=True, no_cfunc_wrapper=True)
# One that is put into its callers: calls lose what is in registers.
step: Callable[..., Any] = partial(part, inline="always")


def kernel(function: Callable[..., None]) -> Any:
    """An entry point: compiled when first used and kept on disk, or in memory alone where no folder can be written.

    Numba renews what lies on disk when the file of `function` changes, not when what it calls does; so the name it is
    kept under tells the state of all kernel sources.
    """
    folders = Path(__file__).parents[1]
    sources = sorted({*folders.glob("*/*kernel*.py"), *folders.glob("*/numba_*.py")})
    function.__qualname__ += f"_{zlib.crc32(b''.join(source.read_bytes() for source in sources)):08x}"
    try:
        return _jit(function, nogil=True, cache=True)
    except RuntimeError:
        return _jit(function, nogil=True)


class Lanes(types.Type):
    """A vector of `LANES` numbers."""

    def __init__(self, dtype: types.Float) -> None:
        self.dtype = dtype
        super().__init__(name=f"Lanes({dtype})")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Lanes) -> None:
        super().__init__(manager, kind, ir.VectorType(manager.lookup(kind.dtype).get_value_type(), LANES))


def _operator(symbol: Callable[..., Any], emit: Callable[..., Any]) -> None:
    """Let `symbol` work lane by lane."""

    @type_callable(symbol)
    def typed(_context: Any) -> Any:
        return lambda a, b: a if isinstance(a, Lanes) and a == b else None

    lower_builtin(symbol, Lanes, Lanes)(lambda _context, builder, _signature, values: emit(builder, *values))


_operator(operator.add, ir.IRBuilder.fadd)
_operator(operator.sub, ir.IRBuilder.fsub)
_operator(operator.mul, ir.IRBuilder.fmul)
_operator(operator.truediv, ir.IRBuilder.fdiv)


def _constant(kind: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * LANES)


def _spread(builder: ir.IRBuilder, value: Any) -> Any:
    """The scalar `value` in every lane."""
    undefined = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(_INT32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_INT32, LANES), [0] * LANES))


def _places() -> ir.Constant:
    """The number of every lane."""
    return ir.Constant(ir.VectorType(_INT32, LANES), list(range(LANES)))


def _call(builder: ir.IRBuilder, name: str, result: ir.Type, args: list[Any], suffix: str, **flags: Any) -> Any:
    """Call an LLVM intrinsic by its full name."""
    name = f"{name}.{suffix}"
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(result, [arg.type for arg in args]), name)
    return builder.call(function, args, **flags)


def _suffix(kind: ir.VectorType) -> str:
    return f"v{LANES}f{32 if kind.element == ir.FloatType() else 64}"


def _fma(builder: ir.IRBuilder, a: Any, b: Any, c: Any) -> Any:
    return _call(builder, "llvm.fmuladd", a.type, [a, b, c], _suffix(a.type))


@intrinsic
def fma(_typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once where the machine can."""
    return a(a, b, c), lambda _context, builder, _signature, values: _fma(builder, *values)


@intrinsic
def larger(_typing: Any, a: Any, b: Any) -> Any:
    """The maximum, lane by lane."""
    return a(a, b), lambda _context, builder, _signature, v: builder.select(builder.fcmp_ordered(">", *v), *v)


@intrinsic
def where_less(_typing: Any, a: Any, b: Any, yes: Any, no: Any) -> Any:
    """`yes` in the lanes where a < b, `no` in the others."""
    return a(a, b, yes, no), lambda _context, builder, _signature, v: builder.select(
        builder.fcmp_ordered("<", v[0], v[1]), v[2], v[3]
    )


@intrinsic
def where_equal(_typing: Any, a: Any, b: Any, yes: Any, no: Any) -> Any:
    """`yes` in the lanes where a == b, `no` in the others."""
    return a(a, b, yes, no), lambda _context, builder, _signature, v: builder.select(
        builder.fcmp_ordered("==", v[0], v[1]), v[2], v[3]
    )


@intrinsic
def total(_typing: Any, a: Any) -> Any:
    """The sum over the lanes."""

    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, values: Any) -> Any:
        kind = values[0].type
        args = [ir.Constant(kind.element, -0.0), values[0]]
        # Without `reassoc` the lanes would be added one after the other.
        return _call(builder, "llvm.vector.reduce.fadd", kind.element, args, _suffix(kind), fastmath=("reassoc",))

    return a.dtype(a), codegen


@intrinsic
def splat(_typing: Any, x: Any, like: Any) -> Any:
    """The number `x` in every lane, as numbers of the type of `like`."""
    return Lanes(like)(like, like), lambda _context, builder, _signature, values: _spread(builder, values[0])


@intrinsic
def put(_typing: Any, vector: Any, place: Any, x: Any) -> Any:
    """`vector` with the number `x` in lane `place`."""

    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, values: Any) -> Any:
        # Inserting at a place known only at run time would go through memory.
        here = builder.icmp_signed("==", _places(), _spread(builder, builder.trunc(values[1], _INT32)))
        return builder.select(here, _spread(builder, values[2]), values[0])

    return vector(vector, types.intp, vector.dtype), codegen


@intrinsic
def keep_first(_typing: Any, vector: Any, count: Any) -> Any:
    """The first `count` lanes; 0 in the others."""
    return vector(vector, types.intp), lambda _context, builder, _signature, v: builder.select(
        _first(builder, v[1]), v[0], _constant(v[0].type, 0.0)
    )


# ---------------------------------------------------------------- memory


@intrinsic
def pointer(_typing: Any, address: Any, like: Any) -> Any:
    """An address as a pointer to numbers of the type of `like`."""
    kind = types.CPointer(like)
    return kind(address, like), lambda context, builder, _s, v: builder.inttoptr(v[0], context.get_value_type(kind))


def _at(builder: ir.IRBuilder, base: Any, index: Any, kind: ir.VectorType) -> Any:
    return builder.bitcast(builder.gep(base, [index]), kind.as_pointer())


@intrinsic
def load(_typing: Any, base: Any, index: Any) -> Any:
    """The numbers base[index] ... base[index + LANES - 1]."""
    kind = Lanes(base.dtype)

    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, values: Any) -> Any:
        return builder.load(
            _at(builder, values[0], values[1], context.get_value_type(kind)), align=base.dtype.bitwidth // 8
        )

    return kind(base, types.intp), codegen


@intrinsic
def store(_typing: Any, base: Any, index: Any, vector: Any) -> Any:
    """Write the lanes to base[index] ... base[index + LANES - 1]."""

    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, values: Any) -> Any:
        builder.store(values[2], _at(builder, values[0], values[1], values[2].type), align=base.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.none(base, types.intp, vector), codegen


def _first(builder: ir.IRBuilder, count: Any) -> Any:
    """True in the first `count` lanes."""
    return builder.icmp_signed("<", _places(), _spread(builder, builder.trunc(count, _INT32)))


@intrinsic
def load_first(_typing: Any, base: Any, index: Any, count: Any) -> Any:
    """base[index] ... base[index + count - 1], then zeros: nothing beyond is touched."""
    kind = Lanes(base.dtype)

    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, values: Any) -> Any:
        vector = context.get_value_type(kind)
        where = _at(builder, values[0], values[1], vector)
        align = ir.Constant(_INT32, base.dtype.bitwidth // 8)
        args = [where, align, _first(builder, values[2]), _constant(vector, 0.0)]
        return _call(builder, "llvm.masked.load", vector, args, f"{_suffix(vector)}.p0")

    return kind(base, types.intp, types.intp), codegen


@intrinsic
def store_first(_typing: Any, base: Any, index: Any, vector: Any, count: Any) -> Any:
    """Write the first `count` lanes."""

    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, values: Any) -> Any:
        where = _at(builder, values[0], values[1], values[2].type)
        args = [values[2], where, ir.Constant(_INT32, base.dtype.bitwidth // 8), _first(builder, values[3])]
        _call(builder, "llvm.masked.store", ir.VoidType(), args, f"{_suffix(values[2].type)}.p0")
        return context.get_dummy_value()

    return types.none(base, types.intp, vector, types.intp), codegen


@intrinsic
def room(_typing: Any, like: Any) -> Any:
    """Space for ROOM vectors until the kernel returns: on the stack, which takes no time to get."""
    kind = types.CPointer(like)

    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, _values: Any) -> Any:
        vector = ir.VectorType(context.get_value_type(like), LANES)
        with builder.goto_entry_block():
            place = builder.alloca(vector, ROOM)
        place.align = LANES * like.bitwidth // 8
        return builder.bitcast(place, context.get_value_type(kind))

    return kind(like), codegen


@intrinsic
def prefetch(_typing: Any, base: Any, index: Any) -> Any:
    """Start to bring base[index] near, for it will be read soon; any address will do."""

    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, values: Any) -> Any:
        where = builder.gep(values[0], [values[1]])
        read, near, data = (ir.Constant(_INT32, i) for i in (0, 3, 1))
        _call(builder, "llvm.prefetch", ir.VoidType(), [where, read, near, data], "p0")
        return context.get_dummy_value()

    return types.none(base, types.intp), codegen


@intrinsic
def fetch_add(_typing: Any, counter: Any) -> Any:
    """Add 1 to what `counter` points to and return what it held before; threads do so one after the other."""

    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, values: Any) -> Any:
        return builder.atomic_rmw("add", values[0], ir.Constant(ir.IntType(64), 1), "seq_cst")

    return types.int64(counter), codegen


@part
def take(base, index, rest):
    """The numbers from base[index] on: LANES, or `rest` where that is less, then zeros."""
    return load(base, index) if rest >= LANES else load_first(base, index, rest)


@part
def give(base, index, vector, rest):
    """Write the lanes, or the first `rest` of them where that is less."""
    if rest >= LANES:
        store(base, index, vector)
    else:
        store_first(base, index, vector, rest)


@part
def claim(turns, index):
    """The item after `index`; or, if threads share the work, the next one nobody has taken."""
    if turns:
        return fetch_add(pointer(turns, INDEX))
    return index + 1


@part
def finish(turns):
    """Count an item as done, where others wait for it."""
    if turns:
        fetch_add(pointer(turns + 8, INDEX))


# ---------------------------------------------------------------- exp and log, by series


def _layout(kind: ir.VectorType) -> tuple[ir.VectorType, int, int]:
    """Integer vector of the same width, mantissa bits, exponent bias."""
    single = kind.element == ir.FloatType()
    return ir.VectorType(ir.IntType(32 if single else 64), LANES), 23 if single else 52, 127 if single else 1023


# ln 2 in two parts: the product of the first with an exponent is exact.
_LN2 = {23: (0.693359375, -2.12194440054690583e-4), 52: (6.93145751953125e-1, 1.42860682030941723e-6)}


@intrinsic
def exp(_typing: Any, x: Any) -> Any:
    """e^x for x <= 1, to about one unit in the last place; results that would be subnormal are 0, as is exp(-inf)."""

    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, values: Any) -> Any:
        kind = values[0].type
        integers, mantissa, bias = _layout(kind)
        lowest = _constant(kind, -(bias + 0.02) * math.log(2))  # rounds to exponent -bias: the bits of 0
        value = builder.select(builder.fcmp_ordered("<", values[0], lowest), lowest, values[0])
        scaled = builder.fmul(value, _constant(kind, 1 / math.log(2)))
        power = _call(builder, "llvm.rint", kind, [scaled], _suffix(kind))
        rest = value
        for part in _LN2[mantissa]:
            rest = _fma(builder, power, _constant(kind, -part), rest)
        degree = 7 if mantissa == 23 else 13
        result = _constant(kind, 1 / math.factorial(degree))
        for i in range(degree - 1, -1, -1):
            result = _fma(builder, result, rest, _constant(kind, 1 / math.factorial(i)))
        bits = builder.add(builder.fptosi(power, integers), _constant(integers, bias))
        return builder.fmul(result, builder.bitcast(builder.shl(bits, _constant(integers, mantissa)), kind))

    return x(x), codegen


@intrinsic
def log(_typing: Any, x: Any) -> Any:
    """ln x for normal x > 0: 2 artanh((f - 1) / (f + 1)) of the fraction f in [sqrt 1/2, sqrt 2)."""

    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, values: Any) -> Any:
        kind = values[0].type
        integers, mantissa, bias = _layout(kind)
        one = _constant(kind, 1.0)
        # Taking the bits of sqrt(1/2) away first makes the exponent field round at sqrt(1/2) instead of at 1.
        low = (bias - 1 << mantissa) + int((math.sqrt(2) - 1) * 2**mantissa)
        bits = builder.sub(builder.bitcast(values[0], integers), _constant(integers, low))
        power = builder.ashr(bits, _constant(integers, mantissa))
        fraction = builder.and_(bits, _constant(integers, (1 << mantissa) - 1))
        fraction = builder.bitcast(builder.add(fraction, _constant(integers, low)), kind)
        ratio = builder.fdiv(builder.fsub(fraction, one), builder.fadd(fraction, one))
        square = builder.fmul(ratio, ratio)
        terms = 5 if mantissa == 23 else 11
        series = _constant(kind, 2 / (2 * terms - 1))
        for i in range(2 * terms - 3, 0, -2):
            series = _fma(builder, series, square, _constant(kind, 2 / i))
        power = builder.sitofp(power, kind)
        high, rest = (_constant(kind, part) for part in _LN2[mantissa])
        return _fma(builder, power, high, _fma(builder, ratio, series, builder.fmul(power, rest)))

    return x(x), codegen
