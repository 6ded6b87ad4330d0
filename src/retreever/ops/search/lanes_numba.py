"""Explicit vectors for Numba kernels: `LANES` numbers in registers, with the few operations the kernels need.

LLVM vectorises scalar loops depending on trip counts it does not know. These operations become vector instructions at
every shape and compile faster. There are no fast-math flags, because -inf marks masked nodes.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import operator
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import extending, njit, types
from numba.extending import lower_builtin, models, register_model, type_callable

LANES = 16
INT32 = ir.IntType(32)
intrinsic: Any = extending.intrinsic  # its type describes the typing function, not the call in a kernel

# Division by zero follows IEEE: the checks of the Python error model would prevent vectorised loops.
_jit: Callable[..., Any] = partial(njit, error_model="numpy")
# A function that kernels call.
part: Callable[..., Any] = partial(_jit, no_cpython_wrapper=True, no_cfunc_wrapper=True)
# Same, inlined into its callers: a call would spill registers.
step: Callable[..., Any] = partial(part, inline="always")


def kernel(function: Callable[..., None]) -> Any:
    """Make `function` an entry point: compiled when first used and cached on disk, in memory alone if that fails.

    Numba invalidates its cache when the file of `function` changes, not when the functions it calls do; so the name in
    the cache contains a checksum of all kernel sources.
    """
    sources = sorted(Path(__file__).parent.parent.rglob("*_numba.py"))
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
    """Define the operator `symbol` on vectors, lane by lane."""

    @type_callable(symbol)
    def typed(_context: Any) -> Any:
        return lambda a, b: a if isinstance(a, Lanes) and a == b else None

    lower_builtin(symbol, Lanes, Lanes)(lambda _context, builder, _signature, values: emit(builder, *values))


_operator(operator.add, ir.IRBuilder.fadd)
_operator(operator.sub, ir.IRBuilder.fsub)
_operator(operator.mul, ir.IRBuilder.fmul)
_operator(operator.truediv, ir.IRBuilder.fdiv)


def constant(kind: ir.VectorType, value: float) -> ir.Constant:
    """The number `value` in every lane of a vector of that kind."""
    return ir.Constant(kind, [value] * LANES)


def _spread(builder: ir.IRBuilder, value: Any) -> Any:
    """The scalar `value` in every lane."""
    undefined = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(INT32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(INT32, LANES), [0] * LANES))


def _places() -> ir.Constant:
    """The vector 0 ... LANES - 1."""
    return ir.Constant(ir.VectorType(INT32, LANES), list(range(LANES)))


def call_llvm(builder: ir.IRBuilder, name: str, result: ir.Type, args: list[Any], suffix: str, **flags: Any) -> Any:
    """Emit a call of the LLVM intrinsic `name`.`suffix`."""
    name = f"{name}.{suffix}"
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(result, [arg.type for arg in args]), name)
    return builder.call(function, args, **flags)


def suffix(kind: ir.VectorType) -> str:
    """Suffix of the names of LLVM intrinsics for vectors of that kind."""
    return f"v{LANES}f{32 if kind.element == ir.FloatType() else 64}"


def emit_fma(builder: ir.IRBuilder, a: Any, b: Any, c: Any) -> Any:
    """Emit instructions for a * b + c."""
    return call_llvm(builder, "llvm.fmuladd", a.type, [a, b, c], suffix(a.type))


@intrinsic
def fma(_typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once where the machine can."""
    return a(a, b, c), lambda _context, builder, _signature, values: emit_fma(builder, *values)


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
        return call_llvm(builder, "llvm.vector.reduce.fadd", kind.element, args, suffix(kind), fastmath=("reassoc",))

    return a.dtype(a), codegen


@intrinsic
def splat(_typing: Any, x: Any, like: Any) -> Any:
    """The number `x` in every lane, as numbers of the type of `like`."""
    return Lanes(like)(like, like), lambda _context, builder, _signature, values: _spread(builder, values[0])


@intrinsic
def put(_typing: Any, vector: Any, place: Any, x: Any) -> Any:
    """`vector` with the number `x` in lane `place`."""

    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, values: Any) -> Any:
        # LLVM inserts at an index known only at run time through memory.
        is_place = builder.icmp_signed("==", _places(), _spread(builder, builder.trunc(values[1], INT32)))
        return builder.select(is_place, _spread(builder, values[2]), values[0])

    return vector(vector, types.intp, vector.dtype), codegen


def first_lanes(builder: ir.IRBuilder, count: Any) -> Any:
    """True in the first `count` lanes."""
    return builder.icmp_signed("<", _places(), _spread(builder, builder.trunc(count, INT32)))


@intrinsic
def keep_first(_typing: Any, vector: Any, count: Any) -> Any:
    """The first `count` lanes; 0 in the others."""
    return vector(vector, types.intp), lambda _context, builder, _signature, v: builder.select(
        first_lanes(builder, v[1]), v[0], constant(v[0].type, 0.0)
    )
