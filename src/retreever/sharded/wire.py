"""Rows of tensors between processes: one differentiable all-to-all, errors of one line, and a count of what was sent.

All processes of a group call the same methods in the same order. Gradients travel the opposite way, so all of them must
also call `backward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Int, Shaped
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from retreever.arguments import reject
from retreever.errors import InputError, RetreeverError

Rows = Shaped[Tensor, "n *c"]
Come = Shaped[Tensor, "v *c"]
Counts = Sequence[int]


class Wire:
    """The connection of this process to the others of its group.

    Attributes:
        rank: number of this process in the group.
        world: number of processes.
        sent: bytes this process has sent to others so far, gradients included.
        messages: collective calls so far.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        if not isinstance(mesh, DeviceMesh):
            reject("mesh", "a DeviceMesh, as init_device_mesh returns", type(mesh).__name__)
        if mesh.ndim != 1:
            reject("mesh", "one dimension (of several, take one as in mesh['tree'])", f"{mesh.ndim} dimensions")
        self.group = mesh.get_group()
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.device = torch.device(mesh.device_type)
        self.sent = self.messages = 0

    def exchange(self, rows: Rows, send: Counts, receive: Counts) -> Come:
        """Send the first `send[0]` rows to process 0, the next to process 1, ...; the rows that come, by sender.

        Whether a gradient is wanted must not differ between processes, or some would wait for others for ever: in
        training it always is, for floating point rows.
        """
        if not (torch.is_grad_enabled() and rows.is_floating_point()):
            return self._move(rows, send, receive)
        rows = rows if rows.requires_grad else rows.detach().requires_grad_()
        return _Exchange.apply(rows, self, send, receive)  # type: ignore[no-untyped-call]

    def everyone(self, numbers: Int[Tensor, " c"]) -> Int[Tensor, "world c"]:
        """The same count of whole numbers from every process."""
        copies = numbers.to(self.device)[None].expand(self.world, -1)
        return self._move(copies, [1] * self.world, [1] * self.world)

    def agree(self, error: InputError | None) -> None:
        """Raise on all processes if any has an `error`, so that none waits for another that has given up."""
        failed = self.everyone(torch.tensor([int(error is not None)]))[:, 0].nonzero()[:, 0].tolist()
        if error is not None:
            raise error
        if failed:
            raise InputError(f"context: expected usable tokens on every process, got an error on {failed}")

    def _move(self, rows: Rows, send: Counts, receive: Counts) -> Come:
        come = rows.new_empty(sum(receive), *rows.shape[1:])
        size = rows[0].numel() if len(rows) else 0
        self.sent += (sum(send) - send[self.rank]) * size * rows.element_size()
        self.messages += 1
        try:
            dist.all_to_all_single(come, rows.contiguous(), list(receive), list(send), group=self.group)
        except RuntimeError as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].partition(". ")[0]
            raise RetreeverError(f"process {self.rank} of {self.world} lost the others: {reason}") from error
        return come


class _Exchange(torch.autograd.Function):
    """All-to-all; its gradient is the all-to-all back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, wire: Wire, send: Counts, receive: Counts) -> Tensor:
        ctx.wire, ctx.send, ctx.receive = wire, send, receive
        return wire._move(rows, send, receive)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.wire._move(gradient, ctx.receive, ctx.send), None, None, None


class Route:
    """A way for n rows, each to a process of its own, and back."""

    def __init__(self, wire: Wire, to: Int[Tensor, " n"]) -> None:
        self.wire = wire
        self.order = to.argsort(stable=True)
        counts = torch.bincount(to, minlength=wire.world)
        ones = [1] * wire.world
        come = wire.exchange(counts, ones, ones)
        self.sends: list[int] = counts.tolist()
        self.receives: list[int] = come.tolist()

    def send(self, rows: Rows) -> Come:
        """Every row to its process; the rows that came here."""
        return self.wire.exchange(rows[self.order], self.sends, self.receives)

    def back(self, rows: Come) -> Rows:
        """An answer to every row that came here; the answers to the rows sent, in their order."""
        return self.wire.exchange(rows, self.receives, self.sends)[self.order.argsort()]
