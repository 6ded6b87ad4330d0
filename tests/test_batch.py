"""`Batch` and `collate`, and what every module promises about ragged rows: padding has exactly no influence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from retreever import Batch, CrossAttention, InputError, TreeCrossAttention, collate
from retreever.batch import without_padding

DIM, HEADS = 16, 4
LENGTHS = (1, 2, 3, 5, 8, 11)
N = max(LENGTHS)
Attention = CrossAttention | TreeCrossAttention


def rand(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, the same for the same shape and seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def points(b: int, n: int, m: int, seed: int = 0) -> Batch:
    """A valid batch of n context points and m targets in the plane."""
    parts = rand(b, n, 2, seed=seed), rand(b, n, 3, seed=seed + 1), rand(b, m, 2, seed=seed + 2)
    return Batch(*parts, rand(b, m, 3, seed=seed + 3))


def symbols(b: int, n: int, m: int) -> Batch:
    """A valid batch of integers at positions."""
    return Batch(rand(b, n, 1), torch.arange(b * n).reshape(b, n), rand(b, m, 1), torch.arange(b * m).reshape(b, m))


def padding(kind: str) -> Tensor:
    """Masks of the lengths above: padding behind the real tokens, or anywhere."""
    mask = torch.arange(N) < torch.tensor(LENGTHS)[:, None]
    if kind == "tail":
        return mask
    generator = torch.Generator().manual_seed(3)
    return torch.stack([row[torch.randperm(N, generator=generator)] for row in mask])


def attention(kind: str, branch: int = 2) -> Attention:
    torch.manual_seed(0)
    if kind == "plain":
        return CrossAttention(DIM, HEADS)
    if kind == "budget":  # all of a converted attention, and more than one path, less than the longest row
        more = {"aggregator": "mean", "log_count": True, "order": "keys", "budget": 7}
    else:
        more = {"aggregator": "mean" if kind == "mean" else "transformer"}
    return TreeCrossAttention(DIM, HEADS, branch, **more, impl="reference")


def gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


def test_a_batch_is_a_value() -> None:
    """It cannot be changed, and `validate` hands it back unchanged."""
    batch = points(2, 5, 3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.xc = rand(2, 5, 2)  # type: ignore[misc]
    assert batch.validate() is batch
    assert symbols(2, 5, 3).validate().yc.dtype == torch.int64


def test_to_moves_every_tensor_and_leaves_none_alone() -> None:
    mask = torch.ones(2, 5, dtype=torch.bool)
    moved = dataclasses.replace(points(2, 5, 3), context_mask=mask).to("meta")
    parts = (moved.xc, moved.yc, moved.xt, moved.yt, moved.context_mask)
    assert all(part is not None and part.device.type == "meta" for part in parts)
    assert moved.target_mask is None


def test_validate_does_not_read_padding() -> None:
    """NaN is refused at a real point and ignored at a masked one."""
    batch, mask = points(2, 5, 3), torch.ones(2, 5, dtype=torch.bool)
    batch.xc[1, 4] = batch.yc[1, 4] = torch.nan
    with pytest.raises(InputError, match="xc: expected finite values, got 2 NaN or infinite of 20"):
        dataclasses.replace(batch, context_mask=mask).validate()
    mask[1, 4] = False
    dataclasses.replace(batch, context_mask=mask).validate()


@pytest.mark.parametrize("make", [points, symbols])
def test_collate_keeps_every_real_value_and_masks_the_rest(make: type[Batch]) -> None:
    """Rows of 5, 2 and 1 context points and 3, 7 and 1 targets: what is real is where it was, the rest is 0."""
    rows = [make(2, 5, 3), make(1, 2, 7), make(3, 1, 1)]
    batch = collate(rows).validate()
    assert batch.xc.shape[:2] == batch.yc.shape[:2] == (6, 5) and batch.xt.shape[:2] == batch.yt.shape[:2] == (6, 7)
    assert batch.context_mask is not None and batch.target_mask is not None
    assert batch.context_mask.sum(1).tolist() == [5, 5, 2, 1, 1, 1]
    assert batch.target_mask.sum(1).tolist() == [3, 3, 7, 1, 1, 1]
    start = 0
    for row in rows:
        size, n, m = len(row.xc), row.xc.shape[1], row.xt.shape[1]
        part = slice(start, start + size)
        assert torch.equal(batch.xc[part, :n], row.xc) and torch.equal(batch.yc[part, :n], row.yc)
        assert torch.equal(batch.xt[part, :m], row.xt) and torch.equal(batch.yt[part, :m], row.yt)
        assert not batch.xc[part, n:].any() and not batch.yt[part, m:].any()
        start += size
    assert batch.yc.dtype == rows[0].yc.dtype


def test_collate_needs_no_mask_for_rows_of_one_size() -> None:
    batch = collate([points(2, 5, 3), points(1, 5, 3, seed=9)])
    assert batch.context_mask is None and batch.target_mask is None and len(batch.xc) == 3


def test_collate_keeps_the_masks_of_its_rows() -> None:
    masked = dataclasses.replace(points(1, 5, 3), context_mask=torch.tensor([[True, False, True, True, False]]))
    batch = collate([masked, points(1, 6, 3)])
    assert batch.context_mask is not None and batch.target_mask is None
    assert batch.context_mask.int().tolist() == [[1, 0, 1, 1, 0, 0], [1] * 6]


def test_without_padding_zeroes_exactly_the_masked_entries() -> None:
    mask = torch.tensor([[True, False, True]])
    values, classes = torch.tensor([[[1.0, 2.0], [torch.nan, torch.inf], [3.0, 4.0]]]), torch.tensor([[5, 99, 7]])
    assert without_padding(values, mask).tolist() == [[[1, 2], [0, 0], [3, 4]]]
    assert without_padding(classes, mask).tolist() == [[5, 0, 7]]
    assert without_padding(values, None) is values


def test_large_values_are_finite_values() -> None:
    """Their squares still are finite numbers."""
    batch = points(2, 5, 3)
    assert dataclasses.replace(batch, yc=torch.full_like(batch.yc, 2e17)).validate().yc.isfinite().all()


@pytest.mark.parametrize("kind", ["plain", "tree", "mean", "budget"])
def test_a_batch_of_no_rows_gives_no_rows(kind: str) -> None:
    module = attention(kind)
    assert module(rand(0, 3, DIM), module.build(rand(0, N, DIM))).output.shape == (0, 3, DIM)


@pytest.mark.parametrize("where", ["tail", "anywhere"])
@pytest.mark.parametrize("branch", [2, 3, 4, 16])
@pytest.mark.parametrize("kind", ["plain", "tree", "mean", "budget"])
@torch.no_grad()
def test_a_ragged_batch_equals_its_rows_one_by_one(kind: str, branch: int, where: str) -> None:
    module, context, query, mask = attention(kind, branch).eval(), rand(6, N, DIM), rand(6, 7, DIM), padding(where)
    together = module(query, module.build(context, mask))
    for row in range(6):
        alone = module(query[row : row + 1], module.build(context[row : row + 1, mask[row]]))
        assert gap(together.output[row : row + 1], alone.output) <= 1e-6
        if kind != "plain":
            assert torch.equal(together.tokens_read[row], alone.tokens_read[0])
            assert torch.equal(together.nodes_scored[row], alone.nodes_scored[0])


@torch.no_grad()
def test_a_ragged_batch_samples_the_paths_of_its_rows() -> None:
    """A shorter row makes no decision on the levels it would not have alone; the others use the last noise."""
    module, context, query, mask = attention("tree"), rand(6, N, DIM), rand(6, 7, DIM), padding("tail")
    noise = torch.rand(6, 7, 3, generator=torch.Generator().manual_seed(0))
    together = module(query, module.build(context, mask), noise)
    for row in range(6):
        part = slice(row, row + 1)
        tree = module.build(context[part, mask[row]])
        alone = module(query[part], tree, noise[part, :, 3 - tree.plan.depth :])
        assert torch.equal(together.path[part], alone.path)
        assert gap(together.log_prob[part], alone.log_prob) <= 1e-6
        assert gap(together.entropy[part], alone.entropy) <= 1e-6
        assert torch.equal(together.tokens_read[part], alone.tokens_read)
        assert gap(together.output[part], alone.output) <= 1e-6


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30, -1e30])
@pytest.mark.parametrize("where", ["tail", "anywhere"])
@pytest.mark.parametrize("kind", ["plain", "tree", "mean", "budget"])
def test_values_of_masked_tokens_change_nothing_at_all(kind: str, where: str, value: float) -> None:
    """Outputs, gradients of the weights and of the real tokens differ by exactly 0.0; padding gets gradient 0."""
    module, query, mask, clean = attention(kind).train(), rand(6, 7, DIM), padding(where), rand(6, N, DIM)
    noise = {} if kind == "plain" else {"noise": torch.rand(6, 7, 3, generator=torch.Generator().manual_seed(0))}

    def run(context: Tensor) -> list[Tensor]:
        context = context.clone().requires_grad_()
        module.zero_grad()
        result = module(query, module.build(context, mask), **noise)
        objective = result.output.square().sum()
        if kind != "plain":
            objective = objective + result.log_prob.sum() + result.entropy.sum()
        objective.backward()
        assert context.grad is not None and not context.grad[~mask].any() and context.grad[mask].any()
        return [result.output.detach(), context.grad, *(p.grad.clone() for p in module.parameters())]

    dirty = clean.masked_fill(~mask[..., None], value)
    assert all(torch.equal(a, b) for a, b in zip(run(clean), run(dirty), strict=True))


@pytest.mark.parametrize("kind", ["tree", "mean", "budget"])
@torch.no_grad()
def test_no_padding_node_is_ever_selected(kind: str) -> None:
    """Every selected node covers a real token, and their number is what `tokens_read` reports."""
    module, mask = attention(kind).train(), padding("anywhere")
    tree = module.build(rand(6, N, DIM), mask)
    result = module(rand(6, 50, DIM), tree)
    assert tree.mask is not None
    real = tree.mask[torch.arange(6)[:, None, None], result.selected.clamp_min(0)]
    assert (real | (result.selected < 0)).all()
    assert torch.equal(result.tokens_read, (result.selected >= 0).sum(-1))
    assert (result.tokens_read <= torch.tensor(LENGTHS)[:, None]).all()
    if kind == "budget":  # rows no longer than the budget are read whole, longer ones in its limits
        assert torch.equal(result.tokens_read[:4], torch.tensor(LENGTHS[:4])[:, None].expand(4, 50))
        assert (result.tokens_read[4:] <= 7).all()


xc, yc, xt, yt, real = rand(2, 9, 1), rand(2, 9, 1), rand(2, 3, 1), rand(2, 3, 1), torch.ones(2, 9, dtype=torch.bool)


def batch(**parts: Tensor | None) -> Batch:
    """A good batch but for the parts given."""
    return Batch(**({"xc": xc, "yc": yc, "xt": xt, "yt": yt} | parts))


MISTAKES = [
    (lambda: batch(xc=xc[0]).validate(), "xc", "shape (b, n, dx)", "2 axes (9, 1)"),
    (lambda: batch(xc=xc.long()).validate(), "xc", "a floating point dtype", "torch.int64"),
    (lambda: batch(xc=xc[:, :0], yc=yc[:, :0]).validate(), "xc", "at least one point", "(2, 0, 1)"),
    (lambda: batch(yc=yc[:, :5]).validate(), "yc", "shape (b=2, n=9, dy)", "(2, 5, 1)"),
    (lambda: batch(yc=None).validate(), "yc", "shape (b=2, n=9, dy) or integers (b=2, n=9)", "NoneType"),
    (lambda: batch(yc=yc.double()).validate(), "yc", "the dtype of xc (torch.float32)", "torch.float64"),
    (lambda: batch(yc=yc.long()).validate(), "yc", "floats (b=2, n=9, dy) or integers", "torch.int64 (2, 9, 1)"),
    (lambda: batch(yc=yc[..., 0].long()[:1]).validate(), "yc", "shape (b=2, n=9)", "(1, 9)"),
    (lambda: batch(xt=xt[:1], yt=yt[:1]).validate(), "xt", "shape (b=2, m, dx=1)", "(1, 3, 1)"),
    (lambda: batch(xt=xt.repeat(1, 1, 2)).validate(), "xt", "shape (b=2, m, dx=1)", "(2, 3, 2)"),
    (lambda: batch(xt=xt.to("meta"), yt=yt.to("meta")).validate(), "xt", "the device of xc (cpu)", "meta"),
    (lambda: batch(yt=yt / 0).validate(), "yt", "finite values", "6 NaN or infinite of 6"),
    (lambda: batch(context_mask=real.int()).validate(), "context_mask", "dtype torch.bool", "torch.int32"),
    (lambda: batch(context_mask=~real).validate(), "context_mask", "at least one real token", "2 rows with none"),
    (lambda: batch(target_mask=real).validate(), "target_mask", "shape (b=2, m=3)", "(2, 9)"),
    (lambda: collate([]), "rows", "at least one batch", "none"),
    (lambda: collate([batch(), 1]), "rows[1]", "a Batch", "int"),
    (lambda: collate([batch(), batch(yc=yc[..., 0].long())]), "rows[1].yc", "torch.float32", "torch.int64"),
    (lambda: collate([batch(), batch(xc=xc.repeat(1, 1, 2))]), "rows[1].xc", "(1,)", "(2,)"),
    (lambda: collate([batch(), batch(xc=xc.double())]), "rows[1].xc", "torch.float32", "torch.float64"),
]


@pytest.mark.parametrize(("call", "argument", "expected", "got"), MISTAKES)
def test_a_batch_that_does_not_fit_together_is_refused(
    call: Callable[[], object], argument: str, expected: str, got: str
) -> None:
    """In one line that names the argument, what was expected and what came."""
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert message.startswith(f"{argument}: expected ") and "\n" not in message
    assert expected in message and got in message.rpartition(", got ")[2]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"yc": torch.zeros(1, 2, 1)},
            r"rows\[1\].yc: expected as many rows and points as x has \(1, 3\), got \(1, 2, 1\)",
        ),
        (
            {"yt": torch.zeros(1, 5, 1)},
            r"rows\[1\].yt: expected as many rows and points as x has \(1, 4\), got \(1, 5, 1\)",
        ),
        ({"context_mask": torch.ones(1, 2, dtype=torch.bool)}, r"rows\[1\].context_mask: expected as many rows"),
        ({"target_mask": torch.ones(1, 2, dtype=torch.bool)}, r"rows\[1\].target_mask: expected as many rows"),
        ({"xt": torch.zeros(2, 4, 1), "yt": torch.zeros(2, 4, 1)}, r"rows\[1\].xt: expected as many rows as xc has"),
    ],
)
def test_collate_makes_up_no_points(changes: dict[str, Tensor], named: str) -> None:
    """Values that are missing would become zeros that count as real."""
    good = Batch(torch.zeros(1, 3, 1), torch.zeros(1, 3, 1), torch.zeros(1, 4, 1), torch.zeros(1, 4, 1))
    with pytest.raises(InputError, match=f"^{named}"):
        collate([good, replace(good, **changes)])
