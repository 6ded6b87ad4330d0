"""Bad input: every mistake is refused by one line that names the argument, what was expected and what came."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import retreever
from retreever.attention import TreeCrossAttention
from retreever.batch import Batch
from retreever.cross_attention import CrossAttention
from retreever.errors import ConfigError, InputError, RetreeverError
from retreever.models.perceiver_io import PerceiverIO
from retreever.models.retreever import ReTreever
from retreever.models.retreever_config import ReTreeverConfig
from retreever.models.transformer_ca import TransformerCA
from retreever.objective import ObjectiveConfig
from retreever.ops.search.api import full_attention, tree_attention
from retreever.tree.order import leaf_order
from retreever.tree.plan import TreePlan

Case = tuple[Callable[..., object], str, str, str]  # the call, the argument it names, what it expected, what it got
MODELS = (ReTreever, TransformerCA, PerceiverIO)
TINY = {"dim": 16, "heads": 2, "layers": 1, "hidden": 16}

torch.manual_seed(0)
plain, tca = CrossAttention(16, 4), TreeCrossAttention(16, 4)
context, query, real = torch.randn(2, 9, 16), torch.randn(2, 3, 16), torch.ones(2, 9, dtype=torch.bool)
tree, noise, plan = tca.build(context), torch.rand(2, 3, 3), TreePlan(9)
q, nodes = torch.randn(2, 3, 4, 4), torch.randn(2, plan.nodes, 4, 4)
xc, yc, xt, yt = torch.randn(2, 9, 1), torch.randn(2, 9, 1), torch.randn(2, 3, 1), torch.randn(2, 3, 1)
symbols, classes = torch.zeros(2, 9, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)


def batch(**parts: Tensor | None) -> Batch:
    """A good batch but for the parts given."""
    return Batch(**({"xc": xc, "yc": yc, "xt": xt, "yt": yt} | parts))


def meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def check(call: Callable[[], object], argument: str, expected: str, got: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    name, _, rest = str(caught.value).partition(": expected ")
    wanted, _, came = rest.rpartition(", got ")
    assert "\n" not in str(caught.value)
    assert name == argument and expected in wanted and got in came


MODULES: list[Case] = [
    (lambda: CrossAttention(16.0), "dim", "an int >= 1", "float 16.0"),
    (lambda: CrossAttention(16, True), "heads", "an int >= 1", "bool True"),
    (lambda: CrossAttention(16, 0), "heads", "an int >= 1", "0"),
    (lambda: CrossAttention(16, 3), "heads", "a divisor of dim=16", "3"),
    (lambda: CrossAttention(16, kdim=0), "kdim", "an int >= 1", "0"),
    (lambda: CrossAttention(16, hidden=-1), "hidden", "an int >= 0", "-1"),
    (lambda: CrossAttention(16, dropout=1.0), "dropout", "a number in [0, 1)", "1.0"),
    (lambda: CrossAttention(16, dropout=-0.1), "dropout", "a number in [0, 1)", "-0.1"),
    (lambda: CrossAttention(16, dropout=float("nan")), "dropout", "a number in [0, 1)", "nan"),
    (lambda: CrossAttention(16, dropout="0.1"), "dropout", "a number in [0, 1)", "0.1"),
    (lambda: CrossAttention(16, residual="post"), "residual", "one of pre, normalised, doubled, none", "'post'"),
    (lambda: TreeCrossAttention(16, branch=1), "branch", "an int >= 2", "1"),
    (lambda: TreeCrossAttention(16, branch=True), "branch", "an int >= 2", "bool True"),
    (lambda: TreeCrossAttention(16, branch=2.0), "branch", "an int >= 2", "float 2.0"),
    (lambda: TreeCrossAttention(16, aggregator="max"), "aggregator", "one of transformer, mean", "'max'"),
    (lambda: TreeCrossAttention(16, aggregator=nn.Linear), "aggregator", "one of transformer, mean", "Linear"),
    (lambda: TreeCrossAttention(16, retrieval="all"), "retrieval", "one of policy, full", "'all'"),
    (lambda: TreeCrossAttention(16, kdim=10), "heads", "a divisor of kdim=10", "4"),
    (lambda: TreeCrossAttention(16, impl="cuda"), "impl", "one of auto, reference", "'cuda'"),
]
BUILD: list[Case] = [
    case
    for module in (plain, tca)
    for case in (
        (lambda m=module: m.build([[1.0]]), "context", "a tensor of shape (b, n, c)", "list"),
        (lambda m=module: m.build(context[0]), "context", "shape (b, n, c=16)", "2 axes (9, 16)"),
        (lambda m=module: m.build(context[..., :8]), "context", "shape (b, n, c=16)", "(2, 9, 8)"),
        (lambda m=module: m.build(context.long()), "context", "a floating point dtype", "torch.int64"),
        (lambda m=module: m.build(context.double()), "context", "the dtype of the weights", "torch.float64"),
        (lambda m=module: m.build(context / 0), "context", "finite values", "288 NaN or infinite of 288"),
        (lambda m=module: m.build(context, [True]), "mask", "a tensor of shape (b, n)", "list"),
        (lambda m=module: m.build(context, real[0]), "mask", "shape (b=2, n=9)", "1 axes (9,)"),
        (lambda m=module: m.build(context, real[:, :5]), "mask", "shape (b=2, n=9)", "(2, 5)"),
        (lambda m=module: m.build(context, real.float()), "mask", "dtype torch.bool (True = real)", "torch.float32"),
        (lambda m=module: m.build(context, ~real), "mask", "at least one real token in every row", "2 rows with none"),
        (lambda m=module: m.build(context, meta(real)), "mask", "the device of context (cpu)", "meta"),
        (lambda m=module: m.build(meta(context)), "context", "the device of the weights (cpu)", "meta"),
    )
]
BUILD += [
    (lambda: plain.build(context[:, :0]), "context", "at least one token", "(2, 0, 16)"),
    (lambda: tca.build(context[:, :0]), "context", "at least one token", "(2, 0, 16)"),
]
CALL: list[Case] = [
    case
    for module, memory in ((plain, plain.build(context)), (tca, tree))
    for case in (
        (lambda m=module, t=memory: m([1.0], t), "query", "a tensor of shape (b, m, d)", "list"),
        (lambda m=module, t=memory: m(query[0], t), "query", "shape (b=2, m, d=16)", "2 axes (3, 16)"),
        (lambda m=module, t=memory: m(query[:1], t), "query", "shape (b=2, m, d=16)", "(1, 3, 16)"),
        (lambda m=module, t=memory: m(query[..., :8], t), "query", "shape (b=2, m, d=16)", "(2, 3, 8)"),
        (lambda m=module, t=memory: m(query.long(), t), "query", "a floating point dtype", "torch.int64"),
        (lambda m=module, t=memory: m(query.double(), t), "query", "the dtype of the weights", "torch.float64"),
        (lambda m=module, t=memory: m(query / 0, t), "query", "finite values", "96 NaN or infinite of 96"),
        (lambda m=module, t=memory: m(meta(query), t), "query", "the device of", "meta"),
    )
]
CALL += [
    (lambda: plain(query, None), "context", "a tensor of shape (b, n, c)", "NoneType"),
    (lambda: plain(query, tree), "context", "a tensor of shape (b, n, c)", "Tree"),
    (lambda: plain(query, CrossAttention(16, 2).build(context)), "keys", "h=4, e=4", "2, 8)"),
    (lambda: tca(query, context), "tree", "a Tree made by build()", "Tensor"),
    (lambda: tca(query, plain.build(context)), "tree", "a Tree made by build()", "KeyValues"),
    (lambda: tca(query, TreeCrossAttention(16, 2).build(context)), "keys", "h=4, e=4", "2, 8)"),
    (lambda: tca(query, tree, noise[..., :1]), "noise", "shape (b=2, m=3, depth=3)", "(2, 3, 1)"),
    (lambda: tca(query, tree, noise.long()), "noise", "a floating point dtype", "torch.int64"),
    (lambda: tca(query, tree, meta(noise)), "noise", "the device of query (cpu)", "meta"),
    (lambda: tca(query, tree, [0.5]), "noise", "a tensor of shape (b, m, depth)", "list"),
    (lambda: tca(query, tree, noise * torch.nan), "noise", "uniforms in [0, 1)", "numbers from nan to nan"),
]
OPERATORS: list[Case] = [
    (lambda: TreePlan(0), "n", "an int >= 1", "0"),
    (lambda: TreePlan(4, 1), "branch", "an int >= 2", "1"),
    (lambda: TreePlan(4, 2, 1), "block", "0 or an int >= 2 (n=4, branch=2)", "1"),
    (lambda: tree_attention(q, nodes, nodes, 9), "plan", "a TreePlan", "int"),
    (lambda: tree_attention(q[0], nodes, nodes, plan), "q", "shape (b, m, h, e)", "3 axes (3, 4, 4)"),
    (lambda: tree_attention(q.long(), nodes, nodes, plan), "q", "a floating point dtype", "torch.int64"),
    (lambda: tree_attention(q, nodes[:, 1:], nodes, plan), "keys", "shape (b=2, t=30, h=4, e=4)", "(2, 29, 4, 4)"),
    (lambda: tree_attention(q, nodes, nodes.double(), plan), "values", "the dtype of q", "torch.float64"),
    (lambda: tree_attention(q, meta(nodes), nodes, plan), "keys", "the device of q (cpu)", "meta"),
    (lambda: tree_attention(q, nodes, nodes, plan, real), "node_mask", "shape (b=2, t=30)", "(2, 9)"),
    (lambda: tree_attention(q, nodes, [1], plan), "values", "a tensor of shape (b, t, h, e)", "list"),
    (lambda: tree_attention(q, nodes, nodes, plan, [True]), "node_mask", "a tensor of shape (b, t)", "list"),
    (lambda: tree_attention(q, nodes, nodes, plan, impl="fast"), "impl", "one of auto, reference", "'fast'"),
    (lambda: full_attention(q, nodes, nodes[..., :2], plan), "values", "shape (b=2, t=30, h=4, e=4)", "(2, 30, 4, 2)"),
    (lambda: leaf_order("hilbert", xc), "order", "one of given, axis, kd", "'hilbert'"),
    (lambda: leaf_order("axis", xc, axis=1), "axis", "an axis of x, 0 to 0", "1"),
    (lambda: leaf_order("kd", xc, real.int()), "mask", "dtype torch.bool", "torch.int32"),
    (lambda: leaf_order("kd", xc, meta(real)), "mask", "the device of x (cpu)", "meta"),
]
CONFIGS: list[Case] = [
    (lambda: TransformerCA(head="beta"), "head", "one of gaussian, bounded, floored, categorical, point", "'beta'"),
    (
        lambda: TransformerCA(encoder="gru"),
        "encoder",
        "one of identity, transformer, local, linformer, chordmixer",
        "'gru'",
    ),
    (lambda: TransformerCA(inputs="image"), "inputs", "one of points, sequence", "'image'"),
    (lambda: TransformerCA(outputs=-1), "outputs", "an int >= 0", "-1"),
    (lambda: TransformerCA(heads=3), "heads", "a divisor of dim=64", "3"),
    (lambda: TransformerCA(layers=-1), "layers", "an int >= 0", "-1"),
    (lambda: PerceiverIO(layers=-1), "layers", "an int >= 0", "-1"),
    (lambda: PerceiverIO(latents=0), "latents", "an int >= 1", "0"),
    (lambda: ReTreever(residual="post"), "residual", "one of pre, normalised, doubled, none", "'post'"),
    (lambda: ReTreever(aggregator="sum"), "aggregator", "one of transformer, mean", "'sum'"),
    (lambda: ReTreever(order="hilbert"), "order", "one of given, axis, kd", "'hilbert'"),
    (lambda: ReTreever(retrieval="some"), "retrieval", "one of policy, full", "'some'"),
    (lambda: ReTreever(layers=1, order="axis", axis=3).predict(xc, yc, xt), "axis", "an axis of x, 0 to 0", "3"),
    (lambda: ReTreever(impl="cuda"), "impl", "one of auto, reference", "'cuda'"),
    (lambda: ReTreever(reward="r2"), "reward", "one of log-likelihood", "'r2'"),
    (lambda: ObjectiveConfig(reward="r2"), "reward", "one of log-likelihood, squared-error", "'r2'"),
    (lambda: ObjectiveConfig(baseline="ema"), "baseline", "one of none, constant", "'ema'"),
    (lambda: ObjectiveConfig(lambda_rl=-1), "lambda_rl", "a number >= 0", "-1"),
    (lambda: ObjectiveConfig(alpha=float("nan")), "alpha", "a number >= 0", "nan"),
    (lambda: ObjectiveConfig(alpha="1"), "alpha", "a number >= 0", "1"),
]
ON_MODELS: list[Case] = [
    (lambda m: m.predict(xc[0], yc, xt), "xc", "shape (b, n, dx)", "2 axes (9, 1)"),
    (lambda m: m.predict(xc, yc[:1], xt), "yc", "shape (b=2, n=9, dy)", "(1, 9, 1)"),
    (lambda m: m.predict(xc, yc / 0, xt), "yc", "finite values", "18 NaN or infinite of 18"),
    (lambda m: m.predict(xc, yc, xt, ~real), "mask", "at least one real token", "2 rows with none"),
    (lambda m: m.loss(batch(xt=xt[:, :0], yt=yt[:, :0])), "xt", "at least one point", "(2, 0, 1)"),
    (lambda m: m.loss(batch(target_mask=real[:, :3].int())), "target_mask", "dtype torch.bool", "torch.int32"),
    (lambda m: m.predict(xc.repeat(1, 1, 2), yc, xt), "xc", "dx=1", "(2, 9, 2)"),
    (lambda m: m.predict(xc, yc.repeat(1, 1, 2), xt), "yc", "dy=1", "(2, 9, 2)"),
    (lambda m: m.predict(xc, symbols, xt), "yc", "dy=1", "(2, 9)"),
    (lambda m: m.predict(xc.double(), yc.double(), xt.double()), "xc", "torch.float32", "torch.float64"),
    (lambda m: m.predict(meta(xc), meta(yc), meta(xt)), "xc", "the device of the weights (cpu)", "meta"),
    (lambda m: m.predict(xc, yc, [0.5]), "xt", "a tensor of shape (b, m, dx)", "list"),
    (lambda m: m.predict(xc, yc, xt[0]), "xt", "shape (b=2, m, dx=1)", "(3, 1)"),
    (lambda m: m.predict(xc, yc, xt[:1]), "xt", "shape (b=2, m, dx=1)", "(1, 3, 1)"),
    (lambda m: m.predict(xc, yc, xt.repeat(1, 1, 2)), "xt", "shape (b=2, m, dx=1)", "(2, 3, 2)"),
    (lambda m: m.predict(xc, yc, xt.long()), "xt", "a floating point dtype", "torch.int64"),
    (lambda m: m.predict(xc, yc, xt / 0), "xt", "finite values", "6 NaN or infinite of 6"),
    (lambda m: m.loss(batch(yt=yt.repeat(1, 1, 2))), "yt", "dy=1", "(2, 3, 2)"),
    (lambda m: m.loss(batch(yt=classes)), "yt", "dy=1", "(2, 3)"),
    (lambda m: m.loss(None), "batch", "a Batch", "NoneType"),
]
ON_SEQUENCE_MODELS: list[Case] = [
    (lambda m: m.predict(xc, symbols + 12, xt), "yc", "integers from 0 to 11", "12 to 12"),
    (lambda m: m.predict(xc, symbols - 1, xt), "yc", "integers from 0 to 11", "-1 to -1"),
    (lambda m: m.predict(xc, yc.clamp(0, 1), xt), "yc", "integers (b=2, n=9)", "(2, 9, 1)"),
    (lambda m: m.predict(xc, symbols.int(), xt), "yc", "torch.int64", "torch.int32"),
    (lambda m: m.predict(xc.repeat(1, 1, 3), symbols, xt), "xc", "dx=1", "(2, 9, 3)"),
    (lambda m: m.loss(batch(yc=symbols, yt=classes + 12)), "yt", "integers from 0 to 11", "12 to 12"),
    (lambda m: m.loss(batch(yc=symbols, yt=yt)), "yt", "integers (b=2, m=3)", "(2, 3, 1)"),
]
COLUMNS = ("call", "argument", "expected", "got")


@pytest.mark.parametrize(COLUMNS, [*MODULES, *BUILD, *CALL, *OPERATORS, *CONFIGS])
def test_a_mistake_is_refused_in_one_line(call: Callable[[], object], argument: str, expected: str, got: str) -> None:
    check(call, argument, expected, got)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(COLUMNS, ON_MODELS)
def test_models_refuse(kind: type[nn.Module], call: Callable, argument: str, expected: str, got: str) -> None:
    check(lambda: call(kind(**TINY)), argument, expected, got)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(COLUMNS, ON_SEQUENCE_MODELS)
def test_sequence_models_refuse(kind: type[nn.Module], call: Callable, argument: str, expected: str, got: str) -> None:
    check(lambda: call(kind(**TINY, inputs="sequence", head="categorical", dim_y=12)), argument, expected, got)


@pytest.mark.parametrize(
    ("call", "argument", "expected", "got"),
    [
        (lambda: ReTreever(objective={"detours": 0.1}), "objective", "an ObjectiveConfig", "dict"),
        (lambda: ReTreever(order_seed="x"), "order_seed", "an int >= 0", "'x'"),
        (lambda: ObjectiveConfig(constant="x"), "constant", "a number", "'x'"),
    ],
)
def test_settings_of_another_type_are_refused(call: Callable, argument: str, expected: str, got: str) -> None:
    check(call, argument, expected, got)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ReTreever(ReTreeverConfig(), dim=4), "expected either a config or keyword arguments, got both (dim)"),
        (lambda: ReTreever(brnch=2), "brnch: expected settings among"),
        (lambda: TransformerCA(branch=2), "branch: expected settings among"),
        (lambda: ReTreever({"dim": 4}), "config: expected"),
        (lambda: PerceiverIO(ReTreeverConfig()), "config: expected"),
    ],
)
def test_contradicting_and_unknown_settings_are_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_all_errors_are_retreever_errors() -> None:
    errors = [getattr(retreever, name) for name in retreever.__all__ if name.endswith("Error")]
    assert len(errors) == 6 and all(issubclass(error, RetreeverError) for error in errors)
    assert issubclass(InputError, ValueError) and issubclass(ConfigError, ValueError)


def spoiled(dice: random.Random, tensor: Tensor) -> Tensor:
    """The tensor as it is, or with one thing wrong."""
    ways: list[Callable[[], Tensor]] = [
        lambda: tensor[:1], lambda: tensor[:, :0], lambda: tensor[0], lambda: tensor[..., :-1],
        lambda: tensor.double(), lambda: tensor.long(), lambda: tensor * torch.nan, lambda: tensor / 0,
    ]  # fmt: skip
    return tensor if dice.random() < 0.7 else dice.choice(ways)()


def spoiled_mask(dice: random.Random, n: int) -> Tensor | None:
    scattered = torch.tensor([[dice.random() < 0.6 for _ in range(n)] for _ in range(2)])
    return dice.choice([None, None, scattered, scattered, scattered.int(), scattered[:, 1:], ~scattered | scattered])


def fuzz(call: Callable[[random.Random], Tensor], width: int) -> None:
    """Hundreds of random calls: a finite result of the right shape or a `RetreeverError`, and enough of both."""
    dice, answered = random.Random(0), 0
    for _ in range(300):
        try:
            result = call(dice)
        except RetreeverError as error:
            assert "\n" not in str(error)
        else:
            answered += 1
            assert result.shape[0] in (1, 2) and result.shape[-1] == width and result.isfinite().all()
    assert 60 <= answered <= 240


@pytest.mark.parametrize("kind", [CrossAttention, TreeCrossAttention])
@torch.no_grad()
def test_attention_never_answers_nonsense(kind: type[CrossAttention]) -> None:
    module = kind(16, 4)

    def call(dice: random.Random) -> Tensor:
        n = dice.randint(1, 12)
        memory = module.build(spoiled(dice, torch.randn(2, n, 16)), spoiled_mask(dice, n))
        return module(spoiled(dice, torch.randn(2, 3, 16)), memory).output

    fuzz(call, width=16)


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_models_never_answer_nonsense(kind: type[nn.Module]) -> None:
    model = kind(**TINY, dim_x=2, dim_y=3)

    def call(dice: random.Random) -> Tensor:
        n = dice.randint(1, 12)
        points, values, wanted = (spoiled(dice, torch.randn(2, k, d)) for k, d in ((n, 2), (n, 3), (4, 2)))
        return model.predict(points, values, wanted, spoiled_mask(dice, n)).mean

    fuzz(call, width=3)


def test_settings_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(InputError, match=r"^iterative: expected True or False, got 'no'"):
        PerceiverIO(iterative="no")
    with pytest.raises(InputError, match=r"^aggregator: expected one of transformer, mean, got 'median'"):
        ReTreever(dim=16, aggregator="median")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^impl: expected one of auto, reference, triton, numba, got 'cuda'"):
        TransformerCA(dim=16, impl="cuda")
