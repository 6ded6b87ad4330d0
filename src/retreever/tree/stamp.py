"""Which weights made a tree, and whether they have changed since.

A tree in memory remembers the parameters that made it and how often each was written to, which takes about a
microsecond to compare. A tree from a file has their fingerprint, which is compared when a module first reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from hashlib import sha256
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from retreever.arguments import reject

Sources = Mapping[str, nn.Module]  # the layers that make a tree, by their role


class _Weight(NamedTuple):
    """A parameter: where its layer keeps it, what it was, and how often it had been written to."""

    layer: dict[str, Any]
    name: str
    value: Tensor
    version: int


class Stamp:
    """The weights that made a tree: a fingerprint, and the module whose weights they are, if it is in memory."""

    def __init__(self, fingerprint: str | None) -> None:
        self._fingerprint = fingerprint
        self._owner: Callable[[], nn.Module | None] = lambda: None
        self._sources: Sources = {}
        self._weights: list[_Weight] = []

    @classmethod
    def of(cls, owner: nn.Module, sources: Sources) -> Stamp:
        """The stamp of a tree that `owner` makes now by the layers `sources`."""
        stamp = cls(None)
        stamp._bind(owner, sources)
        return stamp

    def check(self, owner: nn.Module, sources: Callable[[], Sources]) -> None:
        """Raise `InputError` if the weights of `owner` are not those that made the tree, or have changed since."""
        if self._owner() is owner:
            if self._changed():
                reject("tree", "one built with the present weights", "one from before they changed; build it again")
            return
        made_by, layers = self.fingerprint(), sources()
        if made_by is not None and made_by != (ours := fingerprint_of(layers)):
            reject("tree", f"one made by these weights ({ours[:12]})", f"one made by others ({made_by[:12]})")
        self._bind(owner, layers)

    def fingerprint(self) -> str | None:
        """The fingerprint of the weights; None if they have changed before it was taken."""
        if self._fingerprint is None and self._sources and not self._changed():
            self._fingerprint = fingerprint_of(self._sources)
        return self._fingerprint

    def _changed(self) -> bool:
        for layer, name, value, version in self._weights:
            if layer.get(name) is not value or value._version != version:
                return True
        return False

    def __reduce__(self) -> tuple[type[Stamp], tuple[str | None]]:
        """Copies and pickles keep the fingerprint alone."""
        return Stamp, (self.fingerprint(),)

    def _bind(self, owner: nn.Module, sources: Sources) -> None:
        _count_fused_steps()
        self._owner, self._sources = ref(owner), sources
        self._weights = [
            _Weight(layer._parameters, name, weight, weight._version)
            for source in sources.values()
            for layer in source.modules()
            for name, weight in layer._parameters.items()
            if weight is not None and not weight.is_inference()  # which have no count of writes
        ]


def fingerprint_of(sources: Sources) -> str:
    """SHA-256 of names, dtypes, shapes and numbers of all tensors of the layers."""
    digest = sha256()
    for role, layer in sources.items():
        for name, value in sorted(layer.state_dict().items()):
            if isinstance(value, Tensor):
                plain = value.detach().to("cpu").contiguous()
                digest.update(f"{role}.{name} {plain.dtype} {tuple(plain.shape)}\n".encode())
                digest.update(plain.flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    return digest.hexdigest()


@cache
def _count_fused_steps() -> None:
    """From now on fused optimisers, which write to parameters unseen by autograd, count as writing to them."""

    def count(optimiser: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimiser.param_groups:
            if group.get("fused"):
                torch.autograd.graph.increment_version(
                    [weight for weight in group["params"] if weight.grad is not None]
                )

    register_optimizer_step_post_hook(count)
