"""A tree is a value: moved, sliced, mapped, exported, and refused when its weights have changed."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from retreever import InputError, Tree, TreeCrossAttention


def module_of(**options: Any) -> TreeCrossAttention:
    torch.manual_seed(0)
    return TreeCrossAttention(16, 2, **options).eval()


def test_rows_are_sliced_and_counted() -> None:
    module, tokens, query = module_of(), torch.randn(3, 9, 16), torch.randn(3, 2, 16)
    tree = module.append(module.build(tokens), tokens[:, :2])  # with a tree beside
    whole = module(query, tree).output
    assert len(tree) == 3 and [len(row) for row in tree] == [1, 1, 1]
    for rows in (slice(1, 3), torch.tensor([2, 0]), torch.tensor([True, False, True])):
        assert torch.allclose(module(query[rows], tree[rows]).output, whole[rows], atol=1e-6)
    assert torch.allclose(module(query[2:], tree[-1]).output, whole[2:], atol=1e-6)
    with pytest.raises(IndexError, match="row: expected -3 to 2, got 3"):
        tree[3]


def test_trees_are_equal_by_identity() -> None:
    tree = module_of().build(torch.randn(2, 4, 16))
    assert tree == tree and tree != tree.detach() and len({tree, tree.detach()}) == 2


def test_a_tree_moves_and_detaches() -> None:
    module = module_of()
    tree = module.build(torch.randn(2, 5, 16, requires_grad=True), capacity=5)
    assert tree.keys.requires_grad and not tree.detach().keys.requires_grad
    double = tree.to(torch.float64)
    assert double.keys.dtype == torch.float64 and double.count is not None and double.count.dtype == torch.int32
    assert tree.to("meta").keys.is_meta and tree.clone().keys.data_ptr() != tree.keys.data_ptr()


def test_a_tree_is_a_pytree() -> None:
    """Its tensors are the leaves; the shape is the structure, which survives being written as JSON."""
    module, query = module_of(), torch.randn(2, 3, 16)
    tree = module.append(module.build(torch.randn(2, 9, 16)), torch.randn(2, 2, 16))
    leaves, spec = pytree.tree_flatten(tree)
    assert sum(isinstance(leaf, torch.Tensor) for leaf in leaves) == 4 + 6
    again = pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(spec)))
    assert isinstance(again, Tree) and torch.equal(module(query, again).output, module(query, tree).output)


def test_export_and_functional_transforms_take_a_tree() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = module_of(impl="reference")

        def forward(self, query: torch.Tensor, tree: Tree) -> torch.Tensor:
            return self.attention(query, tree, check=False).output

    reader, query = Reader(), torch.randn(2, 3, 16)
    tree = reader.attention.build(torch.randn(2, 9, 16)).detach()
    exported = torch.export.export(reader, (query, tree)).module()
    assert torch.allclose(exported(query, tree), reader(query, tree), atol=1e-6)

    def total(tree: Tree) -> torch.Tensor:
        return reader(query, tree).sum()

    floats = pytree.tree_map_only(torch.Tensor, lambda x: x if x.is_floating_point() else None, tree)
    assert isinstance(floats, Tree) and floats.mask is None
    gradient = torch.func.grad(lambda keys: total(_with_keys(tree, keys)))(tree.keys)
    assert gradient.abs().sum() > 0


def _with_keys(tree: Tree, keys: torch.Tensor) -> Tree:
    from dataclasses import replace

    return replace(tree, keys=keys)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_a_stale_tree_is_refused(fused: bool, training: bool) -> None:
    """After an optimiser step, also of a fused one, and after weights are loaded; not if no maker of trees changed."""
    module = module_of().train(training)
    tokens, query = torch.randn(2, 5, 16), torch.randn(2, 3, 16)
    tree = module.build(tokens)
    module(query, tree).output.sum().backward()
    torch.optim.Adam(module.parameters(), fused=fused).step()
    with pytest.raises(InputError, match="tree: expected one built with the present weights, got one from before"):
        module(query, tree)
    tree = module.build(tokens)
    module.load_state_dict(module.state_dict())
    with pytest.raises(InputError, match="present weights"):
        module.append(tree, tokens)
    tree = module.build(tokens)
    torch.optim.SGD(module.block.to_q.parameters(), lr=0.1).step()
    assert module(query, tree).output.isfinite().all()


def test_weights_made_in_inference_mode_have_no_count_of_writes() -> None:
    with torch.inference_mode():
        module = module_of()
        assert module(torch.randn(1, 2, 16), module.build(torch.randn(1, 5, 16))).output.isfinite().all()


def test_copies_keep_the_fingerprint_of_their_weights() -> None:
    module, query = module_of(), torch.randn(2, 3, 16)
    tree = module.build(torch.randn(2, 5, 16)).detach()
    twin = copy.deepcopy(module)
    for copied in (tree, copy.deepcopy(tree), pickle.loads(pickle.dumps(tree))):
        assert torch.equal(twin(query, copied).output, module(query, tree).output)
    with torch.no_grad():
        twin.block.to_kv.weight.add_(1)
    with pytest.raises(InputError, match="made by others"):
        twin(query, copy.deepcopy(tree))
