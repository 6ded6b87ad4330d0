"""`CrossAttention` and `TreeCrossAttention`: what they compute and what they promise."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retreever import CrossAttention, InputError, Tree, TreeCrossAttention, TreePlan

DIM, HEADS = 16, 4
LENGTHS = (1, 2, 3, 5, 8, 11)


def rand(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, the same for the same shape and seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uniforms(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def tca(seed: int = 0, training: bool = False, impl: str = "reference", **settings: object) -> TreeCrossAttention:
    """The module on plain torch: what other backends compute is measured against that elsewhere."""
    torch.manual_seed(seed)
    return TreeCrossAttention(DIM, HEADS, impl=impl, **settings).train(training)


def attention(kind: str) -> CrossAttention | TreeCrossAttention:
    torch.manual_seed(0)
    return CrossAttention(DIM, HEADS).eval() if kind == "plain" else tca()


def tail_mask(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    """Real tokens first, padding behind."""
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def holed_mask(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    """As many real tokens per row, at random places."""
    mask = tail_mask(lengths)
    return torch.stack([row[torch.randperm(len(row), generator=torch.Generator().manual_seed(3))] for row in mask])


def close(a: Tensor, b: Tensor, tolerance: float = 1e-6) -> bool:
    return a.shape == b.shape and float((a - b).detach().abs().max()) <= tolerance


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("n", "branch"), [(1, 2), (2, 2), (3, 2), (9, 2), (16, 2), (11, 3), (20, 4), (7, 8)])
def test_the_result_has_one_structure(n: int, branch: int, training: bool) -> None:
    """Shapes and types are those of the documented interface, in training and in evaluation, for any n."""
    module = tca(branch=branch, training=training)
    tree = module.build(rand(3, n, DIM))
    result = module(rand(3, 5, DIM, seed=1), tree)
    plan = TreePlan(n, branch)
    assert isinstance(tree, Tree) and tree.plan == plan
    assert result.output.shape == (3, 5, DIM) and result.output.isfinite().all()
    assert result.path.shape == (3, 5) and result.path.dtype == torch.int64
    assert (result.path >= 0).all() and (result.path < branch**plan.depth).all()
    assert result.log_prob.shape == result.entropy.shape == (3, 5)
    assert (result.log_prob <= 0).all() and (result.entropy >= 0).all()
    assert isinstance(result.tokens, int)
    assert result.tokens == (branch - 1) * plan.depth + -(-n // branch**plan.depth)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("n", "branch"), [(1, 2), (2, 2), (7, 8), (9, 2), (11, 3)])
def test_selected_are_node_ids(n: int, branch: int, masked: bool) -> None:
    """int64, as many as the plan says, every one a node of the tree or -1."""
    module = tca(branch=branch)
    tree = module.build(rand(3, n, DIM), torch.ones(3, n, dtype=torch.bool) if masked else None)
    selected = module(rand(3, 5, DIM, seed=1), tree).selected
    assert selected.shape == (3, 5, tree.plan.tokens) and selected.dtype == torch.int64
    assert (selected >= -1).all() and (selected < tree.plan.nodes).all()


def test_four_tokens_by_hand() -> None:
    """Two blocks of two leaves, one decision: path, selected set, probabilities and output follow from the scores."""
    module = tca(residual="none", hidden=0, aggregator="mean")
    context, query = rand(1, 4, DIM), rand(1, 6, DIM, seed=1)
    result = module(query, module.build(context))
    nodes = torch.cat([context[:, :2].mean(1, keepdim=True), context[:, 2:].mean(1, keepdim=True), context], dim=1)
    keys, values = (half.reshape(6, HEADS, -1) for half in module.block.to_kv(nodes)[0].chunk(2, dim=-1))
    heads = module.block.to_q(query)[0].reshape(6, HEADS, -1)
    for i in range(6):
        scores = torch.einsum("he,the->th", heads[i], keys) / (DIM // HEADS) ** 0.5
        policy = scores[:2].softmax(0).mean(1)
        choice = int(policy.argmax())
        chosen = [1 - choice, 2 + 2 * choice, 3 + 2 * choice]
        attended = torch.einsum("th,the->he", scores[chosen].softmax(0), values[chosen]).flatten()
        assert int(result.path[0, i]) == choice
        assert result.selected[0, i].tolist() == chosen
        assert close(result.log_prob[0, i], policy[choice].log())
        assert close(result.entropy[0, i], -(policy * policy.log()).sum())
        assert close(result.output[0, i], module.block.to_out(attended))


@pytest.mark.parametrize("mask", [None, holed_mask()], ids=["all-real", "ragged"])
def test_the_output_is_attention_over_the_selected_nodes(mask: Tensor | None) -> None:
    module = tca(branch=3, residual="none", hidden=0)
    tree = module.build(rand(6, 11, DIM), mask)
    query = rand(6, 5, DIM, seed=1)
    result = module(query, tree)
    rows = torch.arange(6)[:, None, None]
    keys, values = (part[rows, result.selected.clamp_min(0)].transpose(2, 3) for part in (tree.keys, tree.values))
    heads = module.block.to_q(query).reshape(6, 5, HEADS, 1, -1)
    visible = (result.selected >= 0)[:, :, None, None]
    expected = F.scaled_dot_product_attention(heads, keys, values, attn_mask=visible)
    assert close(result.output, module.block.to_out(expected.flatten(2)))
    assert torch.equal(result.tokens_read, (result.selected >= 0).sum(-1))


def test_a_tree_is_a_value() -> None:
    """Two trees queried in turn give what each gives alone, and building changes no earlier tree."""
    module, query = tca(), rand(2, 5, DIM, seed=9)
    contexts = [rand(2, 9, DIM, seed=seed) for seed in (1, 2)]
    alone = [module(query, module.build(context)).output for context in contexts]
    trees = [module.build(context) for context in contexts]
    for index in (0, 1, 0, 0, 1):
        assert torch.equal(module(query, trees[index]).output, alone[index])


def test_the_same_seed_gives_the_same_bits() -> None:
    def run(seed: int) -> tuple[Tensor, Tensor]:
        module = tca(seed, training=True)
        result = module(rand(2, 5, DIM, seed=1), module.build(rand(2, 9, DIM)))
        return result.output, result.log_prob

    assert all(torch.equal(a, b) for a, b in zip(run(4), run(4), strict=True))
    assert not torch.equal(run(4)[0], run(5)[0])


def test_evaluation_takes_the_most_likely_child_every_time() -> None:
    """argmax: repeatable, no random numbers consumed, and no sampled path of one decision is likelier."""
    module, query = tca(), rand(2, 50, DIM, seed=1)
    tree = module.build(rand(2, 4, DIM))
    state = torch.get_rng_state()
    first, again = module(query, tree), module(query, tree)
    assert torch.equal(first.output, again.output) and torch.equal(torch.get_rng_state(), state)
    assert (first.log_prob >= torch.tensor(0.5).log() - 1e-6).all()
    sampled = [module(query, tree, uniforms(2, 50, 1, seed=seed)).log_prob for seed in range(5)]
    assert all((first.log_prob >= log_prob - 1e-6).all() for log_prob in sampled)


def test_training_samples_paths() -> None:
    module, query = tca(training=True), rand(1, 200, DIM, seed=1)
    tree = module.build(rand(1, 16, DIM))
    assert not torch.equal(module(query, tree).path, module(query, tree).path)
    assert module(query, tree).path.unique().numel() == 8


def test_noise_fixes_the_path_in_training_and_evaluation() -> None:
    """Noise 0 takes the first child everywhere, noise just below 1 the last, and equal noise equal paths."""
    module, query = tca(training=True), rand(2, 5, DIM, seed=1)
    tree, noise = module.build(rand(2, 16, DIM)), uniforms(2, 5, 3)
    assert (module(query, tree, torch.zeros(2, 5, 3)).path == 0).all()
    assert (module(query, tree, torch.full((2, 5, 3), 1 - 2**-24)).path == 7).all()
    trained = module(query, tree, noise)
    assert torch.equal(trained.path, module(query, tree, noise).path)
    assert torch.equal(trained.path, module.eval()(query, tree, noise).path)


def test_a_generator_decides_the_sampled_paths() -> None:
    module, query = tca(training=True), rand(1, 200, DIM, seed=1)
    tree = module.build(rand(1, 16, DIM))
    paths = [module(query, tree, generator=torch.Generator().manual_seed(seed)).path for seed in (7, 7, 8)]
    assert torch.equal(paths[0], paths[1]) and not torch.equal(paths[0], paths[2])


@pytest.mark.parametrize("mask", [None, tail_mask(), holed_mask()], ids=["all-real", "tail", "holes"])
@pytest.mark.parametrize("residual", ["pre", "doubled", "none"])
def test_full_retrieval_is_cross_attention_over_the_leaves(residual: str, mask: Tensor | None) -> None:
    module, query, context = tca(residual=residual, retrieval="full"), rand(6, 5, DIM, seed=1), rand(6, 11, DIM)
    plain = CrossAttention(DIM, HEADS, residual=residual).eval()
    plain.block.load_state_dict(module.block.state_dict())
    result = module(query, module.build(context, mask))
    assert close(result.output, plain(query, context, mask).output)
    assert result.tokens == plain(query, context, mask).tokens == 11
    assert (result.log_prob == 0).all() and (result.entropy == 0).all()


def test_the_search_and_the_full_reading_come_at_once() -> None:
    module, query, noise = tca(training=True), rand(6, 5, DIM, seed=1), uniforms(6, 5, 3)
    tree = module.build(rand(6, 11, DIM), tail_mask())
    found = module(query, tree, noise, leaves=True)
    assert close(found.output, module(query, tree, noise).output) and module(query, tree, noise).leaves is None
    module.retrieval = "full"
    assert close(found.leaves, module(query, tree).output)
    again = module(query, tree, noise, leaves=True)  # it is trained by its search, too
    assert torch.equal(again.path, found.path) and close(again.output, found.output)


def test_choices_lead_the_search() -> None:
    """They win over noise and over the most likely child; -1 leaves a decision alone."""
    module, query = tca(), rand(2, 5, DIM, seed=1)
    tree = module.build(rand(2, 16, DIM))
    usual, noise = module(query, tree), uniforms(2, 5, 3)
    for bits in range(8):
        choices = torch.tensor([bits >> 2 & 1, bits >> 1 & 1, bits & 1]).expand(2, 5, 3)
        assert (module(query, tree, noise, choices).path == bits).all()
        assert (module(query, tree, choices=choices).path == bits).all()
    left = torch.full((2, 5, 3), -1)
    assert torch.equal(module(query, tree, choices=left).path, usual.path)
    left[..., 0] = 1 - usual.path // 4
    assert torch.equal(module(query, tree, choices=left).path // 4, 1 - usual.path // 4)


class Strongest(nn.Module):
    """Per channel the largest child, scaled: an aggregator of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))

    def forward(self, children: Tensor, mask: Tensor | None = None) -> Tensor:
        filled = children if mask is None else children.masked_fill(~mask[..., None], -1e9)
        return filled.amax(1) * self.scale


def test_any_module_can_be_the_aggregator() -> None:
    module, context = tca(aggregator=Strongest()), rand(1, 8, DIM)
    tree = module.build(context)
    assert torch.equal(tree.nodes[0, 0], context[0, :4].amax(0)) and torch.equal(tree.nodes[0, -8:], context[0])
    module(rand(1, 5, DIM, seed=1), tree).output.sum().backward()
    assert module.aggregator.scale.grad is not None and module.aggregator.scale.grad.abs().sum() > 0
    ragged = module(rand(6, 5, DIM), module.build(rand(6, 11, DIM), tail_mask()))
    assert ragged.output.isfinite().all() and ragged.output.abs().max() < 1e3


def test_a_tree_of_means_averages_keys_and_values() -> None:
    """After all projections and norms, and without weights of its own."""
    module, context = tca(aggregator="mean"), rand(1, 8, DIM)
    tree = module.build(context)
    assert tree.nodes is None and module.aggregator is None
    for nodes, tokens in zip((tree.keys[0], tree.values[0]), module.block.key_values(context), strict=True):
        assert torch.equal(nodes[-8:], tokens[0])
        assert close(nodes[0], tokens[0, :4].mean(0)) and close(nodes[5], tokens[0, 6:].mean(0))
    assert {name.partition(".")[0] for name, _ in module.named_parameters()} == {"block"}


@pytest.mark.parametrize("mask", [None, holed_mask()], ids=["all-real", "ragged"])
@pytest.mark.parametrize("settings", [{}, {"aggregator": "mean", "log_count": True}], ids=["learned", "means"])
@torch.no_grad()
def test_a_budget_of_one_path_reports_what_the_path_reports(settings: dict[str, object], mask: Tensor | None) -> None:
    """Nodes read, and nodes scored, and how many of both."""
    module, query = tca(**settings), rand(6, 5, DIM, seed=1)
    tree = module.build(rand(6, 11, DIM), mask)
    path, found = module(query, tree), module(query, tree, budget=1)
    assert close(found.output, path.output) and torch.equal(found.path, path.path)
    assert torch.equal(found.tokens_read, path.tokens_read) and found.tokens == path.tokens
    assert torch.equal(found.nodes_scored, path.nodes_scored)


def test_a_call_overrides_the_budget_of_the_module() -> None:
    module, query = tca(budget=6), rand(2, 5, DIM, seed=1)
    tree = module.build(rand(2, 11, DIM))
    assert torch.equal(module(query, tree).output, tca()(query, tree, budget=6).output)
    assert torch.equal(module(query, tree, budget=9).rows, tca()(query, tree, budget=9).rows)
    module.retrieval = "full"  # reads all leaves whatever the budget
    assert close(module(query, tree, budget=6).output, tca()(query, tree, budget=11).output)


@pytest.mark.parametrize("aggregator", ["transformer", "mean"])
def test_context_may_have_its_own_width(aggregator: str) -> None:
    module = tca(kdim=12, aggregator=aggregator)
    result = module(rand(2, 5, DIM), module.build(rand(2, 9, 12)))
    assert result.output.shape == (2, 5, DIM)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", ["plain", "tree"])
def test_other_precisions_run_and_agree(kind: str, dtype: torch.dtype) -> None:
    """The result has the dtype asked for, near that of float32; probabilities are never below float32."""
    module, query, context = attention(kind), rand(2, 5, DIM, seed=1), rand(2, 9, DIM)
    expected = module(query, module.build(context)).output
    module = module.to(dtype)
    result = module(query.to(dtype), module.build(context.to(dtype)))
    assert result.output.dtype == dtype
    assert float((result.output - expected).detach().abs().median()) <= 2 * torch.finfo(dtype).eps + 1e-6
    if kind == "tree":
        assert result.log_prob.dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("kind", ["plain", "tree"])
def test_autocast_runs_forward_and_backward(kind: str) -> None:
    module = attention(kind).train()
    with torch.autocast("cpu", torch.bfloat16):
        output = module(rand(2, 5, DIM), module.build(rand(2, 9, DIM))).output
    output.float().square().sum().backward()
    assert output.isfinite().all() and all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


def trained(module: TreeCrossAttention) -> TreeCrossAttention:
    """The module after one step of training."""
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    result = module.train()(rand(2, 5, DIM, seed=1), module.build(rand(2, 9, DIM)))
    (result.output.square().sum() + result.log_prob.sum()).backward()
    optimizer.step()
    return module.eval()


def test_deepcopy_after_a_training_step_gives_an_equal_independent_module() -> None:
    module, query, context = trained(tca()), rand(2, 5, DIM, seed=2), rand(2, 9, DIM, seed=3)
    twin = copy.deepcopy(module)
    before = module(query, module.build(context)).output
    assert torch.equal(twin(query, twin.build(context)).output, before)
    trained(twin)
    assert torch.equal(module(query, module.build(context)).output, before)
    assert not torch.equal(twin(query, twin.build(context)).output, before)


def test_state_dict_round_trip_gives_equal_bits() -> None:
    module, other, query, context = trained(tca(0)), tca(1), rand(2, 5, DIM, seed=2), rand(2, 9, DIM, seed=3)
    other.load_state_dict(module.state_dict())
    one, two = (m(query, m.build(context)) for m in (module, other))
    assert torch.equal(one.output, two.output) and torch.equal(one.log_prob, two.log_prob)


@pytest.mark.parametrize("impl", ["reference", "auto"])
@torch.no_grad()
def test_concurrent_inference_from_8_threads_equals_serial(impl: str) -> None:
    module = tca(impl=impl)
    tree = module.build(rand(4, 33, DIM))

    def answer(seed: int) -> Tensor:
        fresh = module.build(rand(4, 9 + seed % 7, DIM, seed=seed))
        query = rand(4, 17, DIM, seed=seed)
        return torch.cat([module(query, tree).output, module(query, fresh).output])

    serial = [answer(seed) for seed in range(64)]
    with ThreadPoolExecutor(8) as pool:
        parallel = list(pool.map(answer, range(64)))
    assert all(torch.equal(one, two) for one, two in zip(serial, parallel, strict=True))


@pytest.mark.parametrize("training", [False, True])
def test_a_taken_over_attention_is_in_the_mode_of_the_original(training: bool) -> None:
    original = nn.MultiheadAttention(DIM, HEADS, batch_first=True).train(training)
    for module in (TreeCrossAttention.from_multihead(original), CrossAttention.from_multihead(original)):
        assert module.training is training and module.block.training is training


@pytest.mark.parametrize("kind", ["plain", "tree"])
def test_what_was_prepared_outside_autocast_can_be_asked_inside(kind: str) -> None:
    module, query = attention(kind), rand(2, 3, DIM, seed=1)
    memory = module.build(rand(2, 9, DIM))
    with torch.autocast("cpu", torch.bfloat16):
        inside = module(query, memory).output
    assert close(inside.float(), module(query, memory).output, 0.1)


@pytest.mark.parametrize("value", [-3.0, 4.0, 100.0])
def test_noise_that_means_nothing_is_refused(value: float) -> None:
    module = tca()
    tree = module.build(rand(1, 9, DIM))
    with pytest.raises(InputError, match=r"^noise: expected uniforms in \[0, 1\), got numbers from"):
        module(rand(1, 3, DIM), tree, noise=torch.full((1, 3, tree.plan.depth), value))


@pytest.mark.parametrize(
    ("choices", "problem"),
    [
        (torch.zeros(1, 3, 3), r"^choices: expected dtype torch.int64, got torch.float32"),
        (torch.full((1, 3, 3), 2), r"^choices: expected children from 0 to 1, or -1, got numbers from 2 to 2"),
        (torch.zeros(1, 3, 2, dtype=torch.int64), r"^choices: expected shape \(b=1, m=3, depth=3\), got \(1, 3, 2\)"),
    ],
)
def test_choices_that_mean_nothing_are_refused(choices: Tensor, problem: str) -> None:
    module = tca()
    with pytest.raises(InputError, match=problem):
        module(rand(1, 3, DIM), module.build(rand(1, 9, DIM)), choices=choices)


@pytest.mark.parametrize("name", ["detach", "bias"])
def test_texts_do_not_pass_for_true(name: str) -> None:
    with pytest.raises(InputError, match=f"^{name}: expected True or False, got 'no'"):
        tca(**{name: "no"})


def test_a_mistyped_retrieval_does_not_search() -> None:
    module = tca()
    module.retrieval = "fulll"  # type: ignore[assignment]
    with pytest.raises(InputError, match=r"^retrieval: expected one of policy, full"):
        module(rand(1, 3, DIM), module.build(rand(1, 9, DIM)))


def test_an_aggregator_of_another_shape_is_refused() -> None:
    class Two(nn.Module):
        def forward(self, children: Tensor, mask: Tensor | None) -> Tensor:
            return children[:, :2]

    with pytest.raises(
        InputError, match=r"^aggregator: expected one summary per parent, shape \(4, 16\), got \(4, 2, 16\)"
    ):
        tca(aggregator=Two()).build(rand(1, 8, DIM))
