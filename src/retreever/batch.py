"""`Batch`, which tasks make and models take: context points, target points, and masks for ragged rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from retreever.arguments import reject
from retreever.checks import (
    check_any_real,
    check_finite,
    check_float,
    check_mask,
    check_same,
    check_tensor,
    values_readable,
)


@dataclass(frozen=True)
class Batch:
    """b tasks at once. Values are floats (b, n, dy) or, for symbols and classes, integers (b, n).

    Raw tokens have no values: they are `xc`, and `yc` has width 0 (`tokens[..., :0]`); queries `xt` may be of another
    width.

    Attributes:
        xc: where the context points are.
        yc: their values.
        xt: where predictions are wanted.
        yt: the true values there.
        context_mask: True where a context point is real; None means all.
        target_mask: True where a target is real; None means all.
        output_mask: True where an output of a real target is known; None means all. Unknown outputs count neither
            for the loss nor for the reward. Every real target has at least one known output.
    """

    xc: Float[Tensor, "b n dx"]
    yc: Shaped[Tensor, "b n *dy"]
    xt: Float[Tensor, "b m dx"]
    yt: Shaped[Tensor, "b m *out"]
    context_mask: Bool[Tensor, "b n"] | None = None
    target_mask: Bool[Tensor, "b m"] | None = None
    output_mask: Bool[Tensor, "b m out"] | None = None

    @property
    def truth(self) -> Shaped[Tensor, "b m *out"]:
        """`yt` as losses and metrics take it: NaN where an output is not known, 0 at padding."""
        known = self.yt if self.output_mask is None else self.yt.masked_fill(~self.output_mask, torch.nan)
        return without_padding(known, self.target_mask)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        if isinstance(device, torch.dtype):
            reject("device", "a device", f"{device}, a type of numbers")
        moved: dict[str, Any] = {}
        for part in fields(self):
            value = getattr(self, part.name)
            moved[part.name] = None if value is None else value.to(device)
        return replace(self, **moved)

    def rows(self, which: slice) -> Batch:
        """A batch of some of the tasks."""
        parts: dict[str, Any] = {}
        for part in fields(self):
            value = getattr(self, part.name)
            parts[part.name] = None if value is None else value[which]
        return Batch(**parts)

    def validate(self) -> Batch:
        """Raise `InputError` unless shapes, types, devices and values fit together; returns the batch itself."""
        check_points("xc", self.xc, "yc", self.yc, self.context_mask, "context_mask")
        return self.check_targets()

    def check_targets(self) -> Batch:
        """`validate` without what concerns the context alone."""
        yt = self.yt if self.output_mask is None else self._known(self.output_mask)
        check_points("xt", self.xt, "yt", yt, self.target_mask, "target_mask", axis="m")
        if self.output_mask is not None:
            self._check_any_known(self.output_mask)
        raw = self.yc.dim() == 3 and self.yc.shape[2] == 0
        if self.xt.shape[0] != self.xc.shape[0] or (self.xt.shape[2] != self.xc.shape[2] and not raw):
            reject("xt", f"shape (b={self.xc.shape[0]}, m, dx={self.xc.shape[2]})", tuple(self.xt.shape))
        check_same("xt", self.xt, "xc", self.xc)
        return self

    def _known(self, mask: Bool[Tensor, "b m out"]) -> Float[Tensor, "b m out"]:
        """`yt` with 0 for unknown outputs; raises `InputError` unless `mask` fits `yt`."""
        y = self.yt
        if not isinstance(y, Tensor) or y.dim() != 3 or not y.dtype.is_floating_point:
            got = f"{y.dtype} {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
            reject("yt", "floats (b, m, dy), as there is an output_mask", got)
        check_mask("output_mask", mask, "b m dy", b=y.shape[0], m=y.shape[1], dy=y.shape[2])
        check_same("output_mask", mask, "yt", y, dtype=False)
        return y.masked_fill(~mask, 0)

    def _check_any_known(self, mask: Bool[Tensor, "b m out"]) -> None:
        """Raise `InputError` if a real target has no known output: it would count as predicted without loss."""
        known = mask.any(dim=-1) if self.target_mask is None else mask.any(dim=-1) | ~self.target_mask
        if values_readable(known) and not bool(known.all()):
            unknown = f"{int((~known).sum())} without; leave them out by target_mask"
            reject("output_mask", "a known output for every real target", unknown)


def as_batch(argument: str, found: Any) -> Batch:
    """`found` as a `Batch`: as it is, or made of (xc, yc, xt, yt) and masks."""
    if isinstance(found, tuple | list) and 4 <= len(found) <= 7 and all(isinstance(part, Tensor) for part in found[:4]):
        found = Batch(*found)
    if isinstance(found, Batch):
        if isinstance(found.xc, Tensor) and 0 in found.xc.shape[:2]:
            reject(argument, "batches of at least one row and one context point", tuple(found.xc.shape))
        return found
    parts = ", ".join(type(part).__name__ for part in found[:7]) if isinstance(found, tuple | list) else ""
    got = f"{type(found).__name__} ({parts})" if parts else type(found).__name__
    reject(argument, "items that are a Batch or a tuple of tensors (xc, yc, xt, yt)", got)


def check_points(
    x_name: str, x: Tensor, y_name: str, y: Tensor, mask: Tensor | None, mask_name: str = "mask", axis: str = "n"
) -> None:
    """Check points and their values: same rows, real entries finite, at least one real point per row."""
    check_tensor(x_name, x, f"b {axis} dx")
    check_float(x_name, x)
    b, n = x.shape[:2]
    if n == 0:
        reject(x_name, "at least one point", tuple(x.shape))
    if not isinstance(y, Tensor) or y.dim() not in (2, 3) or y.layout != torch.strided:
        got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        reject(y_name, f"shape (b={b}, {axis}={n}, dy) or integers (b={b}, {axis}={n})", got)
    if y.dtype.is_floating_point:
        check_tensor(y_name, y, f"b {axis} dy", **{"b": b, axis: n})
        check_same(y_name, y, x_name, x)
    elif y.dim() == 3:
        reject(y_name, f"floats (b={b}, {axis}={n}, dy) or integers (b={b}, {axis}={n})", f"{y.dtype} {tuple(y.shape)}")
    else:
        check_tensor(y_name, y, f"b {axis}", **{"b": b, axis: n})
        check_same(y_name, y, x_name, x, dtype=False)
    if mask is not None:
        check_mask(mask_name, mask, f"b {axis}", **{"b": b, axis: n})
        check_same(mask_name, mask, x_name, x, dtype=False)
        check_any_real(mask_name, mask)
    check_finite(x_name, x, mask)
    if y.dtype.is_floating_point:
        check_finite(y_name, y, mask)


def without_padding(values: Tensor, mask: Bool[Tensor, "b n"] | None) -> Tensor:
    """`values` with zeros at padding, which may hold NaN."""
    return values if mask is None else values.masked_fill(~mask.reshape(mask.shape + (1,) * (values.dim() - 2)), 0)


def collate(rows: Sequence[Batch]) -> Batch:
    """Stack batches of different sizes into one ragged batch, padded with zeros and masked."""
    if not rows:
        reject("rows", "at least one batch", "none")
    for index, row in enumerate(rows):
        if not isinstance(row, Batch):
            reject(f"rows[{index}]", "a Batch", type(row).__name__)
        for name in ("xc", "yc", "xt", "yt"):
            first, value = getattr(rows[0], name), getattr(row, name)
            if not isinstance(value, Tensor) or value.dim() < 2 or value.layout != torch.strided:
                got = _kind(value) if isinstance(value, Tensor) else type(value).__name__
                reject(f"rows[{index}].{name}", "a dense tensor of two axes or more", got)
            if (value.dtype, value.shape[2:]) != (first.dtype, first.shape[2:]):
                reject(f"rows[{index}].{name}", f"the dtype and width of rows[0] {_kind(first)}", _kind(value))
        _check_lengths(f"rows[{index}]", row)
    context = [row.context_mask for row in rows]
    target = [row.target_mask for row in rows]
    xc, yc, context_mask = _pad([row.xc for row in rows], [row.yc for row in rows], context)
    xt, yt, target_mask = _pad([row.xt for row in rows], [row.yt for row in rows], target)
    return Batch(xc, yc, xt, yt, context_mask, target_mask, _pad_outputs(rows, xt.shape[1]))


def _check_lengths(where: str, row: Batch) -> None:
    """Check that there are as many values and masks as points; padding would hide missing ones."""
    parts: dict[str, tuple[Tensor | None, Tensor]] = {
        "yc": (row.yc, row.xc),
        "context_mask": (row.context_mask, row.xc),
        "yt": (row.yt, row.xt),
        "target_mask": (row.target_mask, row.xt),
        "output_mask": (row.output_mask, row.xt),
    }
    for name, (part, points) in parts.items():
        if part is not None and part.shape[:2] != points.shape[:2]:
            reject(f"{where}.{name}", f"as many rows and points as x has {tuple(points.shape[:2])}", tuple(part.shape))
    if row.xt.shape[0] != row.xc.shape[0]:
        reject(f"{where}.xt", f"as many rows as xc has ({row.xc.shape[0]})", row.xt.shape[0])


def _kind(tensor: Tensor) -> str:
    kind = "" if tensor.layout == torch.strided else f" {tensor.layout}"
    return f"{tensor.dtype} {tuple(tensor.shape[2:])}{kind}"


def _pad(
    xs: Sequence[Tensor], ys: Sequence[Tensor], masks: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor, Tensor | None]:
    length = max(x.shape[1] for x in xs)
    real = [torch.ones_like(x[..., 0], dtype=torch.bool) if m is None else m for x, m in zip(xs, masks, strict=True)]
    mask = torch.cat([_pad_to(r, length) for r in real])
    x, y = torch.cat([_pad_to(x, length) for x in xs]), torch.cat([_pad_to(y, length) for y in ys])
    return x, y, None if bool(mask.all()) else mask


def _pad_outputs(rows: Sequence[Batch], length: int) -> Tensor | None:
    """Output masks of all rows, padded; outputs of rows without a mask are known. None if no row has one."""
    if all(row.output_mask is None for row in rows):
        return None
    known = [torch.ones_like(r.yt, dtype=torch.bool) if r.output_mask is None else r.output_mask for r in rows]
    return torch.cat([_pad_to(mask, length) for mask in known])


def _pad_to(tensor: Tensor, length: int) -> Tensor:
    padding = tensor.new_zeros(tensor.shape[0], length - tensor.shape[1], *tensor.shape[2:])
    return torch.cat([tensor, padding], dim=1)
