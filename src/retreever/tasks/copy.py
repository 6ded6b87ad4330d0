"""Copy task (paper, section 4.1): given the first half of a palindrome, predict the second half.

The sequence of length N = 2^k is BOS, digits, their mirror image, EOS. The context is the first half, BOS and N/2 - 1
digits; target j (0-based) is the digit at context position N/2 - 1 - j, and EOS at the very end. A query holds
only its position, so a correct answer must be retrieved from one particular context token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution

from retreever.arguments import check_int, reject
from retreever.batch import Batch
from retreever.tasks.padding import Room, Sizes
from retreever.tasks.seeds import stream

BOS, EOS, FIRST_DIGIT, VOCABULARY = 0, 1, 2, 12
LONGEST = 32_768
FIXED_BATCH = 64  # sequences a batch of the validation and test sets


@dataclass(frozen=True)
class CopyTask:
    """Copy task of total length `n`, a power of two from 4 to 32,768; the context has n/2 tokens."""

    n: int = 256
    test_sequences: int = 3_200

    def __post_init__(self) -> None:
        if not isinstance(self.n, int) or not 4 <= self.n <= LONGEST or self.n & (self.n - 1):
            reject("n", f"a power of two from 4 to {LONGEST}", self.n)

    @property
    def context(self) -> int:
        """Context tokens, and as many targets."""
        return self.n // 2

    def sample(self, size: int, generator: torch.Generator, device: torch.device | str = "cpu") -> Batch:
        """`size` fresh sequences."""
        check_int("size", size, 1)
        half = self.context
        shape, drawn_on = (size, half - 1), generator.device
        digits = torch.randint(FIRST_DIGIT, VOCABULARY, shape, generator=generator, device=drawn_on).to(device)
        bos, eos = digits.new_full((size, 1), BOS), digits.new_full((size, 1), EOS)
        positions = torch.arange(half, dtype=torch.float32, device=device)[None, :, None].expand(size, half, 1)
        return Batch(
            xc=positions, yc=torch.cat([bos, digits], dim=1), xt=positions, yt=torch.cat([digits.flip(1), eos], dim=1)
        )

    def draw_sizes(self, generator: torch.Generator) -> Sizes:
        """All sequences are of one length."""
        return Sizes(self.context, self.context, Room(self.context, self.context))

    def sample_padded(self, size: int, generator: torch.Generator, sizes: Tensor, room: Room) -> Batch:
        """Same as `sample`, on the generator's device."""
        return self.sample(size, generator, generator.device)

    def training(self, seed: int) -> torch.Generator:
        """The generator of the training sequences of `seed`."""
        return stream(self._name, "train", seed)

    def validation(self, sequences: int = 320, size: int = FIXED_BATCH) -> Iterator[Batch]:
        """Fixed sequences for validation; never trained on, never tested on."""
        return self._fixed(stream(self._name, "validation", 0), sequences, size)

    def test(self, size: int = FIXED_BATCH) -> Iterator[Batch]:
        """The fixed test sequences (3,200 by default)."""
        return self._fixed(stream(self._name, "test", 0), self.test_sequences, size)

    @property
    def test_batches(self) -> int:
        """Batches of the test set."""
        return -(-self.test_sequences // FIXED_BATCH)

    @staticmethod
    def metric(dist: Distribution, batch: Batch) -> Tensor:
        """Accuracy over all positions, EOS included, in per cent; one value per query (b, m)."""
        assert isinstance(dist, Categorical)
        return 100.0 * (dist.logits.argmax(dim=-1) == batch.yt).to(batch.xt.dtype)

    @property
    def _name(self) -> str:
        return f"copy-{self.n}"

    def _fixed(self, generator: torch.Generator, sequences: int, size: int) -> Iterator[Batch]:
        check_int("size", size, 1)
        for start in range(0, sequences, size):
            yield self.sample(min(size, sequences - start), generator)
