"""A tree over several processes equals the tree of one: paths, outputs, gradients; and what it sends does not grow."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh

from retreever import TreeCrossAttention
from retreever.sharded.plan import ShardPlan
from retreever.tree.build import level_masks, plan_for
from retreever.tree.order import leaf_layout
from retreever.tree.plan import TreePlan

SCRIPT = Path(__file__).with_name("processes.py")


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sharded_processes", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


GROUPS = {group: (world, list(checks)) for group, (world, checks) in script().GROUPS.items()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What failed, by process and check: one run of all groups, which imports torch once."""
    folder = tmp_path_factory.mktemp("processes")
    quiet = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::UserWarning"}
    done = subprocess.run([sys.executable, SCRIPT, folder], capture_output=True, text=True, timeout=250, env=quiet)
    assert done.returncode == 0, done.stderr[-2000:]
    return {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}


@pytest.mark.parametrize(
    ("group", "check"), [(group, check) for group, (_, checks) in GROUPS.items() for check in checks]
)
def test_several_processes_equal_one(found: dict[str, dict[str, str]], group: str, check: str) -> None:
    ranks = [rank for rank in range(GROUPS[group][0]) if (group, rank) != ("killed", 2)]
    for rank in ranks:
        assert found[f"{group}-{rank}"].get(check, "not reached") == "", f"process {rank}"


plans = st.builds(plan_for, st.integers(1, 90), st.integers(2, 5), st.just(True))


@given(plan=plans, world=st.integers(1, 9), data=st.data())
def test_subtrees_and_their_tokens_follow_from_the_lengths(plan: TreePlan, world: int, data: st.DataObject) -> None:
    """Slots, real nodes and rows inside subtrees are those of the tree built on one process."""
    shards = ShardPlan.over(plan, world)
    length = data.draw(st.integers(1, plan.n))
    layout = leaf_layout(plan, torch.tensor([length]))
    slots = layout.real[0].nonzero()[:, 0]
    assert torch.equal(shards.slots_of(torch.arange(length), torch.tensor(length)), slots)
    real = torch.cat(level_masks(plan, layout.real)[::-1], dim=1)[0]
    rows = torch.arange(plan.nodes)
    assert torch.equal(shards.real_rows(rows, torch.tensor(length)), real)
    assert sorted({holder for (holder,) in shards.holders}) == [s for s in range(world) if shards.held_by(s)]
    below = rows[shards.crown :]
    subtree, local = shards.split_rows(below)
    places = subtree * shards.subtree.nodes + local
    assert torch.equal(places.sort().values, torch.arange(shards.count * shards.subtree.nodes))
    leaves = slice(plan.leaf_offset - shards.crown, None)
    assert torch.equal(subtree[leaves], torch.arange(plan.leaves) // shards.subtree.leaves)


@pytest.mark.gpu
@pytest.mark.parametrize("aggregator", ["transformer", "mean"])
def test_a_group_on_a_gpu_equals_a_plain_tree(aggregator: Any) -> None:
    """With nccl; one process, since most machines that run this have one GPU."""
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        torch.manual_seed(0)
        module = TreeCrossAttention(64, 4, aggregator=aggregator).cuda().eval()
        context, query = torch.randn(2, 5000, 64, device="cuda"), torch.randn(2, 50, 64, device="cuda")
        mask = torch.arange(5000, device="cuda") < torch.tensor([[5000], [700]], device="cuda")
        tree, whole = module.build_sharded(context, mesh, mask), module.build(context, mask)
        for budget in (None, 60):
            found, wanted = module(query, tree, budget=budget), module(query, whole, budget=budget)
            assert (found.path == wanted.path).float().mean() >= 0.99
            same = found.path == wanted.path
            assert (found.output - wanted.output)[same].abs().max() <= 1e-3
            found.output.sum().backward()
    finally:
        dist.destroy_process_group()


def test_queries_ask_their_own_copy_or_take_turns() -> None:
    shards = ShardPlan.over(TreePlan(64), 4).with_copies([2], [0])
    subtree, query = torch.tensor([2, 2, 2, 1]), torch.arange(4)
    assert shards.held_by(0) == [0, 2]
    assert shards.holder_for(0, subtree, query).tolist() == [0, 0, 0, 1]
    assert shards.holder_for(3, subtree, query).tolist() == [0, 2, 0, 1]
