"""Copy task: the sequences, the protocol and the two scores known without training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical

from retreever import Batch, InputError, RandomGuess
from retreever.tasks.copy import BOS, EOS, LONGEST, CopyTask
from retreever.tasks.seeds import derive_seed


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def whole(batch: Batch) -> Tensor:
    """The sequences from BOS to EOS."""
    return torch.cat([batch.yc, batch.yt], dim=1)


def keys(batches: Iterable[Batch]) -> Iterator[bytes]:
    """Every sequence as something that can be compared and counted."""
    for batch in batches:
        for row in whole(batch).to(torch.uint8).numpy():
            yield row.tobytes()


@pytest.mark.parametrize("n", [4, 8, 64, 256])
def test_a_sequence_is_a_palindrome_between_its_marks(n: int) -> None:
    sequence = whole(CopyTask(n).sample(50, generator()))
    assert sequence.shape == (50, n) and sequence.dtype == torch.int64
    assert (BOS, EOS) == (0, 1) and (sequence[:, 0] == 0).all() and (sequence[:, -1] == 1).all()
    inner = sequence[:, 1:-1]
    assert torch.equal(inner, inner.flip(1)) and inner.min() >= 2 and inner.max() <= 11


def test_target_j_stands_at_context_position_half_minus_one_minus_j() -> None:
    batch, half = CopyTask(128).sample(50, generator()), 64
    for j in range(half - 1):
        assert torch.equal(batch.yt[:, j], batch.yc[:, half - 1 - j])
    assert (batch.yt[:, -1] == EOS).all()


def test_queries_say_where_they_stand_and_nothing_else() -> None:
    """Positions restart at 0 for queries; context and queries have n/2 each; nothing needs a mask."""
    batch = CopyTask(16).sample(3, generator()).validate()
    assert batch.xc.dtype == torch.float32 and batch.xc[..., 0].tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]] * 3
    assert torch.equal(batch.xt, batch.xc) and batch.context_mask is None and batch.target_mask is None
    assert CopyTask(16).context == 8


def test_all_ten_digits_are_equally_frequent() -> None:
    """Each within 4 standard errors of a tenth."""
    digits = CopyTask(64).sample(2000, generator()).yc[:, 1:]
    shares = torch.bincount(digits.flatten(), minlength=12)[2:] / digits.numel()
    assert ((shares - 0.1).abs() <= 4 * math.sqrt(0.1 * 0.9 / digits.numel())).all()


@pytest.mark.parametrize("power", range(2, 16))
def test_every_power_of_two_up_to_the_longest_samples(power: int) -> None:
    batch = CopyTask(2**power).sample(2, generator())
    assert batch.yc.shape == batch.yt.shape == (2, 2 ** (power - 1)) and LONGEST == 2**15


@pytest.mark.parametrize("n", [-4, 0, 1, 2, 3, 6, 100, 32_767, 65_536, 64.0, "64", None, True])
def test_other_lengths_are_refused(n: object) -> None:
    with pytest.raises(InputError, match=f"^n: expected a power of two from 4 to 32768, got {n}$"):
        CopyTask(n)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [-1, 0, 2.5])
def test_other_batch_sizes_are_refused(size: int) -> None:
    for call in (lambda: CopyTask(64).sample(size, generator()), lambda: list(CopyTask(64).test(size=size))):
        with pytest.raises(InputError, match=r"^size: expected an int >= 1, got "):
            call()


def test_the_test_set_is_3200_fixed_sequences_however_they_are_batched() -> None:
    task = CopyTask(64)
    by_64, by_16, again = (torch.cat([whole(b) for b in task.test(size)]) for size in (64, 16, 64))
    assert by_64.shape == (3200, 64) and torch.equal(by_64, again) and torch.equal(by_64, by_16)
    assert [len(b.xc) for b in task.test(size=1000)] == [1000, 1000, 1000, 200]
    assert sum(len(b.xc) for b in CopyTask(64, test_sequences=7).test()) == 7
    for few in (CopyTask(8, test_sequences=count) for count in (1, 64, 65, 130)):
        assert few.test_batches == len(list(few.test()))
    assert sum(len(b.xc) for b in task.validation()) == 320


def test_nothing_is_ever_trained_and_tested_on() -> None:
    """31 digits never coincide by accident: all sets and the streams of seeds 0 to 20 are disjoint."""
    task = CopyTask(64)
    test, validation = list(keys(task.test())), list(keys(task.validation(sequences=3200)))
    training = [key for seed in range(21) for key in keys([task.sample(4000, task.training(seed))])]
    assert (len(test), len(validation), len(training)) == (3200, 3200, 84_000)
    assert len({*test, *validation, *training}) == 3200 + 3200 + 84_000


def test_training_is_repeatable_and_depends_on_the_seed() -> None:
    task = CopyTask(64)
    one, two, other = (whole(task.sample(5, task.training(seed))) for seed in (3, 3, 4))
    assert torch.equal(one, two) and not torch.equal(one, other)


def test_every_purpose_of_every_task_has_a_seed_of_its_own() -> None:
    names = [f"copy-{2**k}" for k in range(2, 16)]
    purposes = ("train", "validation", "test", "init")
    seeds = {derive_seed(name, purpose, seed) for name in names for purpose in purposes for seed in range(100)}
    assert len(seeds) == 14 * 4 * 100 and all(0 <= seed < 2**63 for seed in seeds)


def test_accuracy_counts_every_position_in_per_cent() -> None:
    task, batch = CopyTask(16), CopyTask(16).sample(3, generator())
    logits = torch.nn.functional.one_hot(batch.yt, 12).float()
    assert (task.metric(Categorical(logits=logits), batch) == 100).all()
    wrong = logits.roll(1, dims=-1)
    wrong[0, 3] = logits[0, 3]
    score = task.metric(Categorical(logits=wrong), batch)
    assert score.shape == (3, 8) and float(score[0, 3]) == 100 and float(score.sum()) == 100


@pytest.mark.parametrize(("n", "expected"), [(128, 17.83), (256, 15.20)])
def test_guessing_the_most_frequent_digit_scores_what_the_protocol_implies(n: int, expected: float) -> None:
    """Per sequence its most frequent digit, and EOS at the end: the plateau of models that only count digits."""
    task = CopyTask(n)
    scores = []
    for batch in task.test(size=800):
        counts = torch.nn.functional.one_hot(batch.yc[:, 1:], 12).sum(1)
        guess = counts.argmax(-1, keepdim=True).expand_as(batch.yt).clone()
        guess[:, -1] = EOS
        scores.append(task.metric(Categorical(logits=torch.nn.functional.one_hot(guess, 12).float()), batch))
    assert float(torch.cat(scores).mean()) == pytest.approx(expected, abs=0.15)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_random_guess_scores_one_in_twelve(seed: int) -> None:
    """Within 4 standard errors."""
    task, model = CopyTask(64), RandomGuess(dim_y=12, head="categorical", inputs="sequence", seed=seed)
    scores = torch.cat([task.metric(model.predict(b.xc, b.yc, b.xt), b) for b in task.test()])
    error = 100 * math.sqrt(1 / 12 * 11 / 12 / scores.numel())
    assert scores.shape == (3200, 32) and abs(float(scores.mean()) - 100 / 12) <= 4 * error


def test_a_random_guess_has_the_loss_of_knowing_nothing() -> None:
    model = RandomGuess(dim_y=12, head="categorical", inputs="sequence")
    assert float(model.loss(next(CopyTask(64).test())).total) == pytest.approx(math.log(12), abs=1e-3)
    assert model.tokens(64) == 0


def test_a_random_guess_repeats_itself_only_with_its_seed() -> None:
    batch = CopyTask(64).sample(4, generator())
    one, two, other = (RandomGuess(dim_y=12, seed=seed).predict(batch.xc, batch.yc, batch.xt) for seed in (0, 0, 1))
    assert torch.equal(one.logits, two.logits) and not torch.equal(one.logits, other.logits)
