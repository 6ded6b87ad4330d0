"""Top-k by FAISS, one index per head: exact (flat), and approximate (IVF and HNSW). CPU only."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from retreever.errors import BackendError
from retreever.lab.bench.rivals.readers import (
    ByHead,
    Counts,
    Queries,
    Reader,
    Reading,
    Tokens,
    by_head,
    filled,
    mix,
    scaled,
)

LINKS, PROBES, NARROWEST = 32, 8, 64  # links per node of HNSW, lists searched of IVF, candidates kept by HNSW


def import_faiss() -> Any:
    """The package faiss; raises `BackendError` where it is not installed."""
    try:
        import faiss
    except ImportError:
        raise BackendError("faiss: expected faiss-cpu, got none (pip install 'retreever[rivals]')") from None
    return faiss


class FaissReader(Reader):
    """The tokens that an index finds for every head.

    Approximate indexes find neighbours well and large inner products badly, above all where keys differ in length. So
    they get keys of equal length: less their mean, and with one more number that fills them up. The nearest of these to
    a query, with 0 for that number, are those of the largest scores, and minus half the squared distance is the score
    up to a constant.
    """

    levelled = True

    def __init__(self) -> None:
        self.faiss = import_faiss()

    def prepare(self, keys: Tokens, values: Tokens, x: Tensor | None, budget: int) -> None:
        """Build an index over the keys of every head."""
        self.faiss.omp_set_num_threads(torch.get_num_threads())
        self.values, by = by_head(values), by_head(keys)
        self.indexes = [self._index(head.contiguous().numpy()) for head in (_level(by) if self.levelled else by)]

    def read(self, q: Queries, budget: int) -> Reading:
        """As many tokens as the budget, fewer where the index finds fewer."""
        heads, k = F.pad(scaled(q), (0, int(self.levelled))), min(budget, self.values.shape[1])
        self._start(k)
        found = [index.search(head.numpy(), k) for index, head in zip(self.indexes, heads, strict=True)]
        scored = self._scored(len(q))
        scores, index = (torch.stack([torch.from_numpy(pair[i]) for pair in found]) for i in (0, 1))
        scores = (-scores / 2 if self.levelled else scores).masked_fill(index < 0, -torch.inf)
        return Reading(mix(scores, self.values, index), lambda: Counts(filled(index), scored))

    @abstractmethod
    def _index(self, keys: Any) -> Any:
        """An index over the keys (n, e) of one head."""

    def _start(self, k: int) -> None:
        """Set up a search, and start to count distances."""

    def _scored(self, m: int) -> float:
        """Keys scored per query and head since `_start`."""
        return float(self.values.shape[1])


class Flat(FaissReader):
    """Exact: every key is scored."""

    levelled = False

    def _index(self, keys: Any) -> Any:
        index = self.faiss.IndexFlatIP(keys.shape[1])
        index.add(keys)
        return index


class IVF(FaissReader):
    """Inverted lists: as many as the root of n, of which eight are searched."""

    def _index(self, keys: Any) -> Any:
        n, e = keys.shape
        self.lists = max(1, round(n**0.5))
        index = self.faiss.IndexIVFFlat(self.faiss.IndexFlatL2(e), e, self.lists)
        index.cp.min_points_per_centroid = 1  # fewer than it likes make it print a warning
        index.nprobe = PROBES
        index.train(keys)
        index.add(keys)
        return index

    def _start(self, k: int) -> None:
        self.faiss.cvar.indexIVF_stats.reset()

    def _scored(self, m: int) -> float:
        return self.lists + float(self.faiss.cvar.indexIVF_stats.ndis) / (m * len(self.indexes))


class HNSW(FaissReader):
    """A graph of neighbours, 32 links a node; at least 64 candidates are kept in a search."""

    def _index(self, keys: Any) -> Any:
        index = self.faiss.IndexHNSWFlat(keys.shape[1], LINKS)
        index.add(keys)
        return index

    def _start(self, k: int) -> None:
        self.faiss.cvar.hnsw_stats.reset()
        for index in self.indexes:
            index.hnsw.efSearch = max(k, NARROWEST)

    def _scored(self, m: int) -> float:
        return 1 + float(self.faiss.cvar.hnsw_stats.ndis) / (m * len(self.indexes))  # the first node is not counted


def _level(keys: ByHead) -> ByHead:
    """Keys of every head less their mean, and one more number that makes all equally long."""
    keys = keys - keys.mean(dim=1, keepdim=True)
    squares = keys.square().sum(dim=2, keepdim=True)
    return torch.cat([keys, (squares.amax(dim=1, keepdim=True) - squares).sqrt()], dim=2)
