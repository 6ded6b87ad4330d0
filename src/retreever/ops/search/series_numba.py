"""Exponential and logarithm of vectors for Numba kernels, by series."""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import math
from typing import Any

from llvmlite import ir

from retreever.ops.search.lanes_numba import LANES, call_llvm, constant, emit_fma, intrinsic, suffix


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
        lowest = constant(kind, -(bias + 0.02) * math.log(2))  # rounds to exponent -bias: the bits of 0
        value = builder.select(builder.fcmp_ordered("<", values[0], lowest), lowest, values[0])
        scaled = builder.fmul(value, constant(kind, 1 / math.log(2)))
        power = call_llvm(builder, "llvm.rint", kind, [scaled], suffix(kind))
        rest = value
        for part in _LN2[mantissa]:
            rest = emit_fma(builder, power, constant(kind, -part), rest)
        degree = 7 if mantissa == 23 else 13
        result = constant(kind, 1 / math.factorial(degree))
        for i in range(degree - 1, -1, -1):
            result = emit_fma(builder, result, rest, constant(kind, 1 / math.factorial(i)))
        bits = builder.add(builder.fptosi(power, integers), constant(integers, bias))
        return builder.fmul(result, builder.bitcast(builder.shl(bits, constant(integers, mantissa)), kind))

    return x(x), codegen


@intrinsic
def log(_typing: Any, x: Any) -> Any:
    """ln x for normal x > 0: 2 artanh((f - 1) / (f + 1)) of the fraction f in [sqrt 1/2, sqrt 2); NaN for NaN, inf."""

    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, values: Any) -> Any:
        kind = values[0].type
        integers, mantissa, bias = _layout(kind)
        one = constant(kind, 1.0)
        # Subtracting the bits of sqrt(1/2) first makes the exponent field change at sqrt(1/2) instead of at 1.
        low = (bias - 1 << mantissa) + int((math.sqrt(2) - 1) * 2**mantissa)
        bits = builder.sub(builder.bitcast(values[0], integers), constant(integers, low))
        power = builder.ashr(bits, constant(integers, mantissa))
        fraction = builder.and_(bits, constant(integers, (1 << mantissa) - 1))
        fraction = builder.bitcast(builder.add(fraction, constant(integers, low)), kind)
        ratio = builder.fdiv(builder.fsub(fraction, one), builder.fadd(fraction, one))
        square = builder.fmul(ratio, ratio)
        terms = 5 if mantissa == 23 else 11
        series = constant(kind, 2 / (2 * terms - 1))
        for i in range(2 * terms - 3, 0, -2):
            series = emit_fma(builder, series, square, constant(kind, 2 / i))
        power = builder.sitofp(power, kind)
        high, rest = (constant(kind, part) for part in _LN2[mantissa])
        result = emit_fma(builder, power, high, emit_fma(builder, ratio, series, builder.fmul(power, rest)))
        return builder.fadd(result, builder.fsub(values[0], values[0]))  # adds 0, or NaN where x is not finite

    return x(x), codegen
