"""Memory operations of Numba kernels: vector loads and stores, stack space, and counters that threads share."""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from retreever.ops.search.lanes_numba import (
    INT32,
    LANES,
    Lanes,
    call_llvm,
    constant,
    first_lanes,
    intrinsic,
    part,
    suffix,
)

INDEX = np.int64(0)
ROOM = 64


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


@intrinsic
def load_first(_typing: Any, base: Any, index: Any, count: Any) -> Any:
    """The numbers base[index] ... base[index + count - 1], then zeros; memory beyond them is not read."""
    kind = Lanes(base.dtype)

    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, values: Any) -> Any:
        vector = context.get_value_type(kind)
        where = _at(builder, values[0], values[1], vector)
        align = ir.Constant(INT32, base.dtype.bitwidth // 8)
        args = [where, align, first_lanes(builder, values[2]), constant(vector, 0.0)]
        return call_llvm(builder, "llvm.masked.load", vector, args, f"{suffix(vector)}.p0")

    return kind(base, types.intp, types.intp), codegen


@intrinsic
def store_first(_typing: Any, base: Any, index: Any, vector: Any, count: Any) -> Any:
    """Write the first `count` lanes to base[index] ... base[index + count - 1]."""

    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, values: Any) -> Any:
        where = _at(builder, values[0], values[1], values[2].type)
        args = [values[2], where, ir.Constant(INT32, base.dtype.bitwidth // 8), first_lanes(builder, values[3])]
        call_llvm(builder, "llvm.masked.store", ir.VoidType(), args, f"{suffix(values[2].type)}.p0")
        return context.get_dummy_value()

    return types.none(base, types.intp, vector, types.intp), codegen


@intrinsic
def room(_typing: Any, like: Any) -> Any:
    """Stack space for ROOM vectors of the type of `like`, valid until the kernel returns."""
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
    """Prefetch base[index] into the cache; the address need not be valid."""

    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, values: Any) -> Any:
        where = builder.gep(values[0], [values[1]])
        read, near, data = (ir.Constant(INT32, i) for i in (0, 3, 1))
        call_llvm(builder, "llvm.prefetch", ir.VoidType(), [where, read, near, data], "p0")
        return context.get_dummy_value()

    return types.none(base, types.intp), codegen


@intrinsic
def fetch_add(_typing: Any, counter: Any) -> Any:
    """Atomically add 1 to the number `counter` points to; returns the number before."""

    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, values: Any) -> Any:
        return builder.atomic_rmw("add", values[0], ir.Constant(ir.IntType(64), 1), "seq_cst")

    return types.int64(counter), codegen


@part
def claim(turns, index):
    """The item after `index`; or, if threads share the work, the next item that no thread has claimed."""
    if turns:
        return fetch_add(pointer(turns, INDEX))
    return index + 1


@part
def finish(turns):
    """Count an item as done, if threads share the work."""
    if turns:
        fetch_add(pointer(turns + 8, INDEX))
