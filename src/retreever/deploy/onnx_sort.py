"""Stable sorting in ONNX, which `torch.onnx` has no translation for.

TopK with k = all elements is a stable sort: its definition puts the element of lower index first among equals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Translations = dict[Callable[..., Any], Callable[..., Any]]


def translations() -> Translations:
    """The table for `torch.onnx.export(custom_translation_table=...)`."""
    return {torch.ops.aten.sort.stable: sort_stable}


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
