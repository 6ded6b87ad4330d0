"""Trees on disk: what is loaded is what was saved, whole or refused by name, and mapped trees are read page by page."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from retreever import CheckpointError, InputError, Tree, TreeCrossAttention

PARTS = ("nodes", "mask", "keys", "values", "log_count", "counted", "order", "count", "length")


def module_of(**options: Any) -> TreeCrossAttention:
    torch.manual_seed(0)
    return TreeCrossAttention(16, 2, **options).eval()


def trees() -> dict[str, tuple[TreeCrossAttention, Tree]]:
    tokens, plain, means = (
        torch.randn(2, 9, 16),
        module_of(),
        module_of(aggregator="mean", log_count=True, order="keys"),
    )
    mask = torch.arange(9) < torch.tensor([[9], [4]])
    with torch.no_grad():
        return {
            "fixed": (plain, plain.build(tokens)),
            "ragged": (plain, plain.build(tokens, mask)),
            "growing": (plain, plain.build(tokens, mask, capacity=30)),
            "means": (means, means.build(tokens)),
            "beside": (plain, plain.append(plain.build(tokens), tokens[:, :2])),
            "bfloat16": (plain, plain.build(tokens).to(torch.bfloat16)),
        }


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("kind", ["fixed", "ragged", "growing", "means", "beside", "bfloat16"])
def test_what_is_loaded_is_what_was_saved(kind: str, mmap: bool, tmp_path: Path) -> None:
    module, tree = trees()[kind]
    loaded = Tree.load(tree.save(tmp_path / "folder" / "tree.safetensors"), mmap=mmap)
    assert loaded.plan == tree.plan and loaded.longest == tree.longest and loaded.mapped == mmap
    for ours, theirs in ((loaded, tree), (loaded.beside, tree.beside)):
        for name in PARTS if theirs is not None else ():
            left, right = getattr(ours, name), getattr(theirs, name)
            assert (left is None) == (right is None) and (left is None or torch.equal(left, right)), name
    if kind != "bfloat16":
        query = torch.randn(2, 3, 16)
        with torch.no_grad():
            assert torch.equal(module(query, loaded).output, module(query, tree).output)
    with safe_open(tmp_path / "folder" / "tree.safetensors", "pt") as file:  # an ordinary safetensors file
        assert torch.equal(file.get_tensor("pairs").unbind(dim=2)[0], tree.keys)


def test_a_mapped_tree_is_not_written_to(tmp_path: Path) -> None:
    module, tree = trees()["growing"]
    file = tree.save(tmp_path / "tree")
    before, token = file.read_bytes(), torch.randn(2, 1, 16)
    loaded = Tree.load(file, mmap=True)
    with torch.no_grad():
        for still in (loaded, loaded.detach(), loaded.to(torch.device("cpu")), loaded[:2]):
            with pytest.raises(InputError, match="in_place: expected False, since the tree is mapped"):
                module.append(still, token, in_place=True)
        grown = module.append(loaded, token)
        assert torch.equal(grown.keys, module.append(tree, token).keys) and not grown.mapped
        assert module.append(grown, token, in_place=True).longest == tree.longest + 2
    assert file.read_bytes() == before


def test_an_archive_on_disk_has_a_live_tail(tmp_path: Path) -> None:
    """A mapped tree of fixed tokens stays in its file; new tokens grow beside it, in place."""
    module, tree = trees()["fixed"]
    tokens, query = torch.randn(2, 5, 16), torch.randn(2, 3, 16)
    loaded = Tree.load(tree.save(tmp_path / "tree"), mmap=True)
    with torch.no_grad():
        for step in range(5):
            loaded = module.append(loaded, tokens[:, step : step + 1], in_place=True)
        expected = module.append(tree, tokens)
        assert loaded.mapped and torch.allclose(module(query, loaded).output, module(query, expected).output, atol=1e-6)


def test_every_flipped_byte_and_every_cut_is_refused(tmp_path: Path) -> None:
    """All bytes of the header's text and of the seal, and some of everything else, by several bits each."""
    _, tree = trees()["growing"]
    file = tree[:1].save(tmp_path / "tree")
    good = file.read_bytes()
    text = len(good[: good.index(b"}}") + 2])
    rng = random.Random(0)
    places = {*range(0, text, 3), *range(len(good) - 64, len(good), 5), *(rng.randrange(len(good)) for _ in range(200))}
    for place in places:
        bad = bytearray(good)
        bad[place] ^= 1 << rng.randrange(8)
        file.write_bytes(bad)
        with pytest.raises(CheckpointError, match="tree"):
            Tree.load(file)
        with pytest.raises(CheckpointError, match="tree"):
            Tree.load(file, mmap=True)
    for size in (0, 3, 8, text, len(good) // 2, len(good) - 1):
        file.write_bytes(good[:size])
        for verify in (True, False):
            with pytest.raises(CheckpointError, match="tree"):
                Tree.load(file, mmap=True, verify=verify)
    file.write_bytes(good + b"0")
    with pytest.raises(CheckpointError, match="bytes"):
        Tree.load(file, verify=False)


def edited(good: bytes, old: bytes, new: bytes) -> bytes:
    """A file with another word in its header, whose seal is right again."""
    from hashlib import sha256

    size = 8 + int.from_bytes(good[:8], "little")
    header = good[:size].replace(old, new)
    assert header != good[:size] and len(header) == size
    return header + good[size:-64] + sha256(header).digest() + good[-32:]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"version": "1"', b'"version": "2"', "expected version 1, got '2'"),
        (b'"retreever.tree"', b'"retreever.wood"', "expected format retreever.tree, got 'retreever.wood'"),
        (b'"dtype": "F32"', b'"dtype": "F64"', "expected bytes"),
        (b'\\"branch\\": 2', b'\\"branch\\": 3', "expected the tensors of a tree"),
    ],
)
def test_other_versions_and_shapes_are_refused_by_name(old: bytes, new: bytes, message: str, tmp_path: Path) -> None:
    file = trees()["fixed"][1].save(tmp_path / "tree")
    file.write_bytes(edited(file.read_bytes(), old, new))
    with pytest.raises(CheckpointError, match=message):
        Tree.load(file)


def test_a_tree_of_other_weights_is_refused(tmp_path: Path) -> None:
    module, tree = trees()["fixed"]
    query, file = torch.randn(2, 3, 16), tree.save(tmp_path / "tree")
    torch.manual_seed(5)
    other = TreeCrossAttention(16, 2).eval()
    with torch.no_grad():
        with pytest.raises(InputError, match=r"tree: expected one made by these weights \(\w{12}\), got one made by"):
            other(query, Tree.load(file))
        other.load_state_dict(module.state_dict())
        other.block.to_q.weight.mul_(2)  # makes no tree
        assert other(query, Tree.load(file)).output.isfinite().all()
        other.block.to_kv.weight.mul_(2)
        with pytest.raises(InputError, match="made by others"):
            other(query, Tree.load(file))


def test_a_stale_tree_is_not_saved(tmp_path: Path) -> None:
    module, tree = trees()["fixed"]
    with torch.no_grad():
        module.block.to_kv.weight.mul_(2)
    with pytest.raises(InputError, match="tree: expected one whose weights are as they were"):
        tree.save(tmp_path / "tree")
    assert not list(tmp_path.iterdir())


def test_a_kill_while_saving_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "tree"
    code = f"""
import torch
from retreever import TreeCrossAttention
module = TreeCrossAttention(16, 2, aggregator="mean").eval()
tree = module.build(torch.zeros(1, 20_000, 16))
print("ready", flush=True)
number = 0.0
while True:
    number += 1
    tree.values.fill_(number)
    tree.save({str(file)!r})
"""
    for attempt in range(2):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None and child.stdout.readline() == b"ready\n"
            while not file.exists():
                assert child.poll() is None
                time.sleep(0.01)
            time.sleep(0.02 + 0.013 * attempt)
            child.send_signal(signal.SIGKILL)
        values = Tree.load(file).values
        assert values.min() == values.max() >= 1


LIMITED = """
import json, os, resource, sys, torch
from retreever import Tree, TreeCrossAttention
torch.set_num_threads(1)
torch.manual_seed(0)
module = TreeCrossAttention(64, 4, aggregator="mean").eval()
small = module.build(torch.randn(1, 600, 64))
query = torch.randn(1, 8, 64)
with torch.inference_mode():
    module(query, small)  # kernels are loaded and compiled before memory is limited
    used = [int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")][0] * 1024
    allowed = int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_DATA, (used + allowed, used + allowed))
    try:
        Tree.load(sys.argv[1], verify=False)
        read = "read"
    except (MemoryError, RuntimeError):
        read = "refused"
    os.posix_fadvise(os.open(sys.argv[1], os.O_RDONLY), 0, 0, os.POSIX_FADV_DONTNEED)  # nothing of it is in memory
    tree = Tree.load(sys.argv[1], mmap=True, verify=False)
    found = module(query, tree)
lines = open("/proc/self/smaps").read().splitlines()
start = next(i for i, line in enumerate(lines) if line.endswith(sys.argv[1]))
resident = next(int(line.split()[1]) for line in lines[start:] if line.startswith("Rss:")) * 1024
print(json.dumps([read, resident, found.path[0].tolist(), found.output.double().sum().item()]))
"""


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="counts pages as Linux does")
def test_a_tree_larger_than_memory_is_searched_from_disk(tmp_path: Path) -> None:
    """Of 128 MiB, with 16 MiB allowed, a search reads only the pages on its way: counted as those that are mapped."""
    torch.manual_seed(0)
    module = TreeCrossAttention(64, 4, aggregator="mean").eval()
    torch.randn(1, 600, 64)
    query = torch.randn(1, 8, 64)
    with torch.inference_mode():
        tree = module.build(torch.randn(1, 1 << 17, 64))
        file = tree.save(tmp_path / "tree")
        expected = module(query, tree)
    size, allowed = file.stat().st_size, 16 << 20
    assert size > 4 * allowed
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LIMITED, str(file), str(allowed)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    read, resident, path, output = json.loads(done.stdout)
    assert read == "refused"  # the limit holds
    assert path == expected.path[0].tolist() and output == pytest.approx(expected.output.double().sum().item())
    assert 0 < resident < size / 50, resident  # a page or two for every query and level


def test_a_tree_without_a_stamp_is_saved_and_not_checked(tmp_path: Path) -> None:
    _, tree = trees()["fixed"]
    loaded = Tree.load(replace(tree, stamp=None).save(tmp_path / "tree"))
    assert loaded.stamp is None
    assert torch.equal(
        TreeCrossAttention(16, 2)(torch.randn(2, 1, 16), loaded).output.isfinite(), torch.ones(2, 1, 16) > 0
    )
