"""What `torch.onnx` has no translation for: stable sorting, searching in what is sorted, and running maxima.

TopK with k = all elements is a stable sort: its definition puts the element of lower index first among equals. The
other two compare all pairs, so they take n numbers for every one of n points or m queries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Translations = dict[Callable[..., Any], Callable[..., Any]]


def translations() -> Translations:
    """The table for `torch.onnx.export(custom_translation_table=...)`."""
    aten = torch.ops.aten
    return {aten.sort.stable: sort_stable, aten.searchsorted.Tensor: searchsorted, aten.cummax.default: cummax}


def sort_stable(values: Any, stable: bool = True, dim: int = -1, descending: bool = False) -> tuple[Any, Any]:
    """Values in order along an axis, and where each came from."""
    from onnx import TensorProto
    from onnxscript import opset18

    op: Any = opset18
    sortable = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT32, TensorProto.INT64)
    wide = values if values.dtype in sortable else op.Cast(values, to=TensorProto.INT32)  # ONNX Runtime sorts no int8
    axis = op.Constant(value_ints=[dim])
    ordered, index = op.TopK(wide, op.Gather(op.Shape(values), axis), axis=dim, largest=int(descending), sorted=1)
    return (ordered if wide is values else op.CastLike(ordered, values)), index


def searchsorted(boundaries: Any, values: Any, right: bool = False) -> Any:
    """How many boundaries, along their last axis, lie before each value; with `right` also those equal to it."""
    from onnx import TensorProto
    from onnxscript import opset18

    op: Any = opset18
    last = op.Constant(value_ints=[-1])
    across, down = op.Unsqueeze(boundaries, op.Constant(value_ints=[-2])), op.Unsqueeze(values, last)
    before = op.LessOrEqual(across, down) if right else op.Less(across, down)
    return op.ReduceSum(op.Cast(before, to=TensorProto.INT64), last, keepdims=0)


def cummax(values: Any, dim: int) -> tuple[Any, Any]:
    """The largest value so far along an axis, and where it is, the last of equals."""
    from onnxscript import opset18

    op: Any = opset18
    swap = list(range(len(values.shape)))  # that axis and the last one, there and back
    swap[dim], swap[-1] = swap[-1], swap[dim]
    last, zero, one = (op.Constant(value_ints=[number]) for number in (-1, 0, 1))
    across = op.Unsqueeze(op.Transpose(values, perm=swap), op.Constant(value_ints=[-2]))
    length = op.Gather(op.Shape(values), op.Constant(value_int=dim))
    places = op.Range(op.Constant(value_int=0), length, op.Constant(value_int=1))
    past = op.LessOrEqual(places, op.Unsqueeze(places, last))
    first = op.Slice(across, zero, one, last)  # in the past of every place, so it may stand for what is not
    largest = op.ReduceMax(op.Where(past, across, first), last, keepdims=0)
    here = op.And(past, op.Equal(across, op.Unsqueeze(largest, last)))
    index = op.ReduceMax(op.Where(here, places, zero), last, keepdims=0)
    return op.Transpose(largest, perm=swap), op.Transpose(index, perm=swap)
