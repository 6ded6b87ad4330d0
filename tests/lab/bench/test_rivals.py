"""Every rival computes what it says, counts what it reads, and the command runs from options to files."""

from __future__ import annotations

import json
import sys
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retreever import TreeCrossAttention, TreePlan, load_pretrained
from retreever.cli import main
from retreever.errors import BackendError, CheckpointError, InputError
from retreever.lab.bench.options_models import RivalsBench
from retreever.lab.bench.rivals import models
from retreever.lab.bench.rivals.attention import ALL, CLUSTERS, RANDOM, TOP, TREE_KD, TREE_KEYS
from retreever.lab.bench.rivals.attention import BLOCKS as BEST_BLOCKS
from retreever.lab.bench.rivals.clusters import Clusters
from retreever.lab.bench.rivals.fields import FieldNet, draw_fields, evaluation_field, trained_net
from retreever.lab.bench.rivals.readers import AllTokens, Blocks, RandomTokens, Reader, TopK, TreeOfMeans
from retreever.tasks.gp import GPTask
from retreever.tasks.seeds import stream
from retreever.train.score import evaluate

CPU = torch.device("cpu")
N, M, H, E = 37, 5, 2, 4
TINY: dict[str, Any] = {"device": "cpu", "samples": 3, "seconds": 0.01, "fields": 1, "queries": 6, "batches": 1}
TORCH_READERS = {
    "all": AllTokens, "top-k": TopK, "random": RandomTokens, "blocks": partial(Blocks, "given", 8),
    "blocks, k-d": partial(Blocks, "kd", 8), "clusters": Clusters, "tree, k-d": partial(TreeOfMeans, "kd"),
    "tree, keys": partial(TreeOfMeans, "keys"),
}  # fmt: skip


@pytest.fixture
def heads() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and coordinates."""
    g = torch.Generator().manual_seed(3)
    q, keys, values = (torch.randn(size, H, E, generator=g) for size in (M, N, N))
    return q, keys, values, torch.rand(N, 2, generator=g)


def direct(q: Tensor, keys: Tensor, values: Tensor, chosen: Tensor | None = None) -> Tensor:
    """Attention in float64 to the tokens `chosen` (h, m, n) by each head for each query."""
    scores = torch.einsum("mhe,nhe->hmn", q.double(), keys.double()) / q.shape[-1] ** 0.5
    if chosen is not None:
        scores = scores.masked_fill(~chosen, -torch.inf)
    return torch.einsum("hmn,nhe->mhe", scores.softmax(dim=-1), values.double())


def agrees(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", TORCH_READERS.values(), ids=TORCH_READERS)
def test_a_budget_of_all_tokens_is_full_attention(make: Any, heads: tuple[Tensor, ...]) -> None:
    q, keys, values, x = heads
    reader: Reader = make()
    reader.prepare(keys, values, x, 2 * N)
    reading = reader.read(q, 2 * N)
    agrees(reading.output, direct(q, keys, values))
    assert reading.counts().read == N


def test_top_k_reads_the_largest_scores(heads: tuple[Tensor, ...]) -> None:
    q, keys, values, _ = heads
    scores = torch.einsum("mhe,nhe->hmn", q, keys)
    chosen = scores >= scores.sort(dim=-1, descending=True).values[..., 6:7]
    reader = TopK()
    reader.prepare(keys, values, None, 7)
    reading = reader.read(q, 7)
    agrees(reading.output, direct(q, keys, values, chosen))
    assert reading.counts() == (7, N)


def test_blocks_are_those_of_the_best_mean_keys(heads: tuple[Tensor, ...]) -> None:
    """37 tokens are five blocks of 8, of which the last has 5 tokens."""
    q, keys, values, _ = heads
    block = torch.arange(N) // 8
    means = torch.stack([keys[block == b].mean(dim=0) for b in range(5)])
    scores = torch.einsum("mhe,nhe->hmn", q, means)
    best = scores.topk(2, dim=-1).indices
    chosen = (block == best[..., None]).any(dim=2)
    reader = Blocks("given", 8)
    reader.prepare(keys, values, None, 20)
    reading = reader.read(q, 20)
    agrees(reading.output, direct(q, keys, values, chosen))
    read = float(chosen.sum(dim=-1).double().mean())
    assert reading.counts() == (read, read + 5) and reader.least == 8


def test_clusters_stand_for_their_tokens(heads: tuple[Tensor, ...]) -> None:
    """One opened cluster is read token by token, the others as their mean, once for every token of theirs."""
    q, keys, values, _ = heads
    reader = Clusters()
    reader.prepare(keys, values, None, 15)  # 13 means, of which one is opened: it has 37 / 13 tokens
    assert reader.opened == 1 and reader.sizes.shape == (H, 13)
    reading = reader.read(q, 15)
    read = []
    for head in range(H):
        token_of = reader.members[head].tolist()
        groups = [token_of[s : s + k] for s, k in zip(reader.starts[head], reader.sizes[head], strict=True)]
        assert sorted(chain.from_iterable(groups)) == list(range(N))
        for query in range(M):
            weight = [
                len(g) * float(torch.exp(keys[g, head].mean(dim=0).double() @ q[query, head].double() / E**0.5))
                for g in groups
                if g
            ]
            best = [g for g in groups if g][weight.index(max(weight))]
            spread_keys, spread_values = keys.clone(), values.clone()
            for g in groups:
                if g and g != best:
                    spread_keys[g, head] = keys[g, head].mean(dim=0)
                    spread_values[g, head] = values[g, head].mean(dim=0)
            one = slice(head, head + 1)
            expected = direct(q[query : query + 1, one], spread_keys[:, one], spread_values[:, one])
            agrees(reading.output[query, head], expected[0, 0])
            read.append(len(best) + sum(bool(g) for g in groups) - 1)
    assert reading.counts().read == pytest.approx(sum(read) / len(read))
    assert reading.counts().scored == pytest.approx(reading.counts().read + 1, abs=H)


def test_a_small_budget_opens_no_cluster(heads: tuple[Tensor, ...]) -> None:
    q, keys, values, _ = heads
    reader = Clusters()
    reader.prepare(keys, values, None, 6)
    counts = reader.read(q, 6).counts()
    assert reader.opened == 0 and counts.read <= 6 and counts.scored == 6


def test_random_tokens_are_as_many_as_asked_for(heads: tuple[Tensor, ...]) -> None:
    q, keys, _, _ = heads
    places = torch.eye(N)[:, None].expand(N, H, N)  # values that name their tokens
    reader = RandomTokens()
    reader.prepare(keys, places, None, 5)
    reading = reader.read(q, 5)
    assert reading.counts() == (5, 5) and bool(((reading.output > 0).sum(dim=-1) == 5).all())
    assert len({tuple(row.nonzero().flatten().tolist()) for row in reading.output[:, 0]}) == M  # each query its own
    assert torch.equal(reading.output, reader.read(q, 5).output)


def with_ancestors(plan: TreePlan, rows: list[int]) -> set[int]:
    """The rows and those of all nodes above them but the root."""
    found = set(rows)
    for row in rows:
        level = max(level for level in range(1, plan.depth + 2) if plan.offsets[level] <= row)
        place = row - plan.offsets[level]
        while level > 1:
            place //= plan.block if level == plan.depth + 1 else plan.branch
            level -= 1
            found.add(plan.offsets[level] + place)
    return found


@pytest.mark.parametrize("budget", [6, 7, 12, 20])
def test_the_tree_is_the_one_of_from_multihead(budget: int) -> None:
    """The same output and counts as the module a user would convert; one path at 37 tokens has 5 siblings, 2 leaves."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(H * E, H, batch_first=True).eval()
    module = TreeCrossAttention.from_multihead(attention, budget=None if budget < 8 else budget)
    context, query = torch.randn(1, N, H * E), torch.randn(1, M, H * E)
    with torch.inference_mode():
        keys, values = module.block.key_values(context)
        reader = TreeOfMeans("keys")
        reader.prepare(keys[0], values[0], None, budget)
        reading = reader.read(module.block.start(query)[1][0], budget)
        found = module(query, module.build(context))
        output = attention.out_proj(reading.output.flatten(1))
    torch.testing.assert_close(output, found.output[0], rtol=1e-5, atol=1e-5)
    assert reading.counts().read == float(found.tokens_read.double().mean()) <= max(7, budget)
    met = [len(with_ancestors(found.plan, [row for row in rows if row >= 0])) for rows in found.selected[0].tolist()]
    assert reading.counts().scored == pytest.approx(sum(met) / M)


class TestFaiss:
    """Indexes of FAISS, where it is installed."""

    @pytest.fixture(autouse=True)
    def indexes(self) -> Any:
        pytest.importorskip("faiss")
        from retreever.lab.bench.rivals import indexes

        self.kinds = indexes
        return indexes

    def test_flat_is_exact_top_k(self, heads: tuple[Tensor, ...]) -> None:
        q, keys, values, _ = heads
        flat, top = self.kinds.Flat(), TopK()
        for reader in (flat, top):
            reader.prepare(keys, values, None, 7)
        agrees(flat.read(q, 7).output, top.read(q, 7).output.double())
        assert flat.read(q, 7).counts() == (7, N)

    @pytest.mark.parametrize("name", ["Flat", "IVF", "HNSW"])
    def test_everything_found_is_full_attention(self, name: str, heads: tuple[Tensor, ...]) -> None:
        """37 tokens lie in six lists, of which eight would be searched."""
        q, keys, values, _ = heads
        reader = getattr(self.kinds, name)()
        reader.prepare(keys, values, None, N)
        reading = reader.read(q, N)
        agrees(reading.output, direct(q, keys, values))
        assert reading.counts().read == N and reading.counts().scored >= N

    def test_approximate_searches_score_fewer(self) -> None:
        g = torch.Generator().manual_seed(0)
        q, keys, values = (torch.randn(size, 1, 8, generator=g) for size in (20, 2000, 2000))
        for reader in (self.kinds.IVF(), self.kinds.HNSW()):
            reader.prepare(keys, values, None, 5)
            counts = reader.read(q, 5).counts()
            assert counts.read == 5 and 5 < counts.scored < 2000


def test_without_faiss_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from retreever.lab.bench.rivals.attention import make_readers

    monkeypatch.setitem(sys.modules, "faiss", None)
    left_out: dict[str, str] = {}
    names = make_readers(CPU, left_out)
    assert not [name for name in names if "FAISS" in name] and "retreever[rivals]" in left_out["FAISS"]
    with pytest.raises(BackendError, match=r"^faiss: expected faiss-cpu"):
        from retreever.lab.bench.rivals.indexes import Flat

        Flat()


def test_fields_are_waves_with_noise_on_the_context_alone() -> None:
    drawn = draw_fields(3, 4000, 4000, stream("fields-test", "test", 0), CPU)
    assert drawn.xc.shape == (3, 4000, 2) and float(drawn.xc.abs().max()) <= 1
    power = drawn.yc.var(dim=1) - drawn.yt.var(dim=1)  # noise adds 0.01, sampling a little
    assert float(drawn.yt.var()) == pytest.approx(1, abs=0.6) and float(power.abs().max()) < 0.15
    again, other = (evaluation_field(number, 50, 5, CPU) for number in (0, 1))
    assert torch.equal(again.yc, evaluation_field(0, 50, 5, CPU).yc) and not torch.equal(again.yc, other.yc)


def test_parts_of_the_network_are_its_forward() -> None:
    torch.manual_seed(1)
    net, drawn = FieldNet().eval(), evaluation_field(0, 50, 5, CPU)
    with torch.inference_mode():
        q, keys, values = net.projected(drawn)
        expected = net(*drawn[:3])[0]
        agrees(net.finish(direct(q, keys, values).float()), expected.double())


def test_training_is_saved_and_taken_up_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "net.safetensors"
    net, about = trained_net(file, (16, 24), (3, 2), True, CPU)
    assert about["points"] == [16, 24] and "step 5 of 5" in capsys.readouterr().err
    same, known = trained_net(file, (16, 24), (3, 2), True, CPU)
    assert known == about and torch.equal(same.head[0].weight, net.head[0].weight) and not capsys.readouterr().err
    assert trained_net(file, (1,), (1,), False, CPU)[1] == about
    with pytest.raises(InputError, match=r"^weights: expected a file of points \(1,\)"):
        trained_net(file, (1,), (1,), True, CPU)
    file.write_bytes(b"nothing of the kind")
    with pytest.raises(CheckpointError, match="expected weights of the fields"):
        trained_net(file, (1,), (1,), False, CPU)


def test_a_model_read_by_its_own_tree_scores_as_ever() -> None:
    """One path, a budget and all leaves are those of `set_reading`."""
    model: Any = load_pretrained("gp")
    task = GPTask(test_batches=2)
    batches = list(islice(task.test(), 2))
    rows = {(row["method"], row["budget"]): row for row in models.score_rows(model, task, batches, 7, CPU)}
    assert set(models.budgets(7)) == {7, 10, 14, 28}
    for budget, retrieval in ((7, "policy"), (14, "policy"), (0, "full")):
        method = models.ALL if retrieval == "full" else models.TREE
        model.set_reading(retrieval, budget if budget == 14 else None)
        assert rows[method, budget]["score"] == pytest.approx(evaluate(model, task, batches), rel=1e-4)
    for budget in (7, 14):
        assert rows[models.TOP, budget]["read"] == pytest.approx(rows[models.TREE, budget]["read"], abs=0.5)
    size = sum(batch.xc.shape[1] for batch in batches) / 2
    assert rows[models.ALL, 0]["read"] == rows[models.TOP, 7]["scored"] == pytest.approx(size)


def test_the_command_writes_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--n", "128", "--budgets", "10", "70", "--points", "16", "--steps", "3", "--models", "gp", "emnist"]
    common = ["--device", "cpu", "--samples", "3", "--seconds", "0.01", "--fields", "1", "--queries", "6"]
    where = ["--batches", "1", "--out", str(tmp_path), "--data", str(tmp_path / "none")]
    assert main(["bench", "rivals", *options, *common, *where]) == 0
    assert "emnist: left out" in capsys.readouterr().err
    names = {f"rivals-cpu.{ending}" for ending in ("json", "md", "png", "safetensors")}
    assert {file.name for file in tmp_path.iterdir()} == names
    result = json.loads((tmp_path / "rivals-cpu.json").read_text())
    rows = result["rows"]
    fields = {(row["method"], row["budget"]): row for row in rows if row["part"] == "fields"}
    assert {ALL, TOP, TREE_KD, TREE_KEYS, CLUSTERS, RANDOM} <= {name for name, _ in fields}
    assert {budget for name, budget in fields if name == TOP} == {8, 10, 70}  # 8 is one path
    assert {budget for name, budget in fields if name == BEST_BLOCKS} == {70}
    assert fields[ALL, 8]["rmse_ratio"] == 1 and fields[ALL, 8]["error, peaked"] == 0 and fields[ALL, 8]["read"] == 128
    assert all(row["us"] > 0 for row in rows if row["part"] != "models")
    assert {row["weights"] for row in rows if row["part"] == "models"} == {"gp"}
    assert result["summary"]["training"]["steps"] == [3] and "emnist" in result["summary"]["left_out"]
    assert main(["bench", "rivals", *options, *common, *where]) == 2  # nothing is replaced without being asked
    assert main(["bench", "rivals", "--quick", "--overwrite", *common, *where]) == 2  # of another training
    assert "weights: expected a file of points (256,)" in capsys.readouterr().err


def test_options_are_checked_first(tmp_path: Path) -> None:
    for wrong, name in [({"steps": (3,)}, "steps"), ({"fields": 0}, "fields"), ({"budgets": ()}, "budgets"),
                        ({"points": (0,), "steps": (1,)}, "points")]:  # fmt: skip
        with pytest.raises(InputError, match=rf"^{name}: expected"):
            RivalsBench(out=tmp_path, **TINY | wrong).run()
    assert list(tmp_path.iterdir()) == []
